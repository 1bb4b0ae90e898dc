"""Lowers the IR to launch programs: a few launches per node, or one for several nodes.

The passes of the target (pack-projections, fuse-residual-norm, fuse-rotary-attention) are all optional: fusions.py
finds the nodes of one launch, lowering_context.py tracks the buffers of values, lower_*.py emit the launches.

An operator without a kernel is refused with the name of its node. To add one, write a kernel, its line in
kernel_signatures.py, a function in lower_*.py, and its line in _HANDLERS.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ingot.artifact import ModelFacts
from ingot.artifact.programs.launch_program import (
    ActivationType,
    AdapterPrograms,
    CubinFacts,
    CudaProgram,
    LaunchProgram,
)
from ingot.artifact.programs.projections import Projection
from ingot.errors import PassError, one_of
from ingot.passes.model_facts import KV, MODEL
from ingot.passes.projections import projections_of
from ingot.passes.weights import is_stored
from ingot.pipeline.targets.cuda.expert_layers import find_experts
from ingot.pipeline.targets.cuda.latent_layers import find_latents
from ingot.pipeline.targets.cuda.lower.activations import lower_activation, lower_clip, lower_curve, lower_gate
from ingot.pipeline.targets.cuda.lower.attention import lower_attention, lower_rotary
from ingot.pipeline.targets.cuda.lower.experts import lower_combine, lower_route
from ingot.pipeline.targets.cuda.lower.host_copies import lower_receive, lower_send
from ingot.pipeline.targets.cuda.lower.linear import lower_gemm, lower_matmul, lower_rounding
from ingot.pipeline.targets.cuda.lower.low_rank import RANKS, TILE, units_of
from ingot.pipeline.targets.cuda.lower.recurrent import lower_convolution, lower_delta_rule, lower_scan
from ingot.pipeline.targets.cuda.lower.rows import (
    lower_concatenation,
    lower_gather,
    lower_multiplication,
    lower_norm,
    lower_split,
    lower_sum,
    lower_view,
)
from ingot.pipeline.targets.cuda.lowering_context import ACTIVATIONS, LaunchContext
from ingot.pipeline.targets.cuda.program_builder import TILE_QUERIES, ArgumentValue, Bucket, ProgramBuilder, Shared
from ingot.pipeline.targets.cuda.recurrence_rates import find_rates
from ingot.pipeline.targets.cuda.tiles import TileTable
from ingot.pipeline.targets.fusions import Curve, Gate, Rounding, find_fusions
from ingot.pipeline.targets.recurrent_layers import with_states
from ingot.sizes import ceil_div, next_power_of_two

_CARRY_BLOCK = 128
_MOST_LOGITS = 4096  # logits that a program of a sampling kernel reads at once
MOST_CANDIDATES = 4096  # candidates of a row that a program of the drawing kernel holds in registers
HISTOGRAM_BINS = 64  # finer ones would hardly keep more candidates, and take more instructions


@dataclass(frozen=True)
class StreamedExperts:
    """The model of buckets of so many rows and more, in which the GPU computes experts of the host's."""

    model: ir.Model
    least_rows: int


@dataclass(frozen=True)
class LoweredLaunches:
    """The programs of all buckets, those that compute LoRA adapters, and their shared state."""

    programs: tuple[LaunchProgram, ...]
    shared: Shared
    adapters: AdapterPrograms | None = None

    @property
    def all_programs(self) -> tuple[LaunchProgram, ...]:
        """Programs with and without adapters."""
        return (*self.programs, *(self.adapters.programs if self.adapters else ()))

    def cuda_program(
        self,
        model: ModelFacts,
        sms: Sequence[int],
        cubins: Mapping[int, Mapping[str, CubinFacts]],
        tuned_on: str | None = None,
    ) -> CudaProgram:
        """Return the content of program/launches.json."""
        return CudaProgram(
            sms=tuple(sms),
            activation_type=self.shared.activation_type,
            kv=self.shared.kv,
            vocab_size=model.vocab_size,
            context_tokens=model.context_tokens,
            tile_queries=TILE_QUERIES,
            kernels=self.shared.kernels,
            cubins={sm: dict(facts) for sm, facts in cubins.items()},
            programs=self.programs,
            tuned_on=tuned_on,
            batch_invariant=self.shared.batch_invariant,
            dependent=self.shared.dependent,
            counters=self.shared.counters,
            adapters=self.adapters,
        )


def lower_to_launches(
    model: ir.Model,
    buckets: Sequence[Bucket],
    activation_type: ActivationType = "fp16",
    tiles: TileTable | None = None,
    *,
    batch_invariant: bool = False,
    dependent: bool = False,
    specialized: bool = True,
    adapters: bool = False,
    streamed: StreamedExperts | None = None,
) -> LoweredLaunches:
    """Lower the model for every bucket. An unquantized KV pool gets the activations' type.

    batch_invariant    one kernel and one order of sums per node in all buckets, which must be ragged
    dependent          kernels that start before the launch before them ends, and wait for it (SM 90 and newer)
    specialized        attention of prompts by warps that copy and warps that compute, on SM 90
    adapters           lower every bucket a second time, for steps in which a sequence has a LoRA adapter
    streamed           the model of buckets of many rows, if it is another

    PassError names a node without a kernel, and refuses adapters of a model none of whose layers they can change.
    """
    geometry = with_states(KV.of(model), model.graph)
    flags = {"batch_invariant": batch_invariant, "dependent": dependent, "specialized": specialized}
    shared = Shared.of(activation_type, geometry, tiles or TileTable(), **flags)
    programs = tuple(
        _lowered(
            streamed.model if streamed and bucket.rows >= streamed.least_rows else model, ProgramBuilder(bucket, shared)
        )
        for bucket in buckets
    )
    return LoweredLaunches(programs, shared, _adapter_programs(model, buckets, shared) if adapters else None)


def _adapter_programs(model: ir.Model, buckets: Sequence[Bucket], shared: Shared) -> AdapterPrograms:
    units = [units_of(bucket, batch_invariant=shared.batch_invariant) for bucket in buckets]
    builders = [ProgramBuilder(bucket, shared, adapter_units=one) for bucket, one in zip(buckets, units, strict=True)]
    programs = tuple(_lowered(model, builder) for builder in builders)
    if not shared.adapted:
        raise PassError(
            "gpu.adapters is true, and adapters can change no layer of this model: passes that rotate, scale or prune"
            " its layers leave none as the checkpoint has it; remove the option or the passes"
        )
    projections = tuple(_projections(model, shared))
    layers = tuple(shared.adapted.values())
    return AdapterPrograms(projections=projections, layers=layers, tile=TILE, ranks=RANKS, programs=programs)


def _projections(model: ir.Model, shared: Shared) -> Iterator[Projection]:
    """Yield the checkpoint's modules that are rows of the layers that adapters change."""
    for node in model.graph:
        layer, row = shared.adapted.get(node.name or ""), 0
        for module, rows in projections_of(node) if layer else ():
            assert layer is not None
            yield Projection(module=module, node=layer.node, first_row=row, rows=rows, columns=layer.columns)
            row += rows


def _lowered(model: ir.Model, builder: ProgramBuilder) -> LaunchProgram:
    fusions = find_fusions(model.graph, activations=ACTIVATIONS)
    experts = find_experts(model.graph, fusions)
    rates, latents = find_rates(model.graph, fusions), find_latents(model.graph, fusions)
    carries = _gathers_once(model.graph)
    context = LaunchContext(builder, fusions, experts=experts, latents=latents, rates=rates, carries=carries)
    if _token_readers(model.graph) and not context.carries:
        carry_tokens(builder)
    for node in model.graph:
        if node not in context.fusions.absorbed and not all(is_stored(value) for value in node.outputs):
            lower_node(context, node)
    sample_tokens(builder, MODEL.of(model).vocab_size)
    return builder.program()


def _gathers_once(graph: ir.Graph) -> bool:
    """Report if one gather of rows alone reads the tokens."""
    readers = _token_readers(graph)
    return [one.op_type for one in readers] == ["Gather"] and readers[0].attributes.get_int("axis", 0) == 0


def _token_readers(graph: ir.Graph) -> Sequence[ir.Node]:
    """Nodes that read the tokens; none where the host has the embedding."""
    ids = next((value for value in graph.inputs if value.name == "input_ids"), None)
    return () if ids is None else list(ids.consumers())


def lower_node(context: LaunchContext, node: ir.Node) -> None:
    """Lower a node that no fusion absorbed, with the nodes that its own fusion absorbs."""
    match context.fusions.at.get(node):
        case Gate() as gate:
            lower_gate(context, node, gate)
        case Curve() as curve:
            lower_curve(context, node, curve)
        case Rounding() as rounding:
            lower_rounding(context, node, rounding)
        case _ if node.op_type in _HANDLERS:
            _HANDLERS[node.op_type](context, node)
        case _:
            raise PassError(
                f"{node.name!r} ({node.op_type}) has no CUDA kernel; there are kernels for {one_of(_HANDLERS)}, gated "
                "activations and activations rounded to 8 bits"
            )


_HANDLERS: Mapping[str, Callable[[LaunchContext, ir.Node], None]] = {
    "Add": lower_sum,
    "Clip": lower_clip,
    "CombineExperts": lower_combine,
    "Concat": lower_concatenation,
    "Div": lower_multiplication,
    "Gather": lower_gather,
    "GatedDeltaRule": lower_delta_rule,
    "Gelu": lower_activation,
    "Gemm": lower_gemm,
    "LayerNormalization": lower_norm,
    "MatMul": lower_matmul,
    "Mul": lower_multiplication,
    "PagedAttention": lower_attention,
    "QuickGelu": lower_activation,
    "RMSNormalization": lower_norm,
    "ReceiveFromHost": lower_receive,
    "Relu": lower_activation,
    "Reshape": lower_view,
    "RouteExperts": lower_route,
    "RotaryEmbedding": lower_rotary,
    "SelectiveScan": lower_scan,
    "SendToHost": lower_send,
    "ShortConvolution": lower_convolution,
    "Sigmoid": lower_activation,
    "SkipLayerNormalization": lower_sum,
    "SkipSimplifiedLayerNormalization": lower_sum,
    "Split": lower_split,
    "Squeeze": lower_view,
    "Swish": lower_activation,
    "Tanh": lower_activation,
    "Unsqueeze": lower_view,
}


def carry_tokens(builder: ProgramBuilder) -> None:
    """Begin a program: copy tokens of the previous step, still on the GPU, into input_ids."""
    rows = builder.rows
    ids, carried, tokens = map(builder.external, ("input_ids", "carried", "tokens"))
    node, grid = ir.Node("ingot", "CarryTokens", [], name="carry_tokens"), (ceil_div(rows, _CARRY_BLOCK),)
    constants = {"BLOCK": _CARRY_BLOCK}
    builder.launch("carry_tokens", node, grid, constants, input_ids=ids, carried=carried, tokens=tokens, rows=rows)


def sample_tokens(builder: ProgramBuilder, vocabulary: int) -> None:
    """Add the kernels that choose tokens from the logits: greedy, or by a random draw."""
    rows, block = builder.bucket.logits_rows, min(_MOST_LOGITS, next_power_of_two(vocabulary, 16))
    parts = next_power_of_two(ceil_div(vocabulary, block))
    constants = {"VOCABULARY": vocabulary, "BLOCK": block, "PARTS": parts}
    counters = builder.counters(rows)
    results: dict[str, ArgumentValue] = {
        "logits": builder.external("logits"),
        "tokens": builder.external("tokens"),
        "facts": builder.buffer("logits.facts", rows * 2, "fp32"),
        "stride": vocabulary,
    }
    joined: dict[str, ArgumentValue] = {
        "peaks": builder.buffer("logits.peaks", rows * parts * 3, "fp32"),
        "firsts": builder.buffer("logits.firsts", rows * parts, "i32"),
        "counters": counters,
    }
    greedy = builder.sampler_launch("greedy", constants, parts, results | joined)
    candidates = min(MOST_CANDIDATES, next_power_of_two(vocabulary, 16))
    temperatures = {"temperatures": builder.external("temperatures")}
    binned: dict[str, ArgumentValue] = {
        "counts": builder.buffer("logits.counts", rows * parts * HISTOGRAM_BINS, "i32"),
        "masses": builder.buffer("logits.masses", rows * parts, "fp32"),
    }
    in_bins = {**constants, "BINS": HISTOGRAM_BINS}
    bins = builder.sampler_launch("bin_logits", in_bins, parts, results | temperatures | binned)
    options: dict[str, ArgumentValue] = {
        name: builder.external(name) for name in ("temperatures", "top_ks", "top_ps", "uniforms")
    }
    memory: dict[str, ArgumentValue] = {
        "values": builder.buffer("candidates.values", rows * candidates, "fp32"),
        "ids": builder.buffer("candidates.ids", rows * candidates, "i32"),
        "counters": counters,
    }
    given = results | options | binned | memory
    draw = builder.sampler_launch("draw", {**in_bins, "CANDIDATES": candidates}, parts, given)
    builder.samplers = {"greedy": (greedy,), "draw": (greedy, bins, draw)}
