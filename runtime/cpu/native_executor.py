"""The executor of Ingot's own CPU engine: a launch program, walked by a team of threads in one call per step.

A row's logits depend on its own sequence alone, bit for bit, whatever the batch, the threads and the instruction set of
the kernels: rows need no padding. Weights are mapped from the artifact, in huge pages (weight_pages.py).
"""

import logging
import os
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path

from ingot import settings
from ingot.artifact import Artifact
from ingot.artifact.programs.cpu_program import WEIGHTS_FILE
from ingot.artifact.programs.cpu_program_checks import read_operations
from ingot.artifact.safetensors import MappedTensors
from ingot.artifact.serving import WeightPlacement
from ingot.errors import EngineError, UsageError, shown
from ingot.runtime.adapters import Adapter
from ingot.runtime.code_version import code_version
from ingot.runtime.cpu.host_blocks import ArenaBlocks
from ingot.runtime.cpu.kv_pool import KVPool
from ingot.runtime.cpu.limits import MAX_SEQUENCES, resolve_limits
from ingot.runtime.cpu.native.attention import isa_in_use
from ingot.runtime.cpu.native.library import library_file
from ingot.runtime.cpu.native.program import NativeProgram, program_library
from ingot.runtime.cpu.pinned_threads import check_cores, hold_cores
from ingot.runtime.cpu.state_pool import make_states
from ingot.runtime.cpu.weight_pages import WeightPages, place_weights
from ingot.runtime.forward_batch import FloatArray, ForwardBatch
from ingot.runtime.options import EngineOptions

_log = logging.getLogger(__name__)

_SHOWN = 16  # hexadecimal digits of a digest


def load(artifact: Artifact, options: EngineOptions) -> "NativeExecutor":
    """Make the executor of an artifact, with a KV pool in host memory."""
    program_library()  # before anything large is allocated
    assert options.cpu_affinity is None or isinstance(options.cpu_affinity, tuple)
    limits = resolve_limits(artifact, options)
    try:
        return NativeExecutor(
            artifact,
            **limits,
            cores=options.cpu_affinity,
            max_adapters=options.max_adapters,
            max_adapter_rank=options.max_adapter_rank,
            weights=options.weights,
        )
    except MemoryError as error:
        raise EngineError(
            f"{artifact.path}: too little memory to load it; set a smaller kv_bytes or max_batch_tokens, or free some"
            " memory"
        ) from error


class NativeExecutor:
    """Runs an artifact on the CPU. Implements `executors.TieredStatefulExecutor`, `ObservedExecutor` and
    `AdaptingExecutor`; one thread may call it at a time.

    num_blocks         blocks in the KV pool
    num_states         slots for side state, of models that have any
    max_batch_tokens   most tokens of one `forward`
    max_sequences      most sequences of one `forward`
    num_threads        threads of a step, the caller's included; None: INGOT_THREADS, else one per core. The engines of
                       a process share its threads and take turns, step by step
    cores              of those threads, one each (pinned_threads.py); None: the system chooses
    isa                instruction set of the kernels; None: the best of this CPU
    max_adapters       slots for LoRA adapters, and the largest rank of one's matrices
    max_adapter_rank
    weights            where the weights are; see `place_weights`

    Raises ArtifactError for a program that does not fit its weights or the model, EngineError where the library was not
    built, for more threads than cores, for cores that the threads cannot be pinned to, and for too little memory.
    """

    device: None = None  # it runs on the CPU
    key_order = KVPool.key_order

    def __init__(
        self,
        artifact: Artifact,
        *,
        num_blocks: int,
        num_states: int = 0,
        max_batch_tokens: int = 512,
        max_sequences: int = MAX_SEQUENCES,
        num_threads: int | None = None,
        cores: tuple[int, ...] | None = None,
        isa: str | None = None,
        max_adapters: int = EngineOptions.max_adapters,
        max_adapter_rank: int = EngineOptions.max_adapter_rank,
        weights: WeightPlacement = "auto",
    ) -> None:
        assert max_batch_tokens > 0
        manifest = artifact.manifest
        self.num_threads = len(cores) if cores else choose_threads(num_threads)
        if cores:
            check_cores(cores)
        self.model, self.kv_geometry = manifest.model, manifest.kv
        self.num_blocks, self.max_batch_tokens, self.max_sequences = num_blocks, max_batch_tokens, max_sequences
        self.max_adapters, self.max_adapter_rank = max_adapters, max_adapter_rank
        reserved = num_blocks * manifest.kv.block_bytes + num_states * manifest.kv.state_bytes
        program = read_operations(artifact)
        tensors, self.weight_pages = _open_weights(artifact, weights, reserved)
        self.projections = program.projections
        self._pool: KVPool | None = KVPool(manifest.kv, num_blocks)
        self._states = make_states(manifest.kv, num_states)
        self._program: NativeProgram | None = NativeProgram(
            program,
            tensors,
            self._pool,
            self._states,
            max_batch_tokens=max_batch_tokens,
            num_threads=self.num_threads,
            isa=isa,
        )
        self._let_go = self._hold(cores) if cores else None
        self.kernel_version = _kernel_version(self._program.isa)
        _warn_of_fewer_threads(self.num_threads)  # last: their stacks may take what address space is left
        _log.info("%s, %d threads", self.kernel_version, self.num_threads)

    def forward(self, batch: ForwardBatch) -> FloatArray:
        """Write the batch's keys and values into the pool; return logits [R, vocab], valid until the next call."""
        return self._opened.step(batch)

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """Let sequences have an adapter from the next step on, by its slot: a free one, or one that gets another.

        EngineError for layers that the program does not have, a rank above max_adapter_rank, and too little memory.
        """
        if adapter.rank > self.max_adapter_rank:
            raise EngineError(
                f"the adapter {shown(adapter.name)} has matrices of rank {adapter.rank}, and the engine takes up to"
                f" {self.max_adapter_rank}: set max_adapter_rank"
            )
        self._opened.load_adapter(slot, adapter, self.max_adapters)

    def unload_adapter(self, slot: int) -> None:
        """Free a slot and its memory; no later step may name it."""
        self._opened.unload_adapter(slot)

    @property
    def adapter_bytes(self) -> int:
        """Bytes of the adapters in slots."""
        return 0 if self._program is None else self._program.adapter_bytes

    @property
    def _opened(self) -> NativeProgram:
        if self._program is None:
            raise EngineError("the executor is closed; make another")
        return self._program

    @property
    def leaves_a_core(self) -> bool:
        """Whether fewer threads compute than this process has cores."""
        return self.num_threads < available_cores()

    @property
    def is_computing(self) -> bool:
        """Whether a step is being computed. For any thread."""
        return self._program is not None and self._program.is_computing

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block within the pool (copy on write)."""
        assert self._pool is not None
        self._pool.copy_block(source, target)

    def host_blocks(self, num_slots: int) -> ArenaBlocks:
        """Make slots in host memory that blocks of the pool move to and from."""
        assert self._pool is not None
        return ArenaBlocks(self._pool, num_slots)

    @property
    def num_states(self) -> int:
        """Slots for side state."""
        return 0 if self._states is None else self._states.num_blocks

    def copy_state(self, source: int, target: int) -> None:
        """Copy one side state onto another slot."""
        assert self._states is not None
        self._states.copy(source, target)

    def host_states(self, num_slots: int) -> ArenaBlocks:
        """Make slots in host memory that side states move to and from."""
        assert self._states is not None
        return ArenaBlocks(self._states, num_slots)

    def close(self) -> None:
        """Free buffers and the KV pool, and unmap the weights, even if the caller keeps the executor. Idempotent.

        Logits that `forward` returned stay valid.
        """
        if self._program is not None:
            self._program.close()
        if self._let_go is not None:
            self._let_go()
        self._program = self._pool = self._states = None

    def _hold(self, cores: tuple[int, ...]) -> Callable[[], object]:
        assert self._program is not None
        try:
            return hold_cores(program_library(), cores, self)
        except EngineError:
            self._program.close()
            raise


def choose_threads(num_threads: int | None) -> int:
    """Threads of a step: what is given, else INGOT_THREADS, else one per core.

    UsageError for more than there are cores: a step waits for the threads that have none.
    """
    threads, cores = num_threads if num_threads is not None else settings.num_threads(), available_cores()
    if not 1 <= threads <= cores:
        name = "num_threads" if num_threads is not None else "INGOT_THREADS"
        raise UsageError(f"{name} is {threads}; it must be from 1 to {cores}, the cores this process may run on")
    return threads


@cache
def _warn_of_fewer_threads(num_threads: int) -> None:
    """Start the threads; say it once where the system refuses some of them. Steps take longer, with the same bits."""
    started = program_library().team_start(num_threads)
    if started < num_threads:
        _log.warning(
            "the system started %d of %d threads, so steps take longer; raise its limit of processes or of memory"
            " (ulimit -u, ulimit -v), or set fewer with num_threads or INGOT_THREADS",
            started,
            num_threads,
        )


def available_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _open_weights(artifact: Artifact, placement: WeightPlacement, reserved: int) -> tuple[MappedTensors, WeightPages]:
    file, pages = artifact.file(WEIGHTS_FILE), list[WeightPages]()

    def place(path: Path) -> memoryview:
        placed = place_weights(path, placement, reserved)
        pages.append(placed.pages)
        return placed.content

    try:
        return MappedTensors(file, place), pages[0]
    except OSError as error:
        raise EngineError(f"{file}: cannot be mapped into memory: {error.strerror}; free some address space") from error


def _kernel_version(isa: str) -> str:
    """The library, the instruction sets that it runs, and the code that calls it: all that bits depend on here."""
    folder = Path(__file__).parent
    library = library_file(folder / "native")
    assert library is not None
    digest = sha256(library.read_bytes()).hexdigest()[:_SHOWN]
    return f"ingot-cpu {digest}, kernels {isa}, attention {isa_in_use()}, {code_version(folder)}"
