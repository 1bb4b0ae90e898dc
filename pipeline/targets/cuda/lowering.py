"""IR -> launch program: a few launches a node, what belongs together taken together.

The IR comes from the passes of the target (pack-projections, fuse-residual-norm, fuse-rotary-attention), all of which
may be missing: fusions.py finds what one launch computes, lowering_context.py says where values lie, lower_*.py know
the kernels.
An operator that has no kernel is refused by the name of its node. To add one: a kernel, its line in the catalogue, a
function in lower_*.py, its line in _HANDLERS.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ingot.artifact import KVGeometry, ModelFacts
from ingot.artifact.launch_program import ActivationType, CubinFacts, CudaProgram, LaunchProgram
from ingot.errors import PassError, one_of
from ingot.passes.weights import is_stored
from ingot.pipeline.targets.cuda.fusions import Gate, Rounding, find_fusions
from ingot.pipeline.targets.cuda.lower_attention import lower_attention, lower_rotary
from ingot.pipeline.targets.cuda.lower_linear import lower_gemm, lower_matmul, lower_rounding
from ingot.pipeline.targets.cuda.lower_rows import (
    lower_activation,
    lower_gate,
    lower_gather,
    lower_multiplication,
    lower_norm,
    lower_split,
    lower_sum,
    lower_view,
)
from ingot.pipeline.targets.cuda.lowering_context import Scope
from ingot.pipeline.targets.cuda.program_builder import TILE_QUERIES, Bucket, ProgramBuilder, Shared, next_power_of_two
from ingot.pipeline.targets.cuda.tiles import TileTable

_CARRY_BLOCK = 128
_MOST_LOGITS = 4096  # that a program of the samplers looks at together


@dataclass(frozen=True)
class Lowered:
    """The programs of all buckets, and what they share."""

    programs: tuple[LaunchProgram, ...]
    shared: Shared

    def cuda_program(
        self,
        model: ModelFacts,
        sms: Sequence[int],
        cubins: Mapping[int, Mapping[str, CubinFacts]],
        tuned_on: str | None = None,
    ) -> CudaProgram:
        """What the file of launches says."""
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
        )


def lower_to_launches(
    model: ir.Model,
    buckets: Sequence[Bucket],
    activation_type: ActivationType = "fp16",
    tiles: TileTable | None = None,
) -> Lowered:
    """Lower the model for every bucket. The KV pool is in the activations' type where the model's is not quantized.

    PassError names the node that has no kernel.
    """
    geometry = KVGeometry.model_validate_json(model.metadata_props["ingot.kv"])
    shared = Shared.of(activation_type, geometry, tiles or TileTable())
    return Lowered(tuple(_lowered(model, ProgramBuilder(bucket, shared)) for bucket in buckets), shared)


def _lowered(model: ir.Model, builder: ProgramBuilder) -> LaunchProgram:
    carry_tokens(builder)
    scope = Scope(builder, find_fusions(model.graph))
    for node in model.graph:
        if node not in scope.fusions.absorbed and not all(is_stored(value) for value in node.outputs):
            lower_node(scope, node)
    sample_tokens(builder, ModelFacts.model_validate_json(model.metadata_props["ingot.model"]).vocab_size)
    return builder.program()


def lower_node(scope: Scope, node: ir.Node) -> None:
    """One node that no other takes along, with what it takes along itself."""
    match scope.fusions.at.get(node):
        case Gate() as gate:
            lower_gate(scope, node, gate)
        case Rounding() as rounding:
            lower_rounding(scope, node, rounding)
        case _ if node.op_type in _HANDLERS:
            _HANDLERS[node.op_type](scope, node)
        case _:
            raise PassError(
                f"{node.name!r} ({node.op_type}) has no CUDA kernel; there are kernels for {one_of(_HANDLERS)}, gated "
                "activations and activations rounded to 8 bits"
            )


_HANDLERS: Mapping[str, Callable[[Scope, ir.Node], None]] = {
    "Add": lower_sum,
    "Div": lower_multiplication,
    "Gather": lower_gather,
    "Gelu": lower_activation,
    "Gemm": lower_gemm,
    "MatMul": lower_matmul,
    "Mul": lower_multiplication,
    "PagedAttention": lower_attention,
    "QuickGelu": lower_activation,
    "RMSNormalization": lower_norm,
    "Relu": lower_activation,
    "Reshape": lower_view,
    "RotaryEmbedding": lower_rotary,
    "Sigmoid": lower_activation,
    "SkipSimplifiedLayerNormalization": lower_norm,
    "Split": lower_split,
    "Squeeze": lower_view,
    "Swish": lower_activation,
    "Tanh": lower_activation,
    "Unsqueeze": lower_view,
}


def carry_tokens(builder: ProgramBuilder) -> None:
    """What begins every program: tokens of the step before, still on the card, take their places in input_ids."""
    rows = builder.rows
    ids, carried, tokens = map(builder.external, ("input_ids", "carried", "tokens"))
    node, grid = ir.Node("ingot", "CarryTokens", [], name="carry_tokens"), (-(-rows // _CARRY_BLOCK),)
    constants = {"BLOCK": _CARRY_BLOCK}
    builder.launch("carry_tokens", node, grid, constants, input_ids=ids, carried=carried, tokens=tokens, rows=rows)


def sample_tokens(builder: ProgramBuilder, vocabulary: int) -> None:
    """Add the kernels that choose tokens from the logits: greedy, or by a random draw."""
    constants = {"VOCABULARY": vocabulary, "BLOCK": min(_MOST_LOGITS, next_power_of_two(vocabulary, 16))}
    logits, tokens = builder.external("logits"), builder.external("tokens")
    builder.sampler("greedy", constants, logits=logits, tokens=tokens, stride=vocabulary)
    given = {name: builder.external(name) for name in ("temperatures", "top_ks", "top_ps", "uniforms")}
    builder.sampler("draw", constants, logits=logits, tokens=tokens, stride=vocabulary, **given)
