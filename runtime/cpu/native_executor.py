"""The executor of Ingot's own CPU engine: a launch program, walked by a team of threads in one call per step.

A row's logits depend on its own sequence alone, bit for bit, whatever the batch, the threads and the instruction set of
the kernels: rows need no padding. Weights are mapped from the artifact, in huge pages (weight_pages.py).
"""

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TypedDict

from ingot import settings
from ingot.artifact import Artifact, KVGeometry
from ingot.artifact.programs.cpu_program import WEIGHTS_FILE, CpuProgram, Experts
from ingot.artifact.programs.cpu_program_checks import read_draft_programs, read_operations
from ingot.artifact.programs.draft_head import HIDDEN
from ingot.artifact.programs.expert_choices import balanced_owners, read_expert_shares
from ingot.artifact.programs.stage_checks import read_stages
from ingot.artifact.programs.stages import STAGES_FILE, CutProgram, whole_program
from ingot.artifact.safetensors import MappedTensors
from ingot.artifact.serving import WeightPlacement
from ingot.cores import cores_in_words
from ingot.errors import EngineError, UsageError, shown
from ingot.runtime.adapters import Adapter
from ingot.runtime.code_version import code_version
from ingot.runtime.cpu.host_blocks import ArenaBlocks, DividedPool
from ingot.runtime.cpu.kv_pool import KVPool
from ingot.runtime.cpu.limits import MAX_SEQUENCES, resolve_limits
from ingot.runtime.cpu.native.attention import isa_in_use
from ingot.runtime.cpu.native.library import library_file
from ingot.runtime.cpu.native.program import NativeProgram, program_library
from ingot.runtime.cpu.native.staged_program import StagedProgram
from ingot.runtime.cpu.native_head import HeadLimits, NativeHead
from ingot.runtime.cpu.pinned_threads import check_cores, hold_cores
from ingot.runtime.cpu.stages.even_cut import cut_evenly
from ingot.runtime.cpu.stages.process_stages import ProcessStages, StageLimits, StageStep
from ingot.runtime.cpu.state_pool import StatePool, make_states
from ingot.runtime.cpu.weight_pages import WeightPages, place_weights
from ingot.runtime.executors import StageFacts
from ingot.runtime.forward_batch import FloatArray, ForwardBatch
from ingot.runtime.options import EngineOptions
from ingot.runtime.slow_part import NO_SLOW_PART, SlowPart
from ingot.runtime.speculation_options import speculation_options

_log = logging.getLogger(__name__)

_SHOWN = 16  # hexadecimal digits of a digest


def load(artifact: Artifact, options: EngineOptions) -> "NativeExecutor":
    """Make the executor of an artifact, with a KV pool in host memory."""
    program_library()  # before anything large is allocated
    speculation, stages = speculation_options(options.speculation), options.stages or 1
    with_head, ranks = speculation is not None and speculation.uses_head(artifact), options.tensor_parallel or 1
    if stages * ranks > 1:
        options = _options_of_processes(options, with_head)
    limits = resolve_limits(artifact, options)
    assert options.cpu_affinity is None or isinstance(options.cpu_affinity, tuple)
    try:
        return NativeExecutor(
            artifact,
            **limits,
            cores=options.cpu_affinity,
            max_adapters=options.max_adapters,
            max_adapter_rank=options.max_adapter_rank,
            weights=options.weights,
            with_head=with_head,
            stages=stages,
            ranks=ranks,
            whole_experts=options.expert_parallel,
        )
    except MemoryError as error:
        raise EngineError(
            f"{artifact.path}: too little memory to load it; set a smaller kv_bytes or max_batch_tokens, or free some"
            " memory"
        ) from error


def _options_of_processes(options: EngineOptions, with_head: bool) -> EngineOptions:
    """Return the options for stages and ranks in processes. UsageError for what they do not support."""
    asked = [f"{name} is {getattr(options, name)}" for name in ("stages", "tensor_parallel") if getattr(options, name)]
    given, processes = " and ".join(asked), (options.stages or 1) * (options.tensor_parallel or 1)
    if with_head:
        raise UsageError(f"{given}, and speculation: mtp needs one process; leave out one of them")
    cores = options.cpu_affinity
    assert cores is None or isinstance(cores, tuple)
    if cores is not None and len(cores) < processes:
        raise UsageError(
            f"{given}, and cpu_affinity is {cores_in_words(cores)}; name a core or more for each of {processes}"
            " processes, or leave it out"
        )
    if options.kv_offload_to == "memory" or options.kv_offload == "off":
        return options
    if options.kv_offload != "auto":
        raise UsageError(
            f"{given}, and kv_offload is {options.kv_offload}: processes share a KV pool in memory, without a file; set"
            " kv_offload_to to memory, or leave out one of them"
        )
    return replace(options, kv_offload="off")


class _StepLimits(TypedDict):
    """Arguments of a program, whole or in stages."""

    max_batch_tokens: int
    num_threads: int
    isa: str | None


class NativeExecutor:
    """Runs an artifact on the CPU, in one piece or in stages. Implements `executors.TieredStatefulExecutor`,
    `ObservedExecutor` and `AdaptingExecutor`; one thread may call it at a time.

    num_blocks         blocks in the fast part of the KV pool
    slow               its slow part, whose blocks follow
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
    with_head          keep the hidden states of a step, and let `draft_head` make the artifact's draft head
    stages             processes that have a stage each, of all `num_threads` as many (stages/); 1: this process alone
    ranks              processes that compute each stage together, with a part of each operation
    whole_experts      a rank has whole experts, as balanced as the artifact's shares tell; else a part of each expert

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
        slow: SlowPart = NO_SLOW_PART,
        num_states: int = 0,
        max_batch_tokens: int = 512,
        max_sequences: int = MAX_SEQUENCES,
        num_threads: int | None = None,
        cores: tuple[int, ...] | None = None,
        isa: str | None = None,
        max_adapters: int = EngineOptions.max_adapters,
        max_adapter_rank: int = EngineOptions.max_adapter_rank,
        weights: WeightPlacement = "auto",
        with_head: bool = False,
        stages: int = 1,
        ranks: int = 1,
        whole_experts: bool = False,
    ) -> None:
        assert max_batch_tokens > 0
        manifest = artifact.manifest
        self.num_threads = len(cores) if cores else choose_threads(num_threads)
        if cores:
            check_cores(cores)
        self.model, self.kv_geometry = manifest.model, manifest.kv
        self.num_fast_blocks, self.num_blocks = num_blocks, num_blocks + slow.num_blocks
        self.max_batch_tokens, self.max_sequences = max_batch_tokens, max_sequences
        self.max_adapters, self.max_adapter_rank = max_adapters, max_adapter_rank
        in_memory = self.num_blocks if slow.folder is None else num_blocks
        reserved = in_memory * manifest.kv.block_bytes + num_states * manifest.kv.state_bytes
        cut = _cut_of(artifact, stages, ranks)
        self._head = read_draft_programs(artifact) if with_head else None
        self._isa = isa
        self._hidden: FloatArray | None = None
        self._pool: KVPool | DividedPool | None
        self._states: StatePool | DividedPool | None
        self._program: NativeProgram | StagedProgram | ProcessStages | None
        self._processes: ProcessStages | None = None
        self._let_go: Callable[[], object] | None = None
        limits = _StepLimits(max_batch_tokens=max_batch_tokens, num_threads=self.num_threads, isa=isa)
        if stages * ranks > 1:
            assert cut is not None
            self.num_threads = stages * ranks * max(1, self.num_threads // (stages * ranks))
            self.projections = cut.whole.projections
            self.weight_pages = WeightPages("mapped", artifact.manifest.files[WEIGHTS_FILE].bytes)
            of_stages = StageLimits(
                self.num_blocks,
                num_states,
                max_batch_tokens,
                max_sequences,
                self.num_threads,
                cores,
                isa,
                weights,
                ranks,
                _owners(artifact, cut.whole, ranks) if whole_experts else {},
            )
            self._processes = processes = ProcessStages(artifact, cut, of_stages)
            self._program, self._pool, self._states = processes, processes.pool, processes.states
            self.slow_bytes_per_second = math.inf
            self.kernel_version = kernel_version(processes.isa)
            _log.info("%s, %d threads in %d processes", self.kernel_version, self.num_threads, stages * ranks)
            return
        tensors, self.weight_pages = _open_weights(artifact, weights, reserved)
        self._tensors = tensors
        if cut is not None:
            self.projections = cut.whole.projections
            staged = StagedProgram(
                cut, tensors, manifest.kv, num_blocks=num_blocks, slow=slow, num_states=num_states, **limits
            )
            self._program, self._pool, self._states = staged, staged.pool, staged.states
        else:
            program = self._head.model if self._head else read_operations(artifact)
            self.projections = program.projections
            pool, states = KVPool(manifest.kv, num_blocks, slow), make_states(manifest.kv, num_states)
            whole = NativeProgram(program, tensors, pool, states, **limits)
            self._program, self._pool, self._states = whole, pool, states
            self._hidden = whole.rows_of(HIDDEN) if self._head else None
        self.slow_bytes_per_second = self._pool.slow_bytes_per_second
        self._let_go = self._hold(cores) if cores else None
        self.kernel_version = kernel_version(self._program.isa)
        _warn_of_fewer_threads(self.num_threads)  # last: their stacks may take what address space is left
        _log.info("%s, %d threads", self.kernel_version, self.num_threads)

    def forward(self, batch: ForwardBatch) -> FloatArray:
        """Write the batch's keys and values into the pool; return logits [R, vocab], valid until the next call."""
        return self._opened.step(batch)

    @property
    def num_at_once(self) -> int:
        """Most steps in flight; 1 in one process, which computes a step when it is called."""
        return self._processes.num_at_once if self._processes else 1

    def begin(self, batch: ForwardBatch) -> StageStep:
        """Give a step to the stages; see `OverlappingExecutor`."""
        assert self._processes is not None
        return self._processes.begin(batch)

    def settle(self) -> None:
        """Wait until no stage computes."""
        if self._processes:
            self._processes.settle()

    @property
    def stages(self) -> StageFacts:
        """Facts about the processes of stages. For any thread."""
        return self._processes.facts if self._processes else StageFacts()

    @property
    def hidden_states(self) -> FloatArray:
        """Hidden states [max_batch_tokens, hidden_size] that the draft head reads; the last step's T rows are first."""
        assert self._hidden is not None
        return self._hidden

    @property
    def head_geometry(self) -> KVGeometry:
        """Geometry of the draft head's own KV pool."""
        assert self._head is not None
        return self._head.head.kv

    def draft_head(self, num_blocks: int) -> NativeHead:
        """Make the draft head, with a pool of its own; its weights are this executor's."""
        assert self._head is not None
        limits = HeadLimits(num_blocks, self.max_batch_tokens, self.max_sequences, self.num_threads, self._isa)
        return NativeHead(self._head.head, self._tensors, self.model, limits)

    def adapter_share(self, adapter: Adapter) -> float:
        """0: an adapter's memory is allocated when it is loaded."""
        return 0.0

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
    def _opened(self) -> NativeProgram | StagedProgram | ProcessStages:
        if self._program is None:
            raise EngineError("the executor is closed; make another")
        return self._program

    @property
    def leaves_a_core(self) -> bool:
        """Whether fewer threads compute than this process has cores."""
        return self.num_threads < available_cores() and self.num_at_once == 1

    @property
    def is_computing(self) -> bool:
        """Report if a step is being computed. For any thread."""
        return self._program is not None and self._program.is_computing

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block within the pool (copy on write)."""
        assert self._pool is not None
        self.settle()
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
        self.settle()
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
        self._program = self._processes = self._pool = self._states = None

    def _hold(self, cores: tuple[int, ...]) -> Callable[[], object]:
        assert self._program is not None
        try:
            return hold_cores(program_library(), cores, self)
        except EngineError:
            self._program.close()
            raise


def _cut_of(artifact: Artifact, stages: int, ranks: int) -> CutProgram | None:
    """The artifact's stages, or a cut into so many; None for one process. UsageError where it has another number."""
    if not artifact.has(STAGES_FILE):
        if stages > 1:
            return cut_evenly(read_operations(artifact), stages)
        return whole_program(read_operations(artifact)) if ranks > 1 else None
    cut = read_stages(artifact)
    if stages != len(cut.devices) and (stages, ranks) != (1, 1):
        raise UsageError(
            f"stages is {stages}, and {artifact.path} was built for {len(cut.devices)} devices (place): set stages to"
            f" {len(cut.devices)}, leave it and tensor_parallel out, or build without place"
        )
    return cut


def _owners(artifact: Artifact, program: CpuProgram, ranks: int) -> Mapping[str, Sequence[int]]:
    """The rank of each expert by node, as even as the counted choices allow. UsageError for a model without experts."""
    layers = [one for one in program.operations if isinstance(one, Experts)]
    counted = read_expert_shares(artifact, program)
    if not layers:
        raise UsageError(f"expert_parallel is set, and {artifact.path} has no experts; leave it out")
    shares = {one.node: counted.get(one.node, (1 / one.count,) * one.count) for one in layers}
    owners = {node: balanced_owners(of_node, ranks) for node, of_node in shares.items()}
    sums = [
        sum(share for share, owner in zip(of_node, owners[node], strict=True) if owner == rank)
        for node, of_node in shares.items()
        for rank in range(ranks)
    ]
    basis = "as counted on the calibration text" if counted else "if all are equally likely (the build counted none)"
    _log.info(
        "experts: the busiest rank of a layer has %.1f %% of its choices, %s; %.1f %% would be even",
        100 * max(sums),
        basis,
        100 / ranks,
    )
    return owners


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


def kernel_version(isa: str) -> str:
    """Return the library, its instruction sets, and the code that calls it: all that bits depend on here."""
    folder = Path(__file__).parent
    library = library_file(folder / "native")
    assert library is not None
    digest = sha256(library.read_bytes()).hexdigest()[:_SHOWN]
    return f"ingot-cpu {digest}, kernels {isa}, attention {isa_in_use()}, {code_version(folder)}"
