"""Random adapters of a step: units of rows, ranks, slots at borders, layers that an adapter leaves as they are.

NaN is in all memory that must not be read: rows without an adapter, places without a row, slots that no row has,
partial sums of other launches; and between the rows of x and of the results.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from ingot.kernels.low_rank import FACTOR_FIRST, IN_ORDER, low_rank_expand, low_rank_shrink
from tests.kernels.cases import HALF_STEP, Case, random
from tests.kernels.reference import Float64Array, numpy64

Rng = np.random.Generator
Outcome = tuple[Float64Array, Float64Array, float]  # found, expected, and the largest error over the largest value
_RANKS, _TILE = 16, 32
_LIMITS = {torch.float32: 4e-6, torch.float16: 1.01 * HALF_STEP}
_FIELDS = 4


@dataclass(frozen=True)
class Step:
    """Rows of a step with their slots, -1 for none, and the order in which kernels take them."""

    slots: NDArray[np.int64]
    order: NDArray[np.int64]
    units: torch.Tensor
    rows: torch.Tensor

    @classmethod
    def random(cls, rng: Rng, num_slots: int, tile_rows: int, width: int, strides: tuple[int, int]) -> "Step":
        count = int(rng.choice([1, 2, tile_rows - 1, tile_rows, tile_rows + 1, 3 * tile_rows]))
        slots = rng.integers(-1, num_slots, count) if rng.integers(4) else np.full(count, rng.integers(-1, num_slots))
        order = np.argsort(slots, kind="stable")[np.count_nonzero(slots < 0) :]
        units = [
            (slot, first, min(tile_rows, end - first))
            for slot in range(num_slots)
            for begin, end in [np.searchsorted(slots[order], (slot, slot + 1))]
            for first in range(begin, end, tile_rows)
        ]
        unused = [10**8] * int(rng.integers(4))
        return cls(
            slots,
            order,
            torch.tensor([len(units), width, *strides, *np.array(units, int).reshape(-1), *unused], dtype=torch.int32),
            torch.tensor([*order, *unused], dtype=torch.int32),
        )


@dataclass(frozen=True)
class Loaded:
    """The changes of one layer by slot: [rank, columns] and [outputs, rank], None for a layer that is left as it is.

    spans    ranks of each tile of outputs
    """

    a: list[Float64Array | None]
    b: list[Float64Array | None]
    pool: torch.Tensor
    table: torch.Tensor
    spans: torch.Tensor
    strides: tuple[int, int]

    @classmethod
    def random(cls, rng: Rng, slots: int, columns: int, outputs: int, dtype: torch.dtype) -> "Loaded":
        """Projections side by side, each with ranks of its own; other layers follow in the tables."""
        bounds = [0, *sorted(rng.integers(1, outputs + 1, int(rng.integers(3))).tolist()), outputs]
        tiles, of_all, layers = -(-outputs // _TILE), int(rng.integers(3)), int(rng.integers(1, 4))
        strides = layers * _FIELDS, 2 * (of_all + tiles)
        table = np.zeros((slots, layers, _FIELDS), np.int64)
        spans = np.zeros((slots, of_all + tiles, 2), np.int32)
        pieces, size = [torch.full((int(rng.integers(1, 50)),), torch.nan, dtype=dtype)], 0
        size = len(pieces[0])
        found_a: list[Float64Array | None] = []
        found_b: list[Float64Array | None] = []
        for slot in range(slots):
            if rng.random() < 0.25:
                found_a.append(None)
                found_b.append(None)
                table[slot, 0, 0] = table[slot, 0, 1] = 10**12
                continue
            ranks = [int(rng.integers(1, 40)) if rng.random() < 0.8 else 0 for _ in bounds[1:]]
            padded = [-(-rank // _RANKS) * _RANKS for rank in ranks]
            a = torch.zeros(sum(padded), columns, dtype=dtype)
            b = torch.zeros(outputs, sum(padded), dtype=dtype)
            for begin, end, rank, at in zip(bounds, bounds[1:], ranks, np.cumsum([0, *padded[:-1]]), strict=False):
                a[at : at + rank] = random(rng, rank, columns, dtype=dtype) / columns**0.5
                b[begin:end, at : at + rank] = random(rng, end - begin, rank, dtype=dtype)
            stored = torch.full((outputs, max(1, sum(padded))), torch.nan, dtype=dtype)
            for tile in range(tiles):
                rows = slice(tile * _TILE, (tile + 1) * _TILE)
                used = [
                    (at, at + size)
                    for begin, end, size, at in zip(
                        bounds, bounds[1:], padded, np.cumsum([0, *padded[:-1]]), strict=False
                    )
                    if size and begin < min(rows.stop, outputs) and end > rows.start
                ]
                if used:
                    first, last = used[0][0], used[-1][1]
                    spans[slot, tile] = first, last - first
                    stored[rows, : last - first] = b[rows, first:last]
            table[slot, 0] = size, size + a.numel(), len(a), stored.shape[1]
            pieces += [a.reshape(-1), stored.reshape(-1)]
            size += a.numel() + stored.numel()
            found_a.append(numpy64(a))
            found_b.append(numpy64(b))
        pool = torch.cat(pieces)
        return cls(found_a, found_b, pool, torch.from_numpy(table), torch.from_numpy(spans), strides)


def _random(rng: Rng) -> tuple[Loaded, Step, int, int, int, torch.dtype]:
    slots, columns, outputs = int(rng.integers(1, 5)), int(rng.integers(1, 300)), 16 * int(rng.integers(1, 9))
    outputs -= int(rng.integers(16)) * int(rng.integers(2))
    dtype = [torch.float32, torch.float16][rng.integers(2)]
    loaded = Loaded.random(rng, slots, columns, outputs, dtype)
    most = max((len(a) for a in loaded.a if a is not None), default=0)
    step = Step.random(rng, slots, int(rng.choice([16, 32])), most + int(rng.integers(2)) * 16, loaded.strides)
    return loaded, step, columns, outputs, int(rng.choice([1, 2, 5])), dtype


def _shrunk(rng: Rng) -> Outcome:
    loaded, step, columns, _, splits, dtype = _random(rng)
    width = int(step.units[1])
    x = torch.full((len(step.slots), columns + int(rng.integers(9))), torch.nan, dtype=dtype)
    used = step.slots >= 0
    x[used, :columns] = random(rng, int(used.sum()), columns, dtype=dtype)
    results = torch.full((len(step.order) + 2, splits, max(1, width)), torch.nan)
    low_rank_shrink[(int(rng.integers(1, 4)), splits)](
        *(x, loaded.pool, loaded.table, step.units, step.rows, results),
        *(columns, x.stride(0)),
        SPLITS=splits,
        TILE_ROWS=_tile_rows(step),
        TILE_RANKS=_RANKS,
        TILE_COLUMNS=32,
        UPCAST=True,
    )
    return *_summed(results, loaded, step, numpy64(x)[:, :columns]), _LIMITS[torch.float32]


def _tile_rows(step: Step) -> int:
    """The smallest tile that holds every unit."""
    return 32 if (step.units[6 : 4 + 3 * int(step.units[0]) : 3] > 16).any() else 16


def _summed(results: torch.Tensor, loaded: Loaded, step: Step, x: Float64Array) -> tuple[Float64Array, Float64Array]:
    """The sums of the partials, and what they should be; infinite where something else was written."""
    found, wanted = np.zeros((len(step.order), results.shape[2])), np.zeros((len(step.order), results.shape[2]))
    rest = np.ones(results.shape, bool)
    for place, row in enumerate(step.order):
        a = loaded.a[step.slots[row]]
        if a is not None:
            found[place, : len(a)] = numpy64(results)[place, :, : len(a)].sum(axis=0)
            wanted[place, : len(a)] = a @ x[row]
            rest[place, :, : len(a)] = False
    is_untouched = bool(np.isnan(results.numpy()[rest]).all())
    return (found if is_untouched else np.full(found.shape, np.inf)), wanted


def _expanded(rng: Rng) -> Outcome:
    loaded, step, _, outputs, splits, dtype = _random(rng)
    count, width, parts = len(step.slots), max(1, int(step.units[1])), int(rng.choice([1, 1, 3]))
    alpha, is_folded = float(rng.choice([1.0, 0.5])), bool(rng.integers(2))
    order = int(rng.integers(3)) if outputs % 16 == 0 else IN_ORDER.value
    results = torch.full((len(step.order) + 2, splits, width), torch.nan)
    for place, row in enumerate(step.order):
        a = loaded.a[step.slots[row]]
        if a is not None:
            results[place, :, : len(a)] = random(rng, splits, len(a))
    kind = torch.float32 if parts > 1 else dtype
    out = torch.full((1 if is_folded else parts, count, outputs + int(rng.integers(9))), torch.nan, dtype=kind)
    out[:, :, :outputs] = random(rng, *out.shape[:2], outputs, dtype=kind)
    before, tiles = out.clone(), -(-outputs // _TILE)
    low_rank_expand[(int(rng.integers(1, 4)), tiles)](
        *(results, loaded.pool, loaded.table, loaded.spans, step.units, step.rows, out),
        *(outputs, out.stride(1), 0 if is_folded else out.stride(0), alpha),
        SPLITS=splits,
        PARTS=parts,
        TILE_ROWS=_tile_rows(step),
        TILE=_TILE,
        TILE_RANKS=_RANKS,
        ORDER=order,
        BY_ROW=bool(rng.integers(2)),
    )
    half, at = outputs // 2, np.arange(outputs)
    second = (at >= half) != (order == FACTOR_FIRST.value)
    columns = at if order == IN_ORDER.value else at % half // 8 * 16 + at % 8 + 8 * second
    wanted = numpy64(before)[:, :, :outputs].sum(axis=0)
    is_changed = np.zeros((count, outputs), bool)
    for place, row in enumerate(step.order):
        b = loaded.b[step.slots[row]]
        if b is not None:
            low = numpy64(results)[place, :, : b.shape[1]].sum(axis=0)
            wanted[row, columns] += alpha * (b @ low)
            spans = loaded.spans[step.slots[row], :tiles, 1].numpy() > 0
            is_changed[row, columns] = np.repeat(spans, _TILE)[:outputs]
    found = numpy64(out)[:, :, :outputs].sum(axis=0)
    same = out.view(torch.int32 if kind == torch.float32 else torch.int16) == before.view(
        torch.int32 if kind == torch.float32 else torch.int16
    )
    rest = np.ones(out.shape[1:], bool)
    rest[:, :outputs] = ~is_changed
    is_untouched = bool(same.numpy()[:, rest].all())
    if parts > 1 and not is_folded:  # the first has the whole sum
        is_untouched &= not out[1:, :, :outputs].numpy()[:, is_changed].any()
    return (found if is_untouched else np.full(found.shape, np.inf)), wanted, _LIMITS[kind]


RUNS: Mapping[str, Callable[[Rng], Outcome]] = {"low_rank_shrink": _shrunk, "low_rank_expand": _expanded}


def cases() -> Iterator[Case]:
    """A few random problems of each kernel, the same each time."""
    limits = {"low_rank_shrink": _LIMITS[torch.float32], "low_rank_expand": _LIMITS[torch.float16]}
    for kernel, limit in limits.items():
        for seed in range(4):
            yield Case(kernel, f"random problem {seed}", "float32 or float16", limit, partial(_case, kernel, seed))


def _case(kernel: str, seed: int) -> tuple[Float64Array, Float64Array]:
    found, wanted, _ = RUNS[kernel](np.random.default_rng([seed, *kernel.encode()]))
    return found, wanted
