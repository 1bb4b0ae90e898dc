"""Random mixtures of experts: routing, the order of pairs by expert, grouped matmuls, and the sum of results."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray

from ingot.kernels import matmul_int4
from ingot.kernels.experts import SIGMOID, SOFTMAX, SPARSEMIXER, combine_experts, route_rows, sort_by_expert
from ingot.kernels.gated_activation import SILU
from ingot.kernels.grouped_matmul import grouped_matmul, grouped_matmul_int4, grouped_matmul_nbits
from tests.kernels.cases import Case, power_of_two, random
from tests.kernels.reference import Float64Array, numpy64
from tests.kernels.row_cases import spans
from tests.simulators import gluon_emulator

# grouped_matmul_int4 takes its sums from there.
gluon_emulator.install(matmul_int4)

Rng = np.random.Generator
Outcome = tuple[Float64Array, Float64Array, float]  # found, expected, and the largest error over the largest value
IntArray = NDArray[np.int64]
_LIMIT = 4e-6


@dataclass(frozen=True)
class Tiles:
    """Pairs in the order of experts, by the kernel. Unused places are never read, and are far outside."""

    places: torch.Tensor
    pairs: torch.Tensor
    experts: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor

    @classmethod
    def of(cls, ids: IntArray, experts: int, tile_rows: int) -> "Tiles":
        """Sort the pairs of ids [rows, chosen]; -1 is none."""
        tiles = (ids.size + min(ids.size, experts) * (tile_rows - 1)) // tile_rows
        made = cls(*(torch.full((size,), 10**8, dtype=torch.int32) for size in (*2 * (ids.size,), *3 * (tiles,))))
        given = torch.from_numpy(ids.astype(np.int32))
        sizes = {"COUNT": experts, "BINS": power_of_two(experts), "BLOCK": 16, "TILE_ROWS": tile_rows}
        sort_by_expert[(experts,)](
            given, made.places, made.pairs, made.experts, made.starts, made.ends, ids.size, tiles, **sizes
        )
        return made


def random_ids(rng: Rng, rows: int, experts: int, chosen: int) -> IntArray:
    """Distinct experts of each row [rows, chosen]; some rows are padding, some experts have no rows."""
    used = rng.permutation(experts)[: max(chosen, int(rng.integers(1, experts + 1)))]
    ids = np.stack([rng.permutation(used)[:chosen] for _ in range(rows)])
    ids[rng.random(rows) < 0.2] = -1
    return ids


def _scores(logits: Float64Array, *, is_softmax: bool) -> Float64Array:
    if not is_softmax:
        return np.asarray(1 / (1 + np.exp(-logits)))
    raised = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(raised / raised.sum(axis=1, keepdims=True))


def _routed(rng: Rng) -> Outcome:
    """Weights; infinite where another expert was chosen."""
    groups = int(rng.choice([1, 1, 2, 4]))
    experts, rows, parts = groups * int(rng.integers(2, 20)), int(rng.integers(1, 7)), int(rng.integers(1, 4))
    chosen_groups = int(rng.integers(1, groups + 1))
    chosen = int(rng.integers(1, min(9, experts // groups * chosen_groups) + 1))
    group_best = int(rng.integers(1, 3))
    is_softmax, has_bias, normalises = (bool(one) for one in rng.integers(0, 2, 3))
    logits = (random(rng, parts, rows, experts) * 4).round(decimals=int(rng.choice([0, 3])))  # with ties
    bias = random(rng, experts).round(decimals=1)
    slots = torch.from_numpy(np.where(rng.random(rows) < 0.2, -1, 5))
    ids, weights = torch.full((rows, chosen), -7, dtype=torch.int32), torch.full((rows, chosen), torch.nan)
    route_rows[(rows,)](
        *(logits, bias, slots, ids, weights, experts, rows * experts, 0.05, 2.5, 0.0),
        COUNT=experts,
        BLOCK=power_of_two(experts),
        CHOSEN=chosen,
        BLOCK_CHOSEN=power_of_two(chosen),
        PARTS=parts,
        SCORE=(SOFTMAX if is_softmax else SIGMOID).value,
        GROUPS=groups,
        CHOSEN_GROUPS=chosen_groups,
        NORMALISES=normalises,
        HAS_BIAS=has_bias,
        GROUP_BEST=group_best,
    )
    whole = logits[0]
    for one in logits[1:]:
        whole = whole + one  # as rounded as the kernel's sums: of equal ones the first is chosen
    scores = _scores(numpy64(whole), is_softmax=is_softmax)
    ranked = numpy64(whole) if is_softmax and not has_bias and groups == 1 else scores.astype(np.float32)
    ranked = ranked + bias.numpy() if has_bias else ranked
    if chosen_groups < groups:
        by_group = ranked.reshape(rows, groups, -1)
        order = np.argsort(-np.sort(by_group, axis=2)[:, :, -group_best:].sum(axis=2), axis=1, kind="stable")
        for row, kept in enumerate(order[:, :chosen_groups]):
            by_group[row, np.setdiff1d(np.arange(groups), kept)] = -np.inf
        ranked = by_group.reshape(rows, experts)
    wanted_ids = np.argsort(-ranked, axis=1, kind="stable")[:, :chosen]
    wanted = np.take_along_axis(scores, wanted_ids, axis=1)
    if normalises:
        wanted = wanted / np.maximum(wanted.sum(axis=1, keepdims=True), 0.05)
    is_padding = slots.numpy()[:, None] < 0
    is_right = ids.numpy() == np.where(is_padding, -1, wanted_ids)
    return np.where(is_right, numpy64(weights), np.inf), wanted * 2.5, _LIMIT


def _mixed_sparsely(rng: Rng) -> Outcome:
    """Weights of SparseMixer; infinite where another expert was chosen."""
    experts, rows, margin = int(rng.integers(2, 40)), int(rng.integers(1, 7)), 0.25
    chosen = int(rng.integers(1, min(4, experts) + 1))
    logits = (random(rng, 1, rows, experts) * 4).round(decimals=1)
    ids, weights = torch.full((rows, chosen), -7, dtype=torch.int32), torch.full((rows, chosen), torch.nan)
    slots = torch.zeros(rows, dtype=torch.int64)
    route_rows[(rows,)](
        *(logits, None, slots, ids, weights, experts, rows * experts, 0.0, 1.0, margin),
        COUNT=experts,
        BLOCK=power_of_two(experts),
        CHOSEN=chosen,
        BLOCK_CHOSEN=power_of_two(chosen),
        PARTS=1,
        SCORE=SPARSEMIXER.value,
        GROUPS=1,
        CHOSEN_GROUPS=1,
        NORMALISES=False,
        HAS_BIAS=False,
    )
    wanted = np.full((rows, chosen), np.inf)
    for row, values in enumerate(logits[0].numpy()):
        order = np.argsort(-values, kind="stable")
        for place in range(chosen):
            left, top = values[order[place:]], values[order[place]]
            near = left[top - left <= np.float32(margin) * np.maximum(np.abs(left), top)].astype(np.float64)
            wanted[row, place] = 1 / np.exp(near - near.max()).sum()
        if not np.array_equal(ids.numpy()[row], order[:chosen]):
            weights[row] = torch.inf
    return numpy64(weights), wanted, _LIMIT


def _routed_in_both_ways(rng: Rng) -> Outcome:
    """Weights by scores of all experts, and those of SparseMixer."""
    (found, wanted, limit), (mixed, wanted_mixed, _) = _routed(rng), _mixed_sparsely(rng)
    both = [np.concatenate([one.reshape(-1) for one in pair]) for pair in ((found, mixed), (wanted, wanted_mixed))]
    return both[0], both[1], limit


def _in_order(ids: IntArray) -> tuple[IntArray, IntArray]:
    """Places of all pairs and pairs of all places by numpy: no case reads what another kernel should have written."""
    flat = ids.reshape(-1)
    order = np.argsort(flat, kind="stable")[np.count_nonzero(flat < 0) :]
    places, pairs = np.full(flat.size, 10**8), np.full(flat.size, 10**8)
    places[order], pairs[: len(order)] = np.arange(len(order)), order
    return places, pairs


def _sorted(rng: Rng) -> Outcome:
    """Places, pairs and tiles."""
    experts, rows, tile_rows = int(rng.integers(1, 20)), int(rng.integers(1, 40)), int(rng.choice([4, 8, 16]))
    ids = random_ids(rng, rows, experts, int(rng.integers(1, min(6, experts) + 1)))
    found = Tiles.of(ids, experts, tile_rows)
    flat, (places, pairs) = ids.reshape(-1), _in_order(ids)
    counts = np.bincount(flat[flat >= 0], minlength=experts)
    starts = np.cumsum(counts) - counts
    tiles = [
        (expert, starts[expert] + first, starts[expert] + counts[expert])
        for expert in range(experts)
        for first in range(0, counts[expert], tile_rows)
    ]
    unused = len(found.experts) - len(tiles)
    listed = np.array(tiles + [(-1, 10**8, 10**8)] * unused).reshape(-1, 3).T
    arrays = (found.places, found.pairs, found.experts, found.starts, found.ends)
    wanted = np.concatenate([places, pairs, listed.reshape(-1)]).astype(np.float64)
    return np.concatenate([numpy64(one) for one in arrays]), wanted, 0.0


def _combined(rng: Rng) -> Outcome:
    experts, rows, columns = int(rng.integers(1, 12)), int(rng.integers(1, 8)), int(rng.integers(1, 200))
    ids = random_ids(rng, rows, experts, int(rng.integers(1, min(8, experts) + 1)))
    tiles, weights = Tiles.of(ids, experts, 8), random(rng, *ids.shape)
    results = torch.full((ids.size, columns + int(rng.integers(9))), torch.nan)
    used = int(np.count_nonzero(ids >= 0))
    results[:used, :columns] = random(rng, used, columns)
    weights[ids[:, 0] < 0] = torch.nan
    out = torch.full((rows, columns), torch.nan)
    combine_experts[(rows, -(-columns // 64))](
        *(results, torch.from_numpy(ids.astype(np.int32)), tiles.places, weights, out, results.stride(0), columns),
        COLUMNS=columns,
        BLOCK=64,
        CHOSEN=ids.shape[1],
    )
    wanted = np.zeros((rows, columns))
    at = _in_order(ids)[0].reshape(ids.shape)
    for row in np.flatnonzero(ids[:, 0] >= 0):
        wanted[row] = numpy64(weights)[row] @ numpy64(results)[at[row], :columns]
    return numpy64(out), wanted, _LIMIT


def grouped(rng: Rng, kernel: str, ahead: int = 0) -> Outcome:
    """Rows of tokens or of places, with or without bias and gate; results of places that no pair has stay NaN.

    ahead    spans that grouped_matmul_int4 loads before their use: drawn where it is 0, else n is a multiple of 16
    """
    experts, rows, chosen = int(rng.integers(1, 7)), int(rng.integers(1, 30)), 0
    ids = random_ids(rng, rows, experts, int(rng.integers(1, min(4, experts) + 1)))
    is_gated, has_bias, by_token = (bool(one) for one in rng.integers(0, 2, 3))
    n, columns = (int(rng.integers(1, most)) for most in (70, 300))
    is_multiple = is_gated or ahead > 0 or (kernel == "grouped_matmul_int4" and bool(rng.integers(2)))
    n = -(-n // 16) * 16 if is_multiple else n
    tile_rows, tile = int(rng.choice([16, 32])), int(rng.choice([32, 64]))
    tiles = Tiles.of(ids, experts, tile_rows)
    chosen = ids.shape[1] if by_token else 0
    x = torch.full((rows if by_token else ids.size, columns + int(rng.integers(9))), torch.nan)
    x[:, :columns] = random(rng, len(x), columns)
    x = x.to(torch.float16) if kernel == "grouped_matmul_int4" else x
    bias, values, weight, constants = random(rng, experts, n), *_weight(rng, kernel, experts, n, columns, ahead)
    width = n // 2 if is_gated else n
    out = torch.full((ids.size, width), torch.nan)
    function = {
        "grouped_matmul": grouped_matmul,
        "grouped_matmul_nbits": grouped_matmul_nbits,
        "grouped_matmul_int4": grouped_matmul_int4,
    }[kernel]
    function[(len(tiles.experts), -(-n // tile))](
        *(x, *weight, bias, out, tiles.pairs, tiles.experts, tiles.starts, tiles.ends, x.stride(0), width),
        N=n,
        COLUMNS=columns,
        TILE_ROWS=tile_rows,
        TILE=tile,
        CHOSEN=chosen,
        HAS_BIAS=has_bias,
        **constants,
        **({"GATE": SILU.value} if is_gated else {}),
    )
    used = np.count_nonzero(ids >= 0)
    pairs = _in_order(ids)[1][:used]
    read = numpy64(x)[pairs // chosen if by_token else np.arange(used), :columns]
    own = ids.reshape(-1)[pairs]
    wanted = np.einsum("pk,pnk->pn", read, values[own]) + (numpy64(bias)[own] if has_bias else 0)
    if is_gated:
        halves = wanted.reshape(used, n // 16, 2, 8)
        gate, up = halves[:, :, 0], halves[:, :, 1]
        wanted = (gate / (1 + np.exp(-gate)) * up).reshape(used, width)
    is_untouched = bool(out[used:].isnan().all())
    return numpy64(out)[:used] if is_untouched else np.full(wanted.shape, np.inf), wanted, _LIMIT


def _weight(
    rng: Rng, kernel: str, experts: int, n: int, columns: int, ahead: int
) -> tuple[Float64Array, list[torch.Tensor], dict[str, object]]:
    """Values [experts, n, columns], the kernel's arguments, and its constants."""
    if kernel == "grouped_matmul":
        plain = random(rng, experts, n, columns)
        return numpy64(plain), [plain], {"TILE_COLUMNS": 32, "UPCAST": True}
    bits = 4 if kernel == "grouped_matmul_int4" else int(rng.choice([4, 8]))
    group = int(rng.choice([32, 64, 96, 128]))
    groups, of = -(-columns // group), np.arange(columns) // group
    codes = rng.integers(0, 1 << bits, (experts, n, columns), np.uint8)
    zeros, is_symmetric = rng.integers(0, 1 << bits, (experts, n, groups), np.uint8), bool(rng.integers(2))
    if is_symmetric:
        zeros[:] = 1 << (bits - 1)
    scales = rng.uniform(-0.1, 0.1, (experts, n, groups)).astype(np.float16)
    values = (codes.astype(np.float64) - zeros[:, :, of]) * scales.astype(np.float64)[:, :, of]
    packed = torch.stack([spans(one, bits) for one in codes])
    turned = [torch.from_numpy(np.ascontiguousarray(one.swapaxes(1, 2))) for one in (scales, zeros)]
    is_direct = kernel == "grouped_matmul_int4"
    own = {"BITS": bits, "SPANS_AT_ONCE": 1, "SCALE_WEIGHTS": True}
    if is_direct:
        own = {"AHEAD": ahead or int(rng.integers(1, 3 if n % 16 else 6)), "WARPS": 2}
    constants: dict[str, object] = {
        "SPANS": packed.shape[2] // 64,
        "GROUP": group,
        "GROUPS": groups,
        "HAS_ZERO_POINTS": not is_symmetric,
        "DTYPE": tl.float16 if is_direct else tl.float32,
        **own,
    }
    return values, [packed, *turned], constants


RUNS: Mapping[str, Callable[[Rng], Outcome]] = {
    "route_rows": _routed_in_both_ways,
    "sort_by_expert": _sorted,
    "combine_experts": _combined,
    "grouped_matmul": partial(grouped, kernel="grouped_matmul"),
    "grouped_matmul_nbits": partial(grouped, kernel="grouped_matmul_nbits"),
    "grouped_matmul_int4": partial(grouped, kernel="grouped_matmul_int4"),
}
_PRECISIONS = {"grouped_matmul_nbits": "4 and 8 bits, float32", "grouped_matmul_int4": "float16"}


def cases() -> Iterator[Case]:
    """A few random problems of each kernel, the same each time."""
    for kernel in RUNS:
        for seed in range(3):
            limit = 0.0 if kernel == "sort_by_expert" else _LIMIT
            precision = "whole numbers" if limit == 0 else _PRECISIONS.get(kernel, "float32")
            yield Case(kernel, f"random problem {seed}", precision, limit, partial(_case, kernel, seed, RUNS[kernel]))
    for seed in range(3, 5):
        run = partial(grouped, kernel="grouped_matmul_int4", ahead=3)
        case = partial(_case, "grouped_matmul_int4", seed, run)
        yield Case("grouped_matmul_int4", f"random problem {seed}, 3 spans ahead", "float16", _LIMIT, case)


def _case(kernel: str, seed: int, run: Callable[[Rng], Outcome]) -> tuple[Float64Array, Float64Array]:
    found, wanted, _ = run(np.random.default_rng([seed, *kernel.encode()]))
    return found, wanted
