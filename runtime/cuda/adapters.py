"""LoRA adapters in device memory, as kernels/low_rank.py reads them.

    pool      matrices of the loaded adapters, each of its own size, in the activations' type
    table     [slots, layers, 4] and spans [slots, tiles, 2]: where the matrices of a slot are, and their ranks
    results   A x of the rows of a step that have an adapter

All three are allocated before graphs are captured and stay where they are; only their contents change. Copies are
queued in the order of the steps: a step reads the adapters that were loaded when it was queued.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from ingot.artifact.programs.launch_program import (
    ELEMENT_BYTES,
    ActivationType,
    AdaptedLayer,
    CudaProgram,
)
from ingot.artifact.safetensors import to_bfloat16
from ingot.errors import EngineError, shown
from ingot.runtime.adapters import Adapter, LowRankUpdate
from ingot.runtime.cuda.driver.device import Bytes, Device, Stream
from ingot.runtime.cuda.step_inputs import AdapterStrides, StagingRing
from ingot.runtime.forward_batch import FloatArray, Int32Array
from ingot.runtime.options import EngineOptions
from ingot.sizes import ceil_div, format_bytes, round_up

_log = logging.getLogger(__name__)
_ALIGNMENT = 128  # bytes, of a matrix in the pool
_USUAL_RANK = 16  # the pool has room for it in every slot, unless adapter_bytes says otherwise
_STAGING_BYTES, _AREAS = 4 * 2**20, 2


@dataclass(frozen=True, eq=False)
class PackedLayer:
    """What an adapter adds to a layer.

    a        [ranks, columns] of all projections, each padded to a multiple of ranks
    b        [outputs, ranks of a row]: of each tile of rows the ranks that it has values for
    spans    [tiles, 2]: the first of these ranks, and their number
    """

    a: FloatArray
    b: FloatArray
    spans: Int32Array


def pack_layer(layer: AdaptedLayer, changes: Sequence[LowRankUpdate], tile: int, multiple: int) -> PackedLayer:
    """Pack the changes of a layer's projections. EngineError for rows or columns beyond its own."""
    for change in changes:
        if change.a.shape[1] != layer.columns or change.first_row + len(change.b) > layer.outputs:
            raise EngineError(f"{shown(change.module)} does not fit the layer {shown(layer.node)} of the program")
    ranks = [round_up(change.rank, multiple) for change in changes]
    starts = [*accumulate(ranks, initial=0)]
    a = np.zeros((starts[-1], layer.columns), np.float32)
    spans = np.zeros((ceil_div(layer.outputs, tile), 2), np.int32)
    first, end = np.full(len(spans), starts[-1]), np.zeros(len(spans), np.int64)
    for change, start, count in zip(changes, starts, ranks, strict=False):
        a[start : start + change.rank] = change.a
        tiles = _tiles(change.first_row, len(change.b), tile)
        first[tiles], end[tiles] = np.minimum(first[tiles], start), np.maximum(end[tiles], start + count)
    used = end > first
    spans[used] = np.stack([first, end - first], axis=1)[used]
    b = np.zeros((layer.outputs, int(spans[:, 1].max())), np.float32)
    for change, start in zip(changes, starts, strict=False):
        rows = np.arange(change.first_row, change.first_row + len(change.b))
        columns = (start - spans[rows // tile, 0])[:, None] + np.arange(change.rank)
        b[rows[:, None], columns] = change.b
    return PackedLayer(a, b, spans)


def _tiles(first_row: int, rows: int, tile: int) -> slice:
    """Tiles that have one of these rows."""
    return slice(first_row // tile, ceil_div(first_row + rows, tile))


class DeviceAdapters:
    """The slots of an executor, and the buffers of its programs for adapters.

    EngineError when there is too little memory.
    """

    def __init__(self, device: Device, stream: Stream, program: CudaProgram, options: EngineOptions) -> None:
        assert program.adapters is not None
        self._programs, self._type = program.adapters, program.activation_type
        self._device, self._stream = device, stream
        slots, layers = options.max_adapters, self._programs.layers
        self._places = {layer.node: place for place, layer in enumerate(layers)}
        self._tiles = [*accumulate((ceil_div(one.outputs, self._programs.tile) for one in layers), initial=0)]
        self._table = np.zeros((slots, len(layers), 4), np.int64)
        self._spans = np.zeros((slots, self._tiles[-1], 2), np.int32)
        per_layer = max(np.unique([one.node for one in self._programs.projections], return_counts=True)[1])
        ranks = int(per_layer) * round_up(options.max_adapter_rank, self._programs.ranks)
        self.strides = AdapterStrides(ranks, len(layers) * 4, self._tiles[-1] * 2)
        self.pool = AdapterPool(options.adapter_bytes or self._usual_bytes(options))
        results = max(one.rows * one.adapter_units.parts for one in self._programs.programs if one.adapter_units)
        sizes = {
            "adapter_pool": self.pool.num_bytes,
            "adapter_table": self._table.nbytes,
            "adapter_spans": self._spans.nbytes,
            "adapter_results": results * ranks * ELEMENT_BYTES["fp32"],
        }
        self.addresses = {name: device.allocate(size, f"{slots} LoRA adapters") for name, size in sizes.items()}
        for name in ("adapter_table", "adapter_spans"):
            device.clear(self.addresses[name], sizes[name], stream)
        self._ring = StagingRing(device, _AREAS, _STAGING_BYTES, "staging of an adapter")
        self._held: dict[int, list[tuple[int, int]]] = {}
        self._sizes: WeakKeyDictionary[Adapter, int] = WeakKeyDictionary()
        _log.info("LoRA adapters: %d slots, %s for their matrices", slots, format_bytes(self.pool.num_bytes))

    def share(self, adapter: Adapter) -> float:
        """Share of the pool that an adapter takes."""
        if adapter not in self._sizes:
            total = 0
            for node, changes in adapter.changes.items():
                if node in self._places:
                    spans = [(change.first_row, len(change.b), change.rank) for change in changes]
                    total += self._layer_bytes(self._programs.layers[self._places[node]], spans)
            self._sizes[adapter] = total
        return self._sizes[adapter] / self.pool.num_bytes

    def load(self, slot: int, adapter: Adapter) -> None:
        """Queue the copies of an adapter to a slot, whose own is unloaded.

        EngineError for a layer that adapters cannot change, a number beyond the activations' type, and too little room.
        """
        self.unload(slot)
        unknown = next((node for node in adapter.changes if node not in self._places), None)
        if unknown is not None:
            raise EngineError(
                f"the adapter {shown(adapter.name)} changes {shown(unknown)}, which is not a layer of the program that"
                " adapters can change"
            )
        held = self._held[slot] = []
        try:
            for node, changes in adapter.changes.items():
                place = self._places[node]
                packed = pack_layer(self._programs.layers[place], changes, self._programs.tile, self._programs.ranks)
                at = [self._put(values, adapter, held) for values in (packed.a, packed.b)]
                self._table[slot, place] = *at, len(packed.a), packed.b.shape[1]
                self._spans[slot, self._tiles[place] : self._tiles[place + 1]] = packed.spans
        except BaseException:
            self.unload(slot)
            raise
        self._send_tables(slot)

    def unload(self, slot: int) -> None:
        """Free a slot's matrices. No later step may name it before it is loaded again."""
        for begin, size in self._held.pop(slot, ()):
            self.pool.free(begin, size)
        self._table[slot], self._spans[slot] = 0, 0

    def _usual_bytes(self, options: EngineOptions) -> int:
        """Room for adapters of a usual rank, on every projection, in all slots."""
        rank, total = min(_USUAL_RANK, options.max_adapter_rank), 0
        for layer in self._programs.layers:
            changed = [one for one in self._programs.projections if one.node == layer.node]
            total += self._layer_bytes(layer, [(one.first_row, one.rows, rank) for one in changed])
        return options.max_adapters * total

    def _layer_bytes(self, layer: AdaptedLayer, changes: Sequence[tuple[int, int, int]]) -> int:
        """Bytes of the pool for changes of a layer: their first row, rows and rank, in the order of the rows."""
        tile, multiple = self._programs.tile, self._programs.ranks
        ranks = np.zeros(ceil_div(layer.outputs, tile), np.int64)
        for first_row, rows, rank in changes:
            ranks[_tiles(first_row, rows, tile)] += round_up(rank, multiple)
        all_ranks = sum(round_up(rank, multiple) for _, _, rank in changes)
        numbers = all_ranks * layer.columns, int(ranks.max()) * layer.outputs
        return sum(round_up(number * ELEMENT_BYTES[self._type], _ALIGNMENT) for number in numbers)

    def _put(self, values: FloatArray, adapter: Adapter, held: list[tuple[int, int]]) -> int:
        """Queue the copy of a matrix to a free place; return the place in elements."""
        stored = _as_type(values, self._type, adapter)
        size = round_up(len(stored), _ALIGNMENT)
        begin = self.pool.take(size)
        if begin is None:
            raise EngineError(
                f"the adapter {shown(adapter.name)} finds no room: {format_bytes(self.pool.free_bytes)} of"
                f" {format_bytes(self.pool.num_bytes)} are free; raise adapter_bytes, or use fewer adapters at a time"
            )
        held.append((begin, size))
        self._send(self.addresses["adapter_pool"] + begin, stored)
        return begin // ELEMENT_BYTES[self._type]

    def _send_tables(self, slot: int) -> None:
        arrays: dict[str, NDArray[Any]] = {"adapter_table": self._table, "adapter_spans": self._spans}
        for name, array in arrays.items():
            self._send(self.addresses[name] + slot * array[slot].nbytes, array[slot].reshape(-1).view(np.uint8))

    def _send(self, target: int, content: Bytes) -> None:
        for begin in range(0, len(content), _STAGING_BYTES):
            piece = content[begin : begin + _STAGING_BYTES]
            with self._ring.area(self._stream) as area:
                area[: len(piece)] = piece
                self._device.copy_in(target + begin, area[: len(piece)], self._stream)


class AdapterPool:
    """Places in a range of bytes: the first that is large enough; neighbours are joined when they are freed."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._free = [(0, num_bytes)]  # begin and size, in order

    @property
    def free_bytes(self) -> int:
        """Bytes that nothing has taken."""
        return sum(size for _, size in self._free)

    def take(self, size: int) -> int | None:
        """Take so many bytes; return where they begin, or None when no free place is large enough."""
        for index, (begin, free) in enumerate(self._free):
            if free >= size:
                self._free[index : index + 1] = [(begin + size, free - size)] if free > size else []
                return begin
        return None

    def free(self, begin: int, size: int) -> None:
        """Give back what `take` returned."""
        joined: list[tuple[int, int]] = []
        for one in sorted([*self._free, (begin, size)]):
            if joined and sum(joined[-1]) == one[0]:
                joined[-1] = (joined[-1][0], joined[-1][1] + one[1])
            else:
                joined.append(one)
        self._free = joined


def _as_type(values: FloatArray, kind: ActivationType, adapter: Adapter) -> Bytes:
    """The bytes of the nearest numbers of a type. EngineError for larger ones."""
    with np.errstate(over="ignore"):
        stored: NDArray[Any] = to_bfloat16(values) if kind == "bf16" else values.astype(_FLOATS[kind])
    if kind == "fp16" and np.isinf(stored).any():
        raise EngineError(
            f"the adapter {shown(adapter.name)} has numbers above 65504, and the program computes in float16;"
            " build with gpu.activations: bfloat16"
        )
    return np.ascontiguousarray(stored).reshape(-1).view(np.uint8)


_FLOATS = {"fp16": np.float16, "fp32": np.float32}
