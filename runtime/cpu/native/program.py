"""A CPU launch program that is ready to run: one call of the C walk (launch_program.c) per step."""

from ctypes import CDLL, POINTER, addressof, byref, c_char_p, c_int, c_int32, c_void_p, pointer
from dataclasses import dataclass
from mmap import mmap

import numpy as np
from numpy.typing import NDArray

from ingot.artifact.programs.cpu_program import CpuProgram
from ingot.artifact.programs.stages import LOGITS
from ingot.artifact.safetensors import MappedTensors
from ingot.errors import EngineError, shown
from ingot.runtime.adapters import Adapter
from ingot.runtime.cpu.kv_pool import KVPool, map_zeros
from ingot.runtime.cpu.native import abi
from ingot.runtime.cpu.native.fetch_ahead import choose_distances
from ingot.runtime.cpu.native.kernels import find_kernels
from ingot.runtime.cpu.native.library import native_library
from ingot.runtime.cpu.native.low_rank import PackedAdapter
from ingot.runtime.cpu.native.program_binding import FLOAT_BYTES, BoundOperations
from ingot.runtime.cpu.native.structures import Batch, OperationAt, RankGroup
from ingot.runtime.cpu.native.tensor_parallel import LINE_BYTES, Rank
from ingot.runtime.cpu.state_pool import StatePool
from ingot.runtime.forward_batch import FloatArray, ForwardBatch
from ingot.sizes import format_bytes

_FIRST_LOGITS_ROWS = 64
_PROBLEMS = {
    abi.STEP_RESULT["bad-token"]: "has a token id or position out of range",
    abi.STEP_RESULT["bad-size"]: "has sizes out of range, or that contradict each other",
}


@dataclass(frozen=True)
class GroupMemory:
    """A rank of a group of processes, and the memory that they share: tensor_parallel.memory_bytes of zeros."""

    rank: Rank
    memory: mmap


class NativeProgram:
    """A program over one KV pool, and one of side states; one thread may call it at a time.

    pool               None for a program without attention
    states             None for one without recurrent layers
    last_mixing        the model's last operation that reads other tokens of a sequence, -1 if another device has it;
                       None for a whole program
    max_batch_tokens   most tokens of one step
    num_threads        threads of the process's team that a step uses, the caller's included
    isa                instruction set of the kernels; None: the best of this CPU
    group              of processes that compute each step together, whose steps, pool and states are the same

    Raises ArtifactError for weights that do not fit the program, EngineError for too little memory, an instruction set
    that does not run here, or a library that was not built.
    """

    def __init__(
        self,
        program: CpuProgram,
        weights: MappedTensors,
        pool: KVPool | None,
        states: StatePool | None = None,
        *,
        max_batch_tokens: int,
        num_threads: int,
        isa: str | None = None,
        last_mixing: int | None = None,
        group: GroupMemory | None = None,
    ) -> None:
        self._library = program_library()
        if isa is not None and isa not in instruction_sets():
            raise EngineError(f"no instruction set {shown(isa)} here; this CPU runs {', '.join(instruction_sets())}")
        self._rows, self._vocab_size = max_batch_tokens, program.vocab_size if LOGITS in program.buffers else 0
        arena_bytes = max(1, program.arena_floats * max_batch_tokens) * FLOAT_BYTES
        memory = map_zeros(arena_bytes, "the arena of a step's operations", "set a smaller max_batch_tokens")
        arena = np.frombuffer(memory, np.float32)
        rank = None if group is None else group.rank
        self._bound = BoundOperations(program, weights, arena, max_batch_tokens, pool, states, rank)
        self._program, self._adapters = program, dict[int, PackedAdapter]()
        self._grow_logits(_FIRST_LOGITS_ROWS)
        self._input_ids, self._position_ids, self._logits_indices = np.zeros((3, max_batch_tokens), np.int64)
        self._batch = Batch(*(a.ctypes.data for a in (self._input_ids, self._position_ids, self._logits_indices)))
        self._batch.num_states = 0 if states is None else states.num_blocks
        self._arrays: tuple[NDArray[np.int32] | None, ...] = ()
        """The arrays that the batch refers to."""
        self._is_computing = c_int32(0)
        self._batch.is_computing = pointer(self._is_computing)
        self._batch_at = byref(self._batch)
        self._handle = self._library.program_make(
            self._bound.array,
            len(self._bound.array),
            program.head_start,
            program.head_start - 1 if last_mixing is None else last_mixing,
            program.context_tokens,
            num_threads,
            max_batch_tokens,
            None if isa is None else isa.encode(),
        )
        if self._handle is None:
            raise EngineError(
                f"too little memory for steps of {max_batch_tokens} tokens; set a smaller max_batch_tokens"
            )
        choose_distances(find_kernels(self.isa), self._bound.linears)
        if group is not None:
            self._join(group)

    def _join(self, group: GroupMemory) -> None:
        self._shared = np.frombuffer(group.memory, np.uint8)
        floats = (len(self._shared) - group.rank.count * LINE_BYTES) // (2 * FLOAT_BYTES)
        joined = RankGroup(
            parts=addressof(self._bound.parts),
            memory=self._shared.ctypes.data,
            slot_floats=floats,
            rank=group.rank.number,
            ranks=group.rank.count,
        )
        self._library.program_join(self._handle, byref(joined))

    def load_adapter(self, slot: int, adapter: Adapter, slots: int) -> None:
        """Let sequences of steps from now on have an adapter: it replaces what is in the slot, of `slots`.

        EngineError for layers that are not linear operations of the program, and for too little memory.
        """
        assert 0 <= slot < slots
        too_little = EngineError(
            f"too little memory for the adapter {shown(adapter.name)}, of {format_bytes(adapter.num_bytes)}; unload"
            " another, or set a smaller kv_bytes or max_batch_tokens"
        )
        try:
            packed = PackedAdapter(self._program, adapter)
        except MemoryError as error:
            raise too_little from error
        if self._library.program_reserve_adapters(self._handle, slots, packed.ranks) != 0:
            raise too_little
        self._library.program_set_adapter(self._handle, slot, packed.array)
        self._adapters[slot] = packed

    def unload_adapter(self, slot: int) -> None:
        """Free a slot's memory; no later step may name the slot. Nothing for a free one."""
        if slot in self._adapters:
            self._library.program_set_adapter(self._handle, slot, None)
            del self._adapters[slot]

    @property
    def adapter_bytes(self) -> int:
        """Bytes of the matrices of the adapters in slots."""
        return sum(packed.num_bytes for packed in self._adapters.values())

    def rows_of(self, name: str) -> FloatArray:
        """Return a buffer of the arena, [max_batch_tokens, columns]; steps read and write it."""
        return self._bound.rows_of(name)

    @property
    def isa(self) -> str:
        """Instruction set of the kernels."""
        name: bytes = self._library.program_isa(self._handle)
        return name.decode()

    @property
    def is_computing(self) -> bool:
        """Whether a step is being computed; False as soon as it ends, before its caller goes on. For any thread."""
        return bool(self._is_computing.value)

    def step(self, batch: ForwardBatch, seconds: NDArray[np.float64] | None = None) -> FloatArray:
        """Run a step; return logits [R, vocabulary], valid until the next one.

        seconds   [operations]: the time of each is added; float64

        Raises EngineError for a batch that is out of the program's range.
        """
        self._is_computing.value = 1
        try:
            self.load_batch(batch)
            return self.run(range(len(self._bound.array)), seconds)
        finally:
            self._is_computing.value = 0

    def load_batch(self, batch: ForwardBatch) -> None:
        """Copy the step that the next calls of `run` compute. The caller keeps the batch until then."""
        tokens, rows = len(batch.input_ids), len(batch.logits_indices)
        assert tokens <= self._rows
        if rows > len(self._logits):
            self._grow_logits(max(rows, 2 * len(self._logits)))
        self._input_ids[:tokens], self._position_ids[:tokens] = batch.input_ids, batch.position_ids
        self._logits_indices[:rows] = batch.logits_indices
        starts, lens, tables = (
            np.ascontiguousarray(each, np.int32)
            for each in (batch.query_starts, batch.context_lens, batch.block_tables)
        )
        slots = None if batch.state_slots is None else np.ascontiguousarray(batch.state_slots, np.int32)
        adapters = None if batch.adapter_slots is None else np.ascontiguousarray(batch.adapter_slots, np.int32)
        self._batch.tokens, self._batch.logits = tokens, rows
        sequences = self._batch.attention
        sequences.query_starts, sequences.context_lens = starts.ctypes.data, lens.ctypes.data
        sequences.block_tables = tables.ctypes.data
        self._batch.state_slots = None if slots is None else slots.ctypes.data
        self._batch.adapter_slots = None if adapters is None else adapters.ctypes.data
        sequences.num_sequences, sequences.max_blocks = tables.shape
        self._arrays = (starts, lens, tables, slots, adapters)

    def write_logits_to(self, logits: FloatArray) -> None:
        """Have steps from now on write their logits to this memory, [max_batch_tokens, vocabulary], C-contiguous."""
        assert logits.shape == (self._rows, self._vocab_size)
        self._logits = logits
        self._bound.place_logits(logits)

    def run(self, operations: range, seconds: NDArray[np.float64] | None = None) -> FloatArray:
        """Run some operations of the step that `load_batch` copied; return its logits, [R, 0] of a program without.

        Raises EngineError for a batch that is out of the program's range.
        """
        self._batch.begin, self._batch.end = operations.start, operations.stop
        times = None if seconds is None else seconds.ctypes.data
        problem = self._library.program_step(self._handle, self._batch_at, times)
        if problem:
            raise EngineError(f"the step {_PROBLEMS[problem]}")
        return self._logits[: self._batch.logits]

    def close(self) -> None:
        """Free the memory that steps use. Idempotent; logits stay valid."""
        if self._handle is not None:
            self._library.program_free(self._handle)
            self._handle = None
            self._adapters.clear()

    def _grow_logits(self, rows: int) -> None:
        shape = (min(rows, self._rows), self._vocab_size)
        try:
            self._logits = np.zeros(shape, np.float32)
        except MemoryError as error:
            size = format_bytes(shape[0] * shape[1] * FLOAT_BYTES)
            raise EngineError(
                f"the logits of {shape[0]} tokens take {size}, and the system refused them; ask for those of fewer"
                " tokens, set a smaller max_batch_tokens, or free some memory"
            ) from error
        self._bound.place_logits(self._logits)


def program_library() -> CDLL:
    """The compiled library, ready for programs. EngineError where it was not built."""
    library = native_library()
    if library is None:
        raise EngineError(
            "the library of the native CPU engine was not built: install Ingot again where there is a C compiler (cc,"
            " gcc, clang), or build the artifact with cpu.engine: onnxruntime"
        )
    library.program_make.argtypes = (POINTER(OperationAt), *[c_int] * 6, c_char_p)
    library.program_make.restype = c_void_p
    library.program_free.argtypes = (c_void_p,)
    library.program_free.restype = None
    library.program_reserve_adapters.argtypes = (c_void_p, c_int, c_int)
    library.program_reserve_adapters.restype = c_int
    library.program_set_adapter.argtypes, library.program_set_adapter.restype = (c_void_p, c_int, c_void_p), None
    library.program_join.argtypes, library.program_join.restype = (c_void_p, POINTER(RankGroup)), None
    library.program_isa.argtypes, library.program_isa.restype = (c_void_p,), c_char_p
    library.program_step.argtypes, library.program_step.restype = (c_void_p, POINTER(Batch), c_void_p), c_int
    library.kernels_name.argtypes, library.kernels_name.restype = (c_int,), c_char_p
    return library


def instruction_sets() -> tuple[str, ...]:
    """Instruction sets of the kernels that run here, best first."""
    library, names = program_library(), list[str]()
    while (name := library.kernels_name(len(names))) is not None:
        names.append(name.decode())
    return tuple(names)
