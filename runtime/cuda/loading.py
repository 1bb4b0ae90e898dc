"""From an artifact to a program that is ready on a device: what is loaded, in what order, and how much of it.

Compiled code runs on GPUs of its own major version whose minor version is not lower (CUDA Programming Guide, Binary
Compatibility): code for SM 80 runs on 86 and 89. From SM 90 on kernels are compiled with architecture-specific
features (sm_90a, sm_120a), and such code runs on that SM only.
"""

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from ingot.artifact import Artifact, ModelFacts
from ingot.artifact.programs.launch_checks import read_launches
from ingot.artifact.programs.launch_program import (
    ELEMENT_BYTES,
    WEIGHTS_FILE,
    CudaProgram,
    LaunchProgram,
    Step,
    cubins_file,
)
from ingot.artifact.programs.projections import Projection
from ingot.artifact.programs.stages import DEVICE_WEIGHTS_FILE, STAGES_FILE, STREAMED_WEIGHTS_FILE
from ingot.artifact.safetensors import MappedTensors
from ingot.errors import ArtifactError, EngineError, UsageError
from ingot.runtime.cuda.adapters import DeviceAdapters
from ingot.runtime.cuda.driver.device import Device, LoadedKernel, Stream
from ingot.runtime.cuda.kv_pool import DevicePool, DeviceStates, device_pool_size, make_states
from ingot.runtime.cuda.library_matmuls import library_launches, may_use_library
from ingot.runtime.cuda.programs import (
    Binding,
    BoundProgram,
    MatmulBinder,
    NoBinder,
    OpenMatmuls,
    OpenSegments,
    SegmentBinder,
)
from ingot.runtime.cuda.step_inputs import HostExchange, StepInputs
from ingot.runtime.cuda.step_outputs import StepOutputs
from ingot.runtime.cuda.weights import DeviceWeights, LoadWeights, StreamedWeights, upload_weights
from ingot.runtime.options import EngineOptions, free_memory_bytes
from ingot.runtime.slow_part import resolve_slow_part
from ingot.sizes import format_bytes

_log = logging.getLogger(__name__)

_OWN_FEATURES_FROM = 90  # triton/backends/nvidia/compiler.py: sm_arch_from_capability
GRAPH_CAPTURES = 4  # graphs that may contain a bucket's body: see programs.Part; those of the head alone are small


@dataclass(frozen=True)
class LoadedProgram:
    """A program on its device."""

    device: Device
    stream: Stream
    model: ModelFacts
    programs: tuple[BoundProgram, ...]
    weights: DeviceWeights
    pool: DevicePool
    states: DeviceStates | None
    inputs: StepInputs
    outputs: StepOutputs
    exchange: HostExchange | None
    segments: SegmentBinder
    matmuls: MatmulBinder
    adapters: DeviceAdapters | None
    projections: tuple[Projection, ...]
    max_batch_tokens: int
    max_sequences: int


@dataclass(frozen=True)
class _Limits:
    tokens: int
    sequences: int


def load_program(
    artifact: Artifact,
    device: Device,
    options: EngineOptions,
    open_segments: OpenSegments,
    open_matmuls: OpenMatmuls,
    load_weights: LoadWeights = upload_weights,
) -> LoadedProgram:
    """Load everything onto the device; the KV pool comes last and takes what is left.

    ArtifactError for files that do not fit each other; UsageError for limits above the largest bucket; EngineError for
    a GPU that cannot run the kernels or has too little memory.
    """
    device.activate()
    program = read_launches(artifact)
    if options.max_adapters == 0:
        program = program.model_copy(update={"adapters": None})
    limits = _limits(program, options)
    stream = device.make_stream()
    kernels = _load_kernels(artifact, program, device)
    weights_file = DEVICE_WEIGHTS_FILE if artifact.has(STAGES_FILE) else WEIGHTS_FILE
    weights = load_weights(device, stream, artifact.file(weights_file))
    arena = _arena(program, device, stream)
    adapters = DeviceAdapters(device, stream, program, options) if program.adapters else None
    inputs = StepInputs(device, stream, program, adapters.strides if adapters else None)
    outputs = StepOutputs(device, stream, program)
    exchange = HostExchange(device, stream, program) if any(one.host_copies for one in program.programs) else None
    streamed = _streamed(artifact, program, device)
    with ExitStack() as undo:
        segments = open_segments(artifact, device, stream)
        undo.callback(segments.close)
        matmuls = _open_matmuls(program, device, stream, open_matmuls)
        undo.callback(matmuls.close)
        library_first = not isinstance(matmuls, NoBinder) and may_use_library(program)
        externals = {**outputs.addresses, "counters": _counters(program, device, stream)}
        externals |= adapters.addresses if adapters else {}
        addressed = (device, program.kernels, kernels, weights, externals, arena)
        binding = Binding(*addressed, segments, matmuls, exchange, streamed, library_first)
        _rehearse(binding, inputs, stream)
        states = make_states(program.kv, device, stream, options, limits.sequences)
        pool = _pool(artifact, program, device, stream, options, limits)
        bound = _bound(binding, pool, states, inputs)
        device.synchronize("loading the program")
        undo.pop_all()
    used = f"weights {format_bytes(weights.num_bytes)}, arena {format_bytes(_arena_bytes(program))}, KV pool {pool}"
    _log.info("%s: %s; %s free", device.name, used, format_bytes(device.free_bytes()))
    return LoadedProgram(
        device,
        stream,
        artifact.manifest.model,
        bound,
        weights,
        pool,
        states,
        inputs,
        outputs,
        exchange,
        segments,
        matmuls,
        adapters,
        program.adapters.projections if program.adapters else (),
        limits.tokens,
        limits.sequences,
    )


def choose_sm(program: CudaProgram, device: Device) -> int:
    """Choose the best SM that the program was compiled for. EngineError naming all of them when the GPU runs none."""
    fitting = [sm for sm in program.cubins if runs_on(sm, device.sm)]
    if not fitting:
        built = ", ".join(str(sm) for sm in sorted(program.cubins))
        raise EngineError(
            f"the artifact's kernels are compiled for SM {built}, and {device.name} has SM {device.sm}; build it for "
            f"the target cuda-sm{device.sm}{_lower_minors(device.sm)}, or run it on a GPU of SM {built}"
        )
    if max(fitting) != device.sm:
        _log.info("kernels for SM %d run on %s, which has SM %d", max(fitting), device.name, device.sm)
    if program.tuned_on not in (None, device.name):
        _log.warning(
            "the kernels' tiles were measured on %s, and this is %s; results are correct but may be slow: run "
            "`ingot tune` here and build with its table",
            program.tuned_on,
            device.name,
        )
    return max(fitting)


def runs_on(built: int, sm: int) -> bool:
    """Whether code compiled for the SM `built` runs on a GPU of the SM `sm`."""
    return built == sm or (built < _OWN_FEATURES_FROM and built // 10 == sm // 10 and built < sm)


def _lower_minors(sm: int) -> str:
    """Further targets whose code the GPU runs."""
    return "" if sm >= _OWN_FEATURES_FROM or sm % 10 == 0 else f" (or one from cuda-sm{sm // 10 * 10} up to it)"


def _load_kernels(artifact: Artifact, program: CudaProgram, device: Device) -> Mapping[str, LoadedKernel]:
    """Load every kernel of the program onto the device, by its key."""
    sm = choose_sm(program, device)
    cubins = MappedTensors(artifact.file(cubins_file(sm)))
    return {
        key: device.load_kernel(cubins.view(key).copy(), program.kernels[key], facts)
        for key, facts in program.cubins[sm].items()
    }


def _limits(program: CudaProgram, options: EngineOptions) -> _Limits:
    """Limits of a step: those of the largest ragged bucket, or less where the caller asks for less."""
    ragged = [one for one in program.programs if one.attention == "ragged"]
    if not ragged:
        raise ArtifactError("the program has no bucket for prompts; build the artifact again with gpu.prefill_rows")
    largest: LaunchProgram = max(ragged, key=lambda one: one.rows)
    asked = {"max_batch_tokens": options.max_batch_tokens, "max_sequences": options.max_sequences}
    most = {"max_batch_tokens": largest.rows, "max_sequences": largest.sequences}
    setting = {"max_batch_tokens": "gpu.prefill_rows", "max_sequences": "gpu.decode_rows"}
    for name, value in asked.items():
        if value is not None and value > most[name]:
            raise UsageError(
                f"{name} is {value}, and the artifact's largest bucket holds {most[name]}; ask for at most that, or "
                f"build with a larger {setting[name]}"
            )
    return _Limits(*(asked[name] or most[name] for name in asked))


def _open_matmuls(program: CudaProgram, device: Device, stream: Stream, open_: OpenMatmuls) -> MatmulBinder:
    """Open the library that the program needs; or may use, and then only if it is installed."""
    if any(one.library_matmuls for one in program.programs):
        return open_(device, stream)
    if not may_use_library(program):
        return NoBinder()
    try:
        opened = open_(device, stream)
    except EngineError as error:
        _log.info("Ingot's kernels compute all matmuls: %s", error)
        return NoBinder()
    _log.info("%s computes matmuls of many rows; INGOT_CUBLASLT=0 keeps them with Ingot's kernels", opened.version)
    return opened


def _streamed(artifact: Artifact, program: CudaProgram, device: Device) -> StreamedWeights | None:
    """Read the weights that steps copy from host memory; None for a program without any."""
    tensors = dict.fromkeys(copy.tensor for one in program.programs for copy in one.weight_copies)
    return StreamedWeights(device, artifact.file(STREAMED_WEIGHTS_FILE), list(tensors)) if tensors else None


def _arena_bytes(program: CudaProgram) -> int:
    return max(1, *(one.arena_bytes for one in program.all_programs))


def _arena(program: CudaProgram, device: Device, stream: Stream) -> int:
    """Allocate and clear the memory for the values of any bucket; return its address."""
    address = device.allocate(_arena_bytes(program), "the arena of a step's values")
    device.clear(address, _arena_bytes(program), stream)
    return address


def _counters(program: CudaProgram, device: Device, stream: Stream) -> int:
    """Allocate the counters of a launch's programs, zeros; return their address."""
    size = max(1, program.counters) * ELEMENT_BYTES["i32"]
    address = device.allocate(size, "counters of a launch's programs")
    device.clear(address, size, stream)
    return address


def _rehearse(binding: Binding, inputs: StepInputs, stream: Stream) -> None:
    """Run all segments and library matmuls once, on zeros, before the KV pool takes the remaining memory.

    What engines and libraries allocate on their first run is then allocated. The largest bucket runs first: the others
    fit in its memory.
    """
    if not any(_foreign_steps(binding, layout.program) for layout in inputs.layouts):
        return
    inputs.clear()
    for layout in sorted(inputs.layouts, key=lambda layout: -layout.program.rows):
        placed = replace(binding, externals={**binding.externals, **inputs.addresses(layout)})
        for step in _foreign_steps(binding, layout.program):
            placed.bind(layout.program, step)(stream)
    binding.device.synchronize("the first run of segments and library matmuls")


def _foreign_steps(binding: Binding, program: LaunchProgram) -> tuple[Step, ...]:
    """Steps that another engine or a library may run."""
    taken = library_launches(binding.kernels, program) if binding.library_first else ()
    return (*program.segment_calls, *program.library_matmuls, *taken)


def _pool(
    artifact: Artifact,
    program: CudaProgram,
    device: Device,
    stream: Stream,
    options: EngineOptions,
    limits: _Limits,
) -> DevicePool:
    """Make the KV pool from the memory that is left."""
    size = device_pool_size(
        artifact.manifest.model,
        program.kv,
        device,
        kv_blocks=options.kv_blocks,
        kv_bytes=options.kv_bytes,
        max_sequences=limits.sequences,
        graph_nodes=GRAPH_CAPTURES
        * sum(len(one.launches) + sum(map(len, one.samplers.values())) for one in program.all_programs),
    )
    slow = resolve_slow_part(
        artifact.manifest.model,
        program.kv,
        size.num_blocks,
        kv_offload="off" if options.kv_offload == "auto" else options.kv_offload,
        kv_offload_to="memory",
        folder=Path(),
        free_bytes=free_memory_bytes,
    )
    return DevicePool(device, stream, program.kv, size.num_blocks, slow)


def _bound(
    binding: Binding, pool: DevicePool, states: DeviceStates | None, inputs: StepInputs
) -> tuple[BoundProgram, ...]:
    """Bind every bucket's program to its addresses."""
    shared = {**binding.externals, "kv_pool": pool.address, "kv_scales": pool.address}
    if states is not None:
        shared["state_pool"] = states.address
    return tuple(
        BoundProgram.of(layout.program, replace(binding, externals=shared | inputs.addresses(layout)), layout)
        for layout in inputs.layouts
    )
