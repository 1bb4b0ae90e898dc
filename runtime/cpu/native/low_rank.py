"""Adapters for the C walk: their A and B packed in tiles, as launch.h describes low-rank changes.

Numbers are stored in 16 bits where bfloat16 or float16 holds all of a matrix exactly, else in 32: none is rounded.
"""

from collections.abc import Sequence
from ctypes import POINTER, pointer
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ingot.artifact.programs.cpu_program import CpuProgram, Linear
from ingot.artifact.programs.operation_row import LANES, Form, Matrix
from ingot.errors import EngineError, shown
from ingot.runtime.adapters import Adapter, LowRankUpdate
from ingot.runtime.cpu.native import abi
from ingot.runtime.cpu.native.program_binding import ALIGNMENT, aligned_copy
from ingot.runtime.cpu.native.structures import LowRankAt, LowRankTile, MatrixAt
from ingot.runtime.forward_batch import FloatArray
from ingot.sizes import round_up

Bytes = NDArray[np.uint8]
_HALF_BITS = 16


class PackedAdapter:
    """What the C walk reads of an adapter. Whoever puts it into a slot keeps it until the slot has another.

    array       the changes of all operations, NULL for those that it leaves as they are
    ranks       the most ranks that change one operation, in whole tiles
    num_bytes   of the packed matrices

    EngineError for a layer that is not a Linear operation of the program.
    """

    def __init__(self, program: CpuProgram, adapter: Adapter) -> None:
        places = {one.node: place for place, one in enumerate(program.operations) if isinstance(one, Linear)}
        unknown = next((node for node in adapter.changes if node not in places), None)
        if unknown is not None:
            raise EngineError(
                f"the adapter {shown(adapter.name)} changes {shown(unknown)}, which is not a linear operation of the"
                " program; the native CPU engine changes no expert and no embedding: merge it at build time instead"
            )
        self.array = (POINTER(LowRankAt) * len(program.operations))()
        self._changes = []
        for node, changes in adapter.changes.items():
            operation = program.operations[places[node]]
            assert isinstance(operation, Linear)
            packed = pack_changes(program.matrices[operation.matrix], changes)
            self.array[places[node]] = pointer(packed.structure)
            self._changes.append(packed)
        self.ranks = max((packed.structure.a.n for packed in self._changes), default=0)
        self.num_bytes = sum(packed.num_bytes for packed in self._changes)


@dataclass(frozen=True, eq=False)
class PackedChanges:
    """The changes of one operation; `structure` refers to the arrays."""

    structure: LowRankAt
    a: Bytes
    b: Bytes
    tiles: "NDArray[np.void]"

    @property
    def num_bytes(self) -> int:
        """Bytes of A and B, and of the table of tiles."""
        return self.a.nbytes + self.b.nbytes + self.tiles.nbytes


def pack_changes(matrix: Matrix, changes: Sequence[LowRankUpdate]) -> PackedChanges:
    """Pack what is added to rows of a matrix: A of all, one after another; B by tiles, with the ranks that each has."""
    rows = np.concatenate([change.a for change in changes])  # [ranks, k]
    ranks = round_up(len(rows), LANES)
    form, stored = _exact(np.pad(rows, ((0, ranks - len(rows)), (0, 0))))
    a = _lines(stored.reshape(-1, LANES, matrix.k).transpose(0, 2, 1))
    b_form, b, tiles = _pack_b(matrix, changes)
    structure = LowRankAt(
        a=MatrixAt(
            tiles=a.ctypes.data, tile_bytes=a.shape[1], n=ranks, k=matrix.k, padded_k=matrix.k, form=abi.FORM[form]
        ),
        b=b.ctypes.data,
        tiles=tiles.ctypes.data,
        b_form=abi.FORM[b_form],
    )
    return PackedChanges(structure, a, b, tiles)


def _pack_b(matrix: Matrix, changes: Sequence[LowRankUpdate]) -> tuple[Form, Bytes, "NDArray[np.void]"]:
    """Form and bytes of B's tiles, and the table of them."""
    ranks = sum(change.rank for change in changes)
    dense = np.zeros((matrix.n + 1, ranks), np.float32)  # the last row is that of lanes without one
    spans = np.tile((ranks, 0), (matrix.n + 1, 1))  # [n + 1, 2]: first rank of a row, and the one after its last
    begin = 0
    for change in changes:
        here = slice(change.first_row, change.first_row + len(change.b))
        dense[here, begin : begin + change.rank] = change.b
        spans[here] = begin, begin + change.rank
        begin += change.rank
    form, stored = _exact(dense)
    lanes = _rows_of_tiles(matrix)  # [tiles, 16]
    first, end = spans[lanes, 0].min(axis=1), spans[lanes, 1].max(axis=1)
    tiles = np.zeros(len(lanes), np.dtype(LowRankTile))
    packed, size = [], 0
    for span in sorted({(int(first[i]), int(end[i])) for i in range(len(lanes)) if end[i] > 0}):
        alike = np.flatnonzero((first == span[0]) & (end == span[1]))
        lines = _lines(stored[lanes[alike], span[0] : span[1]].transpose(0, 2, 1))  # [tiles, bytes of a tile]
        tiles["at"][alike] = size + np.arange(len(alike)) * lines.shape[1]
        tiles["first"][alike], tiles["count"][alike] = span[0], span[1] - span[0]
        packed.append(lines.reshape(-1))
        size += lines.nbytes
    return form, aligned_copy(np.concatenate(packed)), tiles


def _rows_of_tiles(matrix: Matrix) -> NDArray[np.int64]:
    """[num_tiles, 16] the row of each lane of the tiles, -1 for padding. Those of pairs take turns."""
    n = matrix.n // 2 if matrix.pairs else matrix.n
    rows = np.arange(round_up(n, LANES)).reshape(-1, LANES)
    rows[rows >= n] = -1
    if not matrix.pairs:
        return rows
    return np.stack((rows, np.where(rows < 0, -1, rows + n)), axis=1).reshape(-1, LANES)


def _exact(values: FloatArray) -> tuple[Form, NDArray[np.generic]]:
    """The values in the smallest form that holds them exactly."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    if not (bits << np.uint32(_HALF_BITS)).any():
        return "bfloat16", (bits >> np.uint32(_HALF_BITS)).astype(np.uint16)
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    if (halves == values).all():
        return "float16", halves
    return "float32", bits


def _lines(tiles: NDArray[np.generic]) -> Bytes:
    """[tiles, columns, 16] -> [tiles, bytes], each tile padded to whole lines, at an address of one."""
    raw = np.ascontiguousarray(tiles).reshape(len(tiles), -1).view(np.uint8)
    return aligned_copy(np.pad(raw, ((0, 0), (0, -raw.shape[1] % ALIGNMENT))))
