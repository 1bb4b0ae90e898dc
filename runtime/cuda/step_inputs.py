"""Inputs of a step: all small ones in one copy to the device, and the changed part of the block tables in another.

Pinned staging areas form a ring: the host fills one while the device still copies from the others.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ingot.artifact.kv_geometry import ElementType
from ingot.artifact.programs.launch_program import (
    ELEMENT_BYTES,
    EXTERNAL,
    CudaProgram,
    HostCopy,
    HostValue,
    LaunchProgram,
)
from ingot.runtime.cpu.kv_precision import ELEMENT, decode, encode
from ingot.runtime.cuda.driver.device import Bytes, Device, Stream
from ingot.runtime.forward_batch import FloatArray, ForwardBatch, Int32Array, Int64Array, SamplingArrays
from ingot.sizes import round_up

_AREAS = 4  # steps that the host may be ahead of the device's copies
# The host computes its first stage of a step while the device computes the step before.
_HOST_AREAS = 2
_ALIGNMENT = 16  # bytes, of each input
_DTYPES: dict[str, DTypeLike] = {"i64": np.int64, "i32": np.int32, "fp32": np.float32}
_FLOATS: Mapping[str, ElementType] = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_UNKNOWN = -2  # a cell of the tables whose value on the device is unknown
_CELL_BYTES = 4


@dataclass(frozen=True)
class AdapterStrides:
    """Numbers that every step passes to the kernels: ranks of a row of results, elements of a slot in both tables."""

    ranks: int = 0
    table: int = 0
    spans: int = 0


class StepInputs:
    """Device memory for the inputs of any bucket, and the staging areas that fill it."""

    def __init__(
        self,
        device: Device,
        stream: Stream,
        program: CudaProgram,
        adapters: AdapterStrides | None = None,
    ) -> None:
        programs = program.all_programs if adapters else program.programs
        self.layouts = [InputLayout.of(one, adapters) for one in programs]
        self._device, self._stream = device, stream
        self._tile_queries = program.tile_queries
        size = max(layout.bytes for layout in self.layouts)
        self._address = device.allocate(size, "a step's inputs")
        self._tables = DeviceTables(device, max(one.sequences for one in program.programs), program.table_columns)
        self._ring = StagingRing(device, _AREAS, size + self._tables.bytes, "staging of a step's inputs")

    def addresses(self, layout: "InputLayout") -> dict[str, int]:
        """Addresses of a bucket's inputs, including its block tables."""
        inputs = {name: self._address + offset for name, offset in layout.offsets.items()}
        return {"tables": self._tables.address, **inputs}

    def clear(self) -> None:
        """Queue zeros for all inputs except the tables."""
        size = max(layout.bytes for layout in self.layouts)
        self._device.clear(self._address, size, self._stream)

    def send(
        self,
        layout: "InputLayout",
        batch: ForwardBatch,
        slots: Int64Array,
        carried: Int32Array | None,
        draws: SamplingArrays | None,
    ) -> None:
        """Queue the copies of a step's inputs. On return the caller may change the batch's arrays."""
        with self._ring.area(self._stream) as area:
            try:
                size = layout.fill(area, batch, slots, carried, draws, self._tile_queries)
                self._device.copy_in(self._address, area[:size], self._stream)
                self._tables.send(batch.block_tables, area[layout.bytes :], self._stream)
            except BaseException:
                self._tables.forget()
                raise

    def send_rows(
        self, layout: "InputLayout", batch: ForwardBatch, rows: slice, draws: SamplingArrays | None = None
    ) -> None:
        """Queue the copy of other rows of wanted logits, for the head alone, and of their sampling parameters."""
        with self._ring.area(self._stream) as area:
            parts = [*layout.fill_indices(area, batch, rows)]
            if draws is not None:
                parts.append(layout.fill_sampling(area, draws))
            for part in parts:
                self._device.copy_in(self._address + part.start, area[part], self._stream)


@dataclass(frozen=True)
class InputLayout:
    """Byte offsets of a program's inputs, sampling parameters last: `bytes` with them, `greedy_bytes` without."""

    program: LaunchProgram
    offsets: dict[str, int]
    greedy_bytes: int
    bytes: int
    adapters: AdapterStrides | None = None

    @classmethod
    def of(cls, program: LaunchProgram, adapters: AdapterStrides | None = None) -> "InputLayout":
        """Lay the inputs of a program end to end."""
        offsets, end, greedy_bytes = {}, 0, 0
        for name, count in _counts(program).items():
            if name == "temperatures":
                greedy_bytes = end
            offsets[name] = end
            end += round_up(count * ELEMENT_BYTES[EXTERNAL[name] or ""], _ALIGNMENT)
        return cls(program, offsets, greedy_bytes, end, adapters)

    def fill(
        self,
        staging: Bytes,
        batch: ForwardBatch,
        slots: Int64Array,
        carried: Int32Array | None,
        draws: SamplingArrays | None,
        tile_queries: int,
    ) -> int:
        """Write a batch, padded to the program's size; return how many bytes of `staging` to copy.

        slots    [T] place of each token in the pool: block * block_tokens + token in the block
        carried  [T], see `PipelinedExecutor.submit`; None for none
        """
        self._put(staging, "input_ids", batch.input_ids, 0)
        self._put(staging, "position_ids", batch.position_ids, 0)
        self._put(staging, "slots", slots, -1)
        self._put(staging, "carried", () if carried is None else carried, -1)
        if self.program.adapter_units is not None:
            self._put_adapters(staging, "adapter", _row_slots(batch))
        self.fill_indices(staging, batch, slice(self.program.logits_rows))
        self._put(staging, "lengths", batch.context_lens, 0)
        self._put(staging, "state_slots", () if batch.state_slots is None else batch.state_slots, -1)
        if self.program.attention == "ragged":
            self._put(staging, "query_starts", batch.query_starts, batch.num_tokens)
            sequences, starts = _tiles(batch.query_starts, tile_queries)
            self._put(staging, "tile_sequences", sequences, -1)
            self._put(staging, "tile_starts", starts, 0)
        if draws is None or draws.greedy:
            return self.greedy_bytes
        self.fill_sampling(staging, draws.rows(slice(self.program.logits_rows)))
        return self.bytes

    def fill_indices(self, staging: Bytes, batch: ForwardBatch, rows: slice) -> list[slice]:
        """Write some rows of wanted logits, at most the program's `logits_rows`; return their bytes of `staging`."""
        indices = batch.logits_indices[rows]
        parts = [self._put(staging, "logits_indices", indices, -1)]
        if self.program.adapter_units is not None:
            parts += self._put_adapters(staging, "head_adapter", _row_slots(batch)[indices])
        return parts

    def _put_adapters(self, staging: Bytes, name: str, slots: Int32Array) -> list[slice]:
        """Write the units of rows with these slots (kernels/low_rank.py)."""
        sizes, strides = self.program.adapter_units, self.adapters
        assert sizes is not None
        assert strides is not None
        units, order = adapter_units(slots, sizes.rows)
        header = np.array([len(units), strides.ranks, strides.table, strides.spans], np.int32)
        listed = np.concatenate([header, units.reshape(-1)])
        return [self._put(staging, f"{name}_units", listed, 0), self._put(staging, f"{name}_rows", order, 0)]

    def fill_sampling(self, staging: Bytes, draws: SamplingArrays) -> slice:
        """Write the sampling parameters of these rows; return their bytes of `staging`."""
        self._put(staging, "temperatures", draws.temperatures, 0)
        self._put(staging, "top_ks", draws.top_ks, 0)
        self._put(staging, "top_ps", draws.top_ps, 1)
        self._put(staging, "uniforms", draws.uniforms, 0)
        return slice(self.greedy_bytes, self.bytes)

    def _put(self, staging: Bytes, name: str, values: NDArray[np.generic] | tuple[()], padding: int) -> slice:
        kind = EXTERNAL[name] or ""
        begin = self.offsets[name]
        part = slice(begin, begin + _counts(self.program)[name] * ELEMENT_BYTES[kind])
        _fill(staging[part].view(_DTYPES[kind]), values, padding)
        return part


class DeviceTables:
    """Block tables [sequences, columns] i32 on the device, and a copy of their content on the host.

    A table has a column for every block of the longest context, and a step changes few of them: the rectangle around
    the changed cells is one copy.
    """

    def __init__(self, device: Device, sequences: int, columns: int) -> None:
        self._device = device
        self._held = np.full((sequences, columns), _UNKNOWN, np.int32)
        self.address = device.allocate(self._held.nbytes, f"block tables of {sequences} sequences")

    @property
    def bytes(self) -> int:
        """Size on the device, and the most that one step copies."""
        return self._held.nbytes

    def send(self, tables: Int32Array, staging: Bytes, stream: Stream) -> None:
        """Queue the copy of a step's tables [S, blocks]; -1 marks an unused cell, which no kernel reads."""
        held = self._held[: tables.shape[0], : tables.shape[1]]
        changed = (tables != held) & (tables >= 0)
        rows, columns = changed.any(axis=1).nonzero()[0], changed.any(axis=0).nonzero()[0]
        if not len(rows):
            return
        top, bottom, left, right = rows[0], rows[-1] + 1, columns[0], columns[-1] + 1
        part = held[top:bottom, left:right]
        np.copyto(part, tables[top:bottom, left:right], where=tables[top:bottom, left:right] >= 0)
        copied = staging[: part.size * _CELL_BYTES].reshape(part.shape[0], -1)
        copied.view(np.int32)[...] = part
        pitch = self._held.shape[1] * _CELL_BYTES
        self._device.copy_rows_in(self.address + int(top) * pitch + int(left) * _CELL_BYTES, pitch, copied, stream)

    def forget(self) -> None:
        """Treat the device's content as unknown, after a failure."""
        self._held.fill(_UNKNOWN)


class HostStages(Protocol):
    """Stages of the host, with a step that they compute."""

    def rows_of(self, name: str) -> FloatArray:
        """A buffer of the host's arena [tokens of the largest step, columns]."""
        ...

    def run(self, stage: int) -> None:
        """Run a stage, by its index in program/stages.json."""
        ...


@dataclass(frozen=True)
class ExchangedValues:
    """A copy to or from the host, with the GPU's addresses of its values, of a bucket of so many rows."""

    copy: HostCopy
    addresses: tuple[int, ...]
    rows: int


class HostExchange:
    """Copies values between a program and the stages of the host, and runs these. Rows of padding become zeros."""

    def __init__(self, device: Device, stream: Stream, program: CudaProgram) -> None:
        sizes = Counter[str]()
        for one in program.programs:
            for copy in one.host_copies:
                sizes[copy.direction] = max(sizes[copy.direction], one.rows * copy.row_bytes)
        self._device, self._stream = device, stream
        self._sent = device.allocate_pinned(max(1, sizes["send"]), "values for the host's stages")
        self._ring = StagingRing(device, _HOST_AREAS, max(1, sizes["receive"]), "values of the host's stages")
        self._event = device.make_event()
        self._queued: ExchangedValues | None = None
        """The last copy to the host, until its stage runs."""
        self._stages: HostStages | None = None
        self._tokens = 0

    def begin(self, stages: HostStages, tokens: int) -> None:
        """Begin a step of so many tokens; the stages were given its batch."""
        self._stages, self._tokens, self._queued = stages, tokens, None

    def queue(self, bound: ExchangedValues) -> None:
        """Queue a copy to the host; or wait for it, run the stage, and queue the copy of its results.

        EngineError where queued work or the stage failed.
        """
        if bound.copy.direction == "send":
            for _, at, address in _spans(bound, self._tokens):
                self._device.copy_out(self._sent[at], address, self._stream)
            self._device.record(self._event, self._stream)
            self._queued = bound
            return
        assert self._stages is not None
        if self._queued is not None:
            self._fill(self._queued, self._stages)
            self._queued = None
        self._stages.run(bound.copy.stage)
        self._send_back(bound, self._stages)

    def _fill(self, bound: ExchangedValues, stages: HostStages) -> None:
        """Wait for a copy to the host, and write its values to the host's buffers."""
        self._device.wait_on_host(self._event, repr(bound.copy.node))
        for value, at, _ in _spans(bound, self._tokens):
            kind = _FLOATS[value.rows.type]
            codes = self._sent[at].view(ELEMENT[kind]).reshape(self._tokens, value.columns)
            _columns(stages, value, self._tokens)[...] = decode(codes, None, kind)

    def _send_back(self, bound: ExchangedValues, stages: HostStages) -> None:
        """Queue the copy of values in the host's buffers, and of zeros for rows of padding."""
        with self._ring.area(self._stream) as area:
            for value, at, address in _spans(bound, bound.rows):
                rows = encode(_columns(stages, value, self._tokens), _FLOATS[value.rows.type])[0]
                content = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
                area[at][: len(content)] = content
                area[at][len(content) :] = 0
                self._device.copy_in(address, area[at], self._stream)


def _spans(bound: ExchangedValues, rows: int) -> Iterator[tuple[HostValue, slice, int]]:
    """Yield the values of a copy with their bytes in staging memory, one after another, and their addresses."""
    begin = 0
    for value, address in zip(bound.copy.values, bound.addresses, strict=True):
        end = begin + rows * value.columns * ELEMENT_BYTES[value.rows.type]
        yield value, slice(begin, end), address
        begin = end


def _columns(stages: HostStages, value: HostValue, tokens: int) -> FloatArray:
    return stages.rows_of(value.buffer)[:tokens, value.column : value.column + value.columns]


class StagingRing:
    """`count` pinned areas of `size` bytes. An area is used again once the copies from it are done."""

    def __init__(self, device: Device, count: int, size: int, what: str) -> None:
        self._device, self._what = device, what
        memory = device.allocate_pinned(count * size, what)
        self._areas = [(memory[index * size : (index + 1) * size], device.make_event()) for index in range(count)]
        self._next = 0

    @contextmanager
    def area(self, stream: Stream) -> Iterator[Bytes]:
        """Yield the next area, to be filled and copied from on `stream` within the block."""
        area, event = self._areas[self._next % len(self._areas)]
        self._next += 1
        self._device.wait_on_host(event, self._what)
        try:
            yield area
        finally:
            self._device.record(event, stream)


def token_slots(batch: ForwardBatch, block_tokens: int) -> Int64Array:
    """Slot of each token [T] in the pool."""
    sequences = np.repeat(np.arange(len(batch.context_lens)), np.diff(batch.query_starts))
    blocks = batch.block_tables[sequences, batch.position_ids // block_tokens].astype(np.int64)
    return blocks * block_tokens + batch.position_ids % block_tokens


def _row_slots(batch: ForwardBatch) -> Int32Array:
    """The adapter's slot of each token [T], -1 for none."""
    assert batch.adapter_slots is not None
    return np.repeat(batch.adapter_slots, np.diff(batch.query_starts))


def adapter_units(slots: Int32Array, most: int) -> tuple[Int32Array, Int64Array]:
    """Units [units, 3] of rows with these slots, -1 for none: slot, first place, rows; and the order of the rows."""
    order = np.argsort(slots, kind="stable")[np.count_nonzero(slots < 0) :]
    found, firsts, counts = np.unique(slots[order], return_index=True, return_counts=True)
    pieces = -(-counts // most)
    within = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    begins = np.repeat(firsts, pieces) + within * most
    rows = np.minimum(most, np.repeat(firsts + counts, pieces) - begins)
    return np.stack([np.repeat(found, pieces), begins, rows], axis=1).astype(np.int32), order


def _counts(program: LaunchProgram) -> dict[str, int]:
    """Number of elements of each input."""
    ragged = {
        "query_starts": program.sequences + 1,
        "tile_sequences": program.tiles,
        "tile_starts": program.tiles,
    }
    return {
        **dict.fromkeys(("input_ids", "position_ids", "slots", "carried"), program.rows),
        "logits_indices": program.logits_rows,
        **_adapter_counts(program),
        **dict.fromkeys(("lengths", "state_slots"), program.sequences),
        **(ragged if program.attention == "ragged" else {}),
        **dict.fromkeys(("temperatures", "top_ks", "top_ps", "uniforms"), program.logits_rows),
    }


def _adapter_counts(program: LaunchProgram) -> dict[str, int]:
    sizes, found = program.adapter_units, dict[str, int]()
    for name, rows in (("adapter", program.rows), ("head_adapter", program.logits_rows)):
        if sizes is not None:
            found |= {f"{name}_units": 4 + 3 * sizes.most(rows, program.sequences), f"{name}_rows": rows}
    return found


def _tiles(query_starts: Int32Array, tile_queries: int) -> tuple[Int64Array, Int64Array]:
    """The sequence of each tile, and the tile's first query within it."""
    counts = -(-np.diff(query_starts).astype(np.int64) // tile_queries)
    sequences = np.repeat(np.arange(len(counts)), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    return sequences, (np.arange(len(sequences)) - first) * tile_queries


def _fill(array: NDArray[Any], values: NDArray[np.generic] | tuple[()], padding: int) -> None:
    array[: len(values)] = values
    array[len(values) :] = padding
