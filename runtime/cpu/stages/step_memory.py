"""Memory that an engine and the processes of its stages share: steps in flight, values that cross, logits, progress.

A step in flight has a slot: the engine writes its batch there, stages the values that cross, the last one the logits.
Who may write a slot is settled by one byte in a pipe from stage to stage (stage_process.py), so nothing here is locked.
"""

import math
import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ingot.artifact.programs.stages import CutProgram
from ingot.errors import EngineError
from ingot.runtime.cpu.kv_pool import refuse_more_than_memory
from ingot.runtime.forward_batch import FloatArray, ForwardBatch
from ingot.sizes import ceil_div, format_bytes, round_up

_ALIGNMENT = 64
_HEADER = ("tokens", "rows", "sequences", "blocks", "has_states", "has_adapters")
_REMEDY = "lower kv_blocks, kv_bytes or max_batch_tokens, or serve with fewer stages"
ERROR_BYTES = 2000


@dataclass(frozen=True)
class SlotSizes:
    """Sizes of the memory.

    processes   of all stages
    crossings   columns of each value that crosses, stage by stage
    blocks      most KV blocks of a sequence
    """

    slots: int
    processes: int
    tokens: int
    sequences: int
    blocks: int
    vocabulary: int
    crossings: tuple[int, ...]

    @classmethod
    def of(cls, cut: CutProgram, *, slots: int, processes: int, tokens: int, sequences: int) -> "SlotSizes":
        """The sizes for the stages of a program."""
        columns = [cut.whole.buffers[one.buffer].columns for run in cut.runs for one in run.crossings]
        blocks = ceil_div(cut.whole.context_tokens, cut.whole.kv.block_tokens)
        return cls(slots, processes, tokens, sequences, blocks, cut.whole.vocab_size, tuple(columns))

    def arrays(self) -> Iterator[tuple[str, DTypeLike, tuple[int, ...]]]:
        """Name, type and shape of each array, in the order of their places."""
        yield "progress", np.int64, (self.processes, 2)
        yield "errors", np.uint8, (self.processes, ERROR_BYTES)
        for slot in range(self.slots):
            yield f"{slot}.header", np.int64, (len(_HEADER),)
            for name in ("input_ids", "position_ids", "logits_indices"):
                yield f"{slot}.{name}", np.int64, (self.tokens,)
            yield f"{slot}.query_starts", np.int32, (self.sequences + 1,)
            for name in ("context_lens", "state_slots", "adapter_slots"):
                yield f"{slot}.{name}", np.int32, (self.sequences,)
            yield f"{slot}.block_tables", np.int32, (self.sequences * self.blocks,)
            for number, columns in enumerate(self.crossings):
                yield f"{slot}.crossing.{number}", np.float32, (self.tokens, columns)
            yield f"{slot}.logits", np.float32, (self.tokens, self.vocabulary)

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays. Those that no step writes take no memory."""
        return sum(round_up(_size(kind, shape), _ALIGNMENT) for _, kind, shape in self.arrays())


class StepMemory:
    """The arrays, over shared memory.

    progress   [processes, 2] i64: steps that a process began, and that it ended
    """

    def __init__(self, shape: SlotSizes, memory: mmap.mmap) -> None:
        self.shape, at = shape, 0
        self._arrays: dict[str, NDArray[Any]] = {}
        for name, kind, sizes in shape.arrays():
            count = math.prod(sizes)
            self._arrays[name] = np.frombuffer(memory, kind, count, at).reshape(sizes)
            at += round_up(_size(kind, sizes), _ALIGNMENT)
        self.progress = self._arrays["progress"]

    def put(self, slot: int, batch: ForwardBatch) -> None:
        """Write a batch. EngineError for one that is larger than the slot."""
        (sequences, blocks), shape = batch.block_tables.shape, self.shape
        sizes = batch.num_tokens, len(batch.logits_indices), sequences, blocks
        most = shape.tokens, shape.tokens, shape.sequences, shape.blocks
        if any(size > limit for size, limit in zip(sizes, most, strict=True)):
            raise EngineError(
                f"a step of {sizes[0]} tokens in {sizes[2]} sequences of up to {sizes[3]} KV blocks is larger than the"
                f" {shape.tokens} tokens, {shape.sequences} sequences and {shape.blocks} blocks that stages have room"
                " for: raise max_batch_tokens or max_sequences"
            )
        states, adapters = batch.state_slots, batch.adapter_slots
        self._of(slot, "header")[:] = (*sizes, states is not None, adapters is not None)
        self._of(slot, "input_ids")[: sizes[0]] = batch.input_ids
        self._of(slot, "position_ids")[: sizes[0]] = batch.position_ids
        self._of(slot, "logits_indices")[: sizes[1]] = batch.logits_indices
        self._of(slot, "query_starts")[: sequences + 1] = batch.query_starts
        self._of(slot, "context_lens")[:sequences] = batch.context_lens
        self._of(slot, "block_tables")[: sequences * blocks] = batch.block_tables.reshape(-1)
        for name, given in (("state_slots", states), ("adapter_slots", adapters)):
            if given is not None:
                self._of(slot, name)[:sequences] = given

    def batch(self, slot: int) -> ForwardBatch:
        """The batch in a slot, as views."""
        tokens, rows, sequences, blocks, has_states, has_adapters = self._of(slot, "header").tolist()
        return ForwardBatch(
            input_ids=self._of(slot, "input_ids")[:tokens],
            position_ids=self._of(slot, "position_ids")[:tokens],
            logits_indices=self._of(slot, "logits_indices")[:rows],
            query_starts=self._of(slot, "query_starts")[: sequences + 1],
            context_lens=self._of(slot, "context_lens")[:sequences],
            block_tables=self._of(slot, "block_tables")[: sequences * blocks].reshape(sequences, blocks),
            state_slots=self._of(slot, "state_slots")[:sequences] if has_states else None,
            adapter_slots=self._of(slot, "adapter_slots")[:sequences] if has_adapters else None,
        )

    def crossing(self, slot: int, number: int) -> FloatArray:
        """A value that crosses, [tokens, columns]."""
        return self._of(slot, f"crossing.{number}")

    def logits(self, slot: int) -> FloatArray:
        """Logits of a slot, [tokens, vocabulary]."""
        return self._of(slot, "logits")

    def put_error(self, process: int, error: Exception) -> None:
        """Write why a process could not compute a step."""
        text = f"{type(error).__name__}: {error}" if not isinstance(error, EngineError) else str(error)
        found = text.encode("utf-8", "replace")[:ERROR_BYTES]
        self._arrays["errors"][process] = 0
        self._arrays["errors"][process, : len(found)] = np.frombuffer(found, np.uint8)

    def take_error(self) -> str:
        """Return what the first stage with an error wrote, and forget it."""
        errors = self._arrays["errors"]
        texts = [bytes(each).rstrip(b"\0").decode("utf-8", "replace") for each in errors]
        errors[:] = 0
        return next(filter(None, texts), "a stage could not compute the step")

    def _of(self, slot: int, name: str) -> NDArray[Any]:
        return self._arrays[f"{slot}.{name}"]


@dataclass(frozen=True)
class SharedMemory:
    """Memory without a name that processes share by its descriptor. It is freed with the last of them."""

    descriptor: int
    num_bytes: int

    @classmethod
    def make(cls, num_bytes: int, what: str) -> "SharedMemory":
        """Make it, of zeros. EngineError, which names it, for more than fits the machine."""
        refuse_more_than_memory(num_bytes, what, _REMEDY)
        try:
            if hasattr(os, "memfd_create"):
                descriptor = os.memfd_create("ingot", os.MFD_CLOEXEC)
            else:
                with tempfile.TemporaryFile() as file:
                    descriptor = os.dup(file.fileno())
            os.ftruncate(descriptor, num_bytes)
        except OSError as error:
            size = format_bytes(num_bytes)
            raise EngineError(
                f"{what} needs {size} to share, and the system refused it ({error}); {_REMEDY}"
            ) from error
        return cls(descriptor, num_bytes)

    def map(self) -> mmap.mmap:
        """Map it. EngineError where the system refuses."""
        try:
            memory = mmap.mmap(self.descriptor, self.num_bytes, mmap.MAP_SHARED)
        except (OSError, ValueError) as error:
            size = format_bytes(self.num_bytes)
            raise EngineError(f"{size} of shared memory cannot be mapped ({error}); {_REMEDY}") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages for shared memory: only a little slower
                memory.madvise(mmap.MADV_HUGEPAGE)
        return memory


def _size(kind: DTypeLike, shape: tuple[int, ...]) -> int:
    return np.dtype(kind).itemsize * math.prod(shape)
