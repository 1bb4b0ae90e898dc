"""Operands and expected outputs of the kernels of mixtures of experts, by torch in float32.

A launch is checked alone, so what other launches would have chosen or ordered is random: ids with padding, and the
order of pairs that torch makes of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

from benchmarks.gpu.proofs.operands import Operands, Output
from benchmarks.gpu.proofs.packed_weights import dequantized, halves
from ingot.kernels.experts import SOFTMAX, SPARSEMIXER
from ingot.kernels.gated_activation import SILU


@dataclass(frozen=True)
class _Order:
    """Pairs in the order of experts, as sort_by_expert stores them: only what is needed of each buffer.

    places    [pairs with an expert] in the order of pairs
    """

    places: torch.Tensor
    pairs: torch.Tensor
    experts: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor

    @classmethod
    def of(cls, ids: torch.Tensor, experts: int, tile_rows: int) -> "_Order":
        """Sort ids [pairs], -1 for none."""
        pairs = torch.argsort(ids, stable=True)[int((ids < 0).sum()) :]
        places = torch.zeros_like(ids, dtype=torch.int64)
        places[pairs] = torch.arange(len(pairs), device=ids.device)
        counts = torch.bincount(ids[ids >= 0].long(), minlength=experts).tolist()
        tiles, start = [], 0
        for expert, count in enumerate(counts):
            tiles += [(expert, start + first, start + count) for first in range(0, count, tile_rows)]
            start += count
        listed = torch.tensor(tiles, device=ids.device, dtype=torch.int64).reshape(-1, 3)
        return cls(places[ids >= 0], pairs, *listed.unbind(1))


def fill_experts(of: Operands, pairs: int, experts: int) -> None:
    """Random ids, and an order that fits them, in what other launches would have written.

    pairs      that the launch's buffers hold
    experts    of its weights
    """
    name = of.bound.kernel.name
    if name == "sort_by_expert":
        of.view("ids", (pairs,)).random_(-1, of.size("COUNT"))
    elif name == "combine_experts":
        of.view("ids", (pairs,)).random_(-1, 8)
        of.view("weights", (pairs,)).uniform_(0, 1)
        places = of.view("places", (pairs,))
        places.copy_(torch.randperm(pairs, device=places.device))
    elif name.startswith("grouped_matmul"):
        ids = torch.randint(-1, experts, (pairs,), device=of.view("pairs", (1,)).device)
        order = _Order.of(ids, experts, of.size("TILE_ROWS"))
        for argument, values in (
            ("tile_experts", order.experts),
            ("tile_starts", order.starts),
            ("tile_ends", order.ends),
        ):
            memory = of.view(argument, (of.bound.grid[0],))
            memory.fill_(-1)
            memory[: len(values)] = values
        of.view("pairs", (pairs,))[: len(order.pairs)] = order.pairs


def _route_rows(of: Operands) -> list[Output]:
    rows, count, chosen = of.bound.grid[0], of.size("COUNT"), of.size("CHOSEN")
    logits = of.parts("logits", rows, count, "logits_stride", "part_stride")
    is_softmax = of.size("SCORE") == SOFTMAX.value
    scores = torch.softmax(logits, -1) if is_softmax else torch.sigmoid(logits)
    ranked = logits if is_softmax and not of.size("HAS_BIAS") and of.size("GROUPS") == 1 else scores
    if of.size("HAS_BIAS"):
        ranked = ranked + of.view("bias", (count,))
    if of.size("CHOSEN_GROUPS") < of.size("GROUPS"):
        by_group = ranked.reshape(rows, of.size("GROUPS"), -1)
        kept = _largest(by_group.topk(of.size("GROUP_BEST")).values.sum(-1), of.size("CHOSEN_GROUPS"))
        is_kept = functional.one_hot(kept, of.size("GROUPS")).sum(1).bool()
        ranked = torch.where(is_kept[..., None], by_group, -torch.inf).reshape(rows, count)
    ids = _largest(ranked, chosen)
    weights = scores.gather(1, ids)
    if of.size("SCORE") == SPARSEMIXER.value:
        ids = _largest(logits, chosen)
        weights = _mixed_sparsely(logits, ids, of.number("margin"))
    if of.size("NORMALISES"):
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=of.number("least_sum"))
    padding = (of.view("slots", (rows,)) < 0)[:, None]
    found, stored = of.view("ids", (rows, chosen)), of.view("weights", (rows, chosen))
    wanted = torch.where(padding, -1, ids)
    return [
        Output("ids", lambda: (found != wanted).double() + 1, torch.ones_like(found, dtype=torch.float64), found, 0),
        Output("weights", stored.float, weights * of.number("scale"), stored),
    ]


def _mixed_sparsely(logits: torch.Tensor, ids: torch.Tensor, margin: float) -> torch.Tensor:
    """The share of each choice in a softmax over itself and the experts left that are near it."""
    left, weights = logits, []
    for at in ids.T[:, :, None]:
        top = logits.gather(1, at)
        is_far = top - logits > margin * torch.maximum(logits.abs(), top)
        weights.append(left.masked_fill(is_far, -torch.inf).softmax(-1).gather(1, at))
        left = left.scatter(1, at, -torch.inf)
    return torch.cat(weights, 1)


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Places of the largest values of each row, of equal ones the first."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _sort_by_expert(of: Operands) -> list[Output]:
    count, tiles = of.whole("num_pairs"), of.whole("num_tiles")
    ids = of.view("ids", (count,))
    order = _Order.of(ids, of.size("COUNT"), of.size("TILE_ROWS"))
    experts = torch.full((tiles,), -1, device=ids.device)
    experts[: len(order.experts)] = order.experts
    places = of.view("places", (count,))
    return [
        _exact("places", places, lambda: places[ids >= 0], order.places),
        _listed(of, "pairs", count, order.pairs),
        _listed(of, "tile_experts", tiles, experts),
        _listed(of, "tile_starts", tiles, order.starts),
        _listed(of, "tile_ends", tiles, order.ends),
    ]


def _listed(of: Operands, name: str, count: int, wanted: torch.Tensor) -> Output:
    memory = of.view(name, (count,))
    return _exact(name, memory, lambda: memory[: len(wanted)], wanted)


def _combine_experts(of: Operands) -> list[Output]:
    rows, columns, chosen = of.bound.grid[0], of.size("COLUMNS"), of.size("CHOSEN")
    results = of.rows("results", rows * chosen, columns, "results_stride").float()
    ids, places, weights = (of.view(name, (rows, chosen)) for name in ("ids", "places", "weights"))
    expected = torch.zeros(rows, columns, device=results.device)
    for j in range(chosen):
        known = ids[:, j] >= 0
        terms = results[torch.where(known, places[:, j], 0).long()] * weights[:, j, None]
        expected += torch.where(known[:, None], terms, 0.0)
    out = of.rows("out", rows, columns, "out_stride")
    return [Output("out", out.float, expected, out)]


def _grouped(of: Operands) -> list[Output]:
    """Each expert's rows times its weight."""
    n, columns, chosen = of.size("N"), of.size("COLUMNS"), of.size("CHOSEN")
    experts, starts, ends = (
        of.view(name, (of.bound.grid[0],)).long() for name in ("tile_experts", "tile_starts", "tile_ends")
    )
    used = int(ends[experts >= 0].max()) if bool((experts >= 0).any()) else 0
    pairs = of.view("pairs", (max(used, 1),))[:used].long()
    read = pairs // chosen if chosen else torch.arange(used, device=pairs.device)
    x = of.rows("x", int(read.max()) + 1 if used else 1, columns, "x_stride")
    made = [torch.zeros(0, n, device=pairs.device)]
    for expert in sorted(set(experts[experts >= 0].tolist())):
        begin, end = int(starts[experts == expert].min()), int(ends[experts == expert].max())
        result = x[read[begin:end]].float() @ _weight(of, expert, n, columns).T
        if of.size("HAS_BIAS"):
            result = result + of.view("bias", (n,), offset=expert * n).float()
        made.append(result)
    expected = torch.cat(made)
    if "GATE" in of.constants:
        assert of.size("GATE") == SILU.value
        gate, up = halves(expected)
        expected = functional.silu(gate) * up
    out = of.rows("out", used, expected.shape[1], "out_stride")
    return [Output("out", out.float, expected, out)]


def _weight(of: Operands, expert: int, n: int, columns: int) -> torch.Tensor:
    if of.bound.kernel.name == "grouped_matmul":
        return of.view("weight", (n, columns), offset=expert * n * columns).float()
    rows = torch.arange(n, device=of.view("codes", (1,)).device)
    return dequantized(of, n, rows, columns, expert)


def _exact(name: str, memory: torch.Tensor, found: Callable[[], torch.Tensor], wanted: torch.Tensor) -> Output:
    ones = torch.ones(len(wanted), 1, device=wanted.device)
    return Output(name, lambda: (found() != wanted).double()[:, None] + 1, ones, memory, 0)


EXPERTS: Mapping[str, Callable[[Operands], list[Output]]] = {
    "combine_experts": _combine_experts,
    "grouped_matmul": _grouped,
    "grouped_matmul_int4": _grouped,
    "grouped_matmul_nbits": _grouped,
    "route_rows": _route_rows,
    "sort_by_expert": _sort_by_expert,
}
