"""From an artifact to a program that is ready on a device: what lies there, in what order, and how much of it.

How many KV blocks a card gets: all that is free once weights, arena and logits lie there, but for a reserve.
"""

import logging
from contextlib import ExitStack
from dataclasses import dataclass, replace

from ingot.artifact import Artifact, KVGeometry, ModelFacts
from ingot.artifact.launch_program import WEIGHTS_FILE, CudaProgram, LaunchProgram, Step, read_cuda_program
from ingot.errors import ArtifactError, EngineError, UsageError
from ingot.runtime.cuda.cubin_choice import load_kernels
from ingot.runtime.cuda.device import Device, Stream
from ingot.runtime.cuda.host_blocks import DevicePool
from ingot.runtime.cuda.programs import (
    Binding,
    BoundProgram,
    NoProducts,
    OpenProducts,
    OpenSegments,
    ProductBinder,
    SegmentBinder,
)
from ingot.runtime.cuda.step_inputs import StepInputs
from ingot.runtime.cuda.step_outputs import StepOutputs
from ingot.runtime.cuda.weights import DeviceWeights
from ingot.runtime.options import EngineOptions, PoolSize, explicit_pool_size
from ingot.sizes import format_bytes

_LOG = logging.getLogger(__name__)
_RESERVE_BYTES = 256 * 2**20  # what the driver takes as it goes: local memory of kernels, growing heaps
_RESERVE_SHARE = 0.01  # of the card: pieces that no block fits in, and others on the card
_NODE_BYTES = 16 * 1024  # of a kernel in a captured graph, generously


def device_pool_size(
    model: ModelFacts,
    kv: KVGeometry,
    device: Device,
    *,
    kv_blocks: int | None,
    kv_bytes: int | None,
    max_sequences: int,
    graph_nodes: int,
) -> PoolSize:
    """Decide once, when everything else is allocated, and log why.

    graph_nodes    kernels in all graphs that may be captured later

    UsageError as `resolve_pool_size`; EngineError where not one block fits.
    """
    size = explicit_pool_size(kv, kv_blocks, kv_bytes) or _fitting(model, kv, device, max_sequences, graph_nodes)
    _LOG.info("KV pool: %d blocks of %d tokens (%s)", size.num_blocks, kv.block_tokens, size.reason)
    return size


def _fitting(model: ModelFacts, kv: KVGeometry, device: Device, max_sequences: int, graph_nodes: int) -> PoolSize:
    free = device.free_bytes()
    reserve = _RESERVE_BYTES + int(device.total_bytes * _RESERVE_SHARE) + graph_nodes * _NODE_BYTES
    per_context = -(-model.context_tokens // kv.block_tokens)
    usable, fitting = per_context * max_sequences, max(0, free - reserve) // kv.block_bytes
    if usable <= fitting:
        reason = (
            f"{max_sequences} sequences of the model's {model.context_tokens} tokens, {format_bytes(free)} were free"
        )
        return PoolSize(usable, reason)
    total, reserved = format_bytes(device.total_bytes), format_bytes(reserve)
    kept = f"{format_bytes(free)} free of {total}, {reserved} kept for graphs and driver"
    if not fitting:
        raise EngineError(
            f"no KV block of {format_bytes(kv.block_bytes)} fits on {device.name}: {kept}; build with fewer "
            "gpu.decode_rows, a smaller max_batch_tokens or fewer bits, end what else runs on the card, or give "
            "kv_blocks to go below the reserve"
        )
    if fitting < per_context:
        kept += f"; less than one context of {model.context_tokens} tokens, so long requests will be refused"
    return PoolSize(fitting, kept)


_PARTS = 4  # times that a bucket's launches may be captured: see programs.Part


@dataclass(frozen=True)
class LoadedProgram:
    """A program on its device."""

    device: Device
    stream: Stream
    model: ModelFacts
    programs: tuple[BoundProgram, ...]
    weights: DeviceWeights
    pool: DevicePool
    inputs: StepInputs
    outputs: StepOutputs
    segments: SegmentBinder
    products: ProductBinder
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
    open_products: OpenProducts,
) -> LoadedProgram:
    """Bring everything to the device; the KV pool last, from what is left.

    ArtifactError for files that do not fit each other; UsageError for limits that no bucket holds; EngineError for a
    card that cannot run the kernels, or has no room.
    """
    device.activate()
    program = read_program(artifact)
    limits = _limits(program, options)
    stream = device.make_stream()
    kernels = load_kernels(artifact, program, device)
    weights = DeviceWeights(device, stream, artifact.file(WEIGHTS_FILE))
    arena = _arena(program, device, stream)
    inputs, outputs = StepInputs(device, stream, program), StepOutputs(device, stream, program)
    with ExitStack() as undo:
        segments = open_segments(artifact, device, stream)
        undo.callback(segments.close)
        products = open_products(device, stream) if _has_products(program) else NoProducts()
        undo.callback(products.close)
        binding = Binding(device, program.kernels, kernels, weights, outputs.addresses, arena, segments, products)
        _rehearse(binding, inputs, stream)
        pool = _pool(artifact, program, device, stream, options, limits)
        bound = _bound(binding, pool, inputs)
        device.synchronize("loading the program")
        undo.pop_all()
    taken = f"weights {format_bytes(weights.num_bytes)}, arena {format_bytes(_arena_bytes(program))}, KV pool {pool}"
    _LOG.info("%s: %s; %s free", device.name, taken, format_bytes(device.free_bytes()))
    return LoadedProgram(
        device,
        stream,
        artifact.manifest.model,
        bound,
        weights,
        pool,
        inputs,
        outputs,
        segments,
        products,
        limits.tokens,
        limits.sequences,
    )


def _has_products(program: CudaProgram) -> bool:
    return any(one.library_products for one in program.programs)


def _arena_bytes(program: CudaProgram) -> int:
    return max(1, *(one.arena_bytes for one in program.programs))


def _arena(program: CudaProgram, device: Device, stream: Stream) -> int:
    """Address of the memory for the values of any bucket, cleared."""
    address = device.allocate(_arena_bytes(program), "the arena of a step's values")
    device.clear(address, _arena_bytes(program), stream)
    return address


def _pool(
    artifact: Artifact,
    program: CudaProgram,
    device: Device,
    stream: Stream,
    options: EngineOptions,
    limits: _Limits,
) -> DevicePool:
    """The KV pool, from what everything else has left."""
    size = device_pool_size(
        artifact.manifest.model,
        program.kv,
        device,
        kv_blocks=options.kv_blocks,
        kv_bytes=options.kv_bytes,
        max_sequences=limits.sequences,
        graph_nodes=_PARTS * sum(len(one.launches) + len(one.tails) for one in program.programs),
    )
    return DevicePool(device, stream, program.kv, size.num_blocks)


def _bound(binding: Binding, pool: DevicePool, inputs: StepInputs) -> tuple[BoundProgram, ...]:
    """Every bucket's program with its arguments at their addresses."""
    shared = {**binding.externals, "kv_pool": pool.address, "kv_scales": pool.address}
    return tuple(
        BoundProgram.of(layout.program, replace(binding, externals=shared | inputs.addresses(layout)), layout)
        for layout in inputs.layouts
    )


def _rehearse(binding: Binding, inputs: StepInputs, stream: Stream) -> None:
    """Run once, on zeros, what engines and libraries compute of every bucket: what they allocate as they first do lies
    there before the KV pool takes what is left. The largest first, in whose memory all others fit."""
    if not any(layout.program.segment_calls or layout.program.library_products for layout in inputs.layouts):
        return
    inputs.clear()
    for layout in sorted(inputs.layouts, key=lambda layout: -layout.program.rows):
        placed = replace(binding, externals={**binding.externals, **inputs.addresses(layout)})
        steps: tuple[Step, ...] = (*layout.program.segment_calls, *layout.program.library_products)
        for step in steps:
            placed.bind(layout.program, step)(stream)
    binding.device.synchronize("trying what engines and libraries run of the program")


def read_program(artifact: Artifact) -> CudaProgram:
    """The artifact's launches. ArtifactError when they are none, or not for the manifest's KV geometry."""
    name = artifact.manifest.program.launches
    if name is None:
        raise ArtifactError(f"{artifact.path}: has no launches for a card; build it for a CUDA target")
    file = artifact.file(name)
    program = read_cuda_program(file)
    if program.kv != artifact.manifest.kv:
        raise ArtifactError(f"{file}: its KV geometry is not the manifest's; build the artifact again")
    return program


def _limits(program: CudaProgram, options: EngineOptions) -> _Limits:
    """What a step may hold: as much as the largest bucket for mixed steps, or less where the caller says so."""
    mixed = [one for one in program.programs if one.attention == "ragged"]
    if not mixed:
        raise ArtifactError("the program has no bucket for prompts; build the artifact again with gpu.prefill_rows")
    largest: LaunchProgram = max(mixed, key=lambda one: one.rows)
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
