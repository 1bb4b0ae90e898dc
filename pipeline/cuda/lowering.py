"""IR -> launch program: one or two launches a node, what belongs together taken together.

The IR comes from the passes of the target (pack-projections, fuse-residual-norm, fuse-rotary-attention). A gated
activation is taken as a whole:

    Mul(act(gate), up), gate and up = Split(packed)         gated_activation(packed)

with act one of Mul(g, Sigmoid(g)), QuickGelu with alpha 1, Gelu. An operator that has no kernel is refused by name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ingot.artifact import KVGeometry, ModelFacts
from ingot.artifact.kv_geometry import KVType
from ingot.artifact.launch_program import ActivationType, Argument, BufferArgument, LaunchProgram
from ingot.errors import PassError, one_of
from ingot.passes.rewriting import static_columns
from ingot.passes.weight_values import float32_values, is_stored
from ingot.pipeline.cuda.lower_attention import lower_attention
from ingot.pipeline.cuda.lower_linear import lower_gather, lower_gemm
from ingot.pipeline.cuda.program_builder import Bucket, ProgramBuilder, Shared, next_power_of_two
from ingot.pipeline.cuda.tiles import TileTable

_SILU, _GELU_ERF, _GELU_TANH = range(3)  # kernels/gated_activation.py


FLOAT_KV: Mapping[ActivationType, KVType] = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_CARRY_BLOCK = 128
_VOCABULARY_BLOCK = 1024


@dataclass(frozen=True)
class Lowered:
    """The programs of all buckets, and what they share."""

    programs: tuple[LaunchProgram, ...]
    shared: Shared


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
    if not geometry.is_quantized:
        geometry = geometry.model_copy(update={"dtype": FLOAT_KV[activation_type]})
    shared = Shared(activation_type, geometry, tiles or TileTable())
    return Lowered(tuple(_lowered(model, ProgramBuilder(bucket, shared)) for bucket in buckets), shared)


def _lowered(model: ir.Model, builder: ProgramBuilder) -> LaunchProgram:
    carry_tokens(builder)
    NodeLowering(model, builder).run()
    sample_tokens(builder, ModelFacts.model_validate_json(model.metadata_props["ingot.model"]).vocab_size)
    return builder.program()


def carry_tokens(builder: ProgramBuilder) -> None:
    """What begins every program: tokens of the step before, still on the card, take their places in input_ids."""
    rows = builder.rows
    ids, carried, tokens = map(builder.external, ("input_ids", "carried", "tokens"))
    node, grid = ir.Node("ingot", "CarryTokens", [], name="carry_tokens"), (-(-rows // _CARRY_BLOCK),)
    constants = {"BLOCK": _CARRY_BLOCK}
    builder.launch("carry_tokens", node, grid, constants, input_ids=ids, carried=carried, tokens=tokens, rows=rows)


def sample_tokens(builder: ProgramBuilder, vocabulary: int) -> None:
    """The tails: from logits to tokens, greedily or by a draw."""
    constants = {"VOCABULARY": vocabulary, "BLOCK": _VOCABULARY_BLOCK}
    logits, tokens = builder.external("logits"), builder.external("tokens")
    builder.tail("greedy", constants, logits=logits, tokens=tokens, stride=vocabulary)
    given = {name: builder.external(name) for name in ("temperatures", "top_ks", "top_ps", "uniforms")}
    builder.tail("draw", constants, logits=logits, tokens=tokens, stride=vocabulary, **given)


class NodeLowering:
    """One walk over the graph."""

    def __init__(self, model: ir.Model, builder: ProgramBuilder) -> None:
        self.graph = model.graph
        self.builder = builder
        self.gates = {gate.node: gate for node in model.graph if (gate := _gate(node)) is not None}
        self.absorbed = {node for gate in self.gates.values() for node in gate.absorbed}

    def run(self) -> None:
        """Every node in graph order."""
        for node in self.graph:
            if node in self.gates:
                self._gated(self.gates[node])
            elif node not in self.absorbed and not _is_weight(node):
                self.lower(node)

    def lower(self, node: ir.Node) -> None:
        """One node that is no part of a gated activation."""
        self._handler(node)(self, node)

    def _handler(self, node: ir.Node) -> "Callable[[NodeLowering, ir.Node], None]":
        if node.op_type not in _HANDLERS:
            raise PassError(
                f"{node.name!r} ({node.op_type}) has no CUDA kernel; there are kernels for {one_of(_HANDLERS)} and "
                "gated activations"
            )
        return _HANDLERS[node.op_type]

    def _read(self, value: ir.Value | None) -> BufferArgument:
        assert value is not None
        if value.is_graph_input():
            return self.builder.external(value.name or "")
        return self.builder.buffer(value.name or "", 0)

    def _made(self, value: ir.Value) -> BufferArgument:
        """The buffer for what a node makes: the runtime's for the graph's output."""
        if value.is_graph_output():
            return self.builder.external("logits")
        return self.builder.buffer(value.name or "", self.builder.rows * _columns(value))

    def _weight(self, value: ir.Value | None) -> Argument:
        assert value is not None
        return self.builder.weight(value.name or "", self.builder.activation_type, lambda: float32_values(value))

    def _gather(self, node: ir.Node) -> None:
        source = node.inputs[0]
        assert source is not None
        table = None if is_stored(source) else self._read(source)
        indices = node.inputs[1]
        if indices is not None and indices.name == "logits_indices":
            self.builder.begin_head()
        lower_gather(self.builder, node, self._read(node.inputs[1]), table, self.builder.rows)

    def _gemm(self, node: ir.Node) -> None:
        x, out = self._read(node.inputs[0]), self._made(node.outputs[0])
        lower_gemm(self.builder, node, x, out, self.builder.rows)

    def _norm(self, node: ir.Node) -> None:
        fused = node.op_type == "SkipSimplifiedLayerNormalization"
        weight = node.inputs[2 if fused else 1]
        columns = _columns(node.outputs[0])
        total = node.outputs[3] if fused and len(node.outputs) > 3 else None
        rows = self.builder.rows
        stored = self.builder.buffer(f"{node.name}.sum", rows * columns) if total is None else self._made(total)
        epsilon = node.attributes.get_float("epsilon", 1e-5)
        assert epsilon is not None
        self.builder.launch(
            "rms_norm",
            node,
            (rows,),
            {"COLUMNS": columns, "BLOCK": next_power_of_two(columns, 16), "HAS_RESIDUAL": fused},
            x=self._read(node.inputs[0]),
            residual=self._read(node.inputs[1]) if fused else None,
            weight=self._weight(weight),
            out=self._made(node.outputs[0]),
            sum_out=stored if fused else None,
            x_stride=columns,
            residual_stride=columns,
            out_stride=columns,
            epsilon=float(epsilon),
        )

    def _add(self, node: ir.Node) -> None:
        columns, rows = _columns(node.outputs[0]), self.builder.rows
        if any(value is None or is_stored(value) or _columns(value) != columns for value in node.inputs):
            raise PassError(f"{node.name!r} (Add) adds a constant or broadcasts; there is no CUDA kernel for that")
        block = min(1024, next_power_of_two(columns, 16))
        self.builder.launch(
            "add_rows",
            node,
            (rows, -(-columns // block)),
            {"COLUMNS": columns, "BLOCK": block},
            left=self._read(node.inputs[0]),
            right=self._read(node.inputs[1]),
            out=self._made(node.outputs[0]),
            left_stride=columns,
            right_stride=columns,
            out_stride=columns,
        )

    def _attention(self, node: ir.Node) -> None:
        lower_attention(self.builder, node, self._read(node.inputs[0]))

    def _gated(self, gate: "_Gate") -> None:
        columns, rows = _columns(gate.node.outputs[0]), self.builder.rows
        block = min(1024, next_power_of_two(columns, 16))
        self.builder.launch(
            "gated_activation",
            gate.node,
            (rows, -(-columns // block)),
            {"COLUMNS": columns, "BLOCK": block, "KIND": gate.kind},
            gate_up=self._read(gate.packed),
            out=self._made(gate.node.outputs[0]),
            gate_up_stride=2 * columns,
            out_stride=columns,
        )


_HANDLERS: Mapping[str, Callable[[NodeLowering, ir.Node], None]] = {
    "Gather": NodeLowering._gather,
    "Gemm": NodeLowering._gemm,
    "RMSNormalization": NodeLowering._norm,
    "SkipSimplifiedLayerNormalization": NodeLowering._norm,
    "Add": NodeLowering._add,
    "PagedAttention": NodeLowering._attention,
}


@dataclass(frozen=True)
class _Gate:
    """A gated activation: the Mul that ends it, what it reads, and the nodes that it takes along."""

    node: ir.Node
    packed: ir.Value
    kind: int
    absorbed: tuple[ir.Node, ...]


def _gate(node: ir.Node) -> _Gate | None:
    """The gated activation that ends in this node, if it is one."""
    if node.op_type != "Mul":
        return None
    for active, up in (node.inputs, node.inputs[::-1]):
        split = None if up is None else up.producer()
        if active is None or split is None or split.op_type != "Split" or len(split.outputs) != 2:
            continue
        gate, packed = split.outputs[0], split.inputs[0]
        found = _activation(active, gate)
        if found is not None and up is split.outputs[1] and packed is not None:
            return _Gate(node, packed, found[0], (split, *found[1]))
    return None


def _activation(value: ir.Value, gate: ir.Value) -> tuple[int, tuple[ir.Node, ...]] | None:
    """Which activation of the gate a value is, and its nodes."""
    node = value.producer()
    if node is None or gate not in node.inputs:
        return None
    if node.op_type == "QuickGelu" and node.attributes.get_float("alpha", 1.702) == 1.0:
        return _SILU, (node,)
    if node.op_type == "Gelu":
        return (_GELU_TANH if node.attributes.get_string("approximate", "none") == "tanh" else _GELU_ERF), (node,)
    if node.op_type == "Mul":
        other = next((operand for operand in node.inputs if operand is not gate), None)
        sigmoid = None if other is None else other.producer()
        if sigmoid is not None and sigmoid.op_type == "Sigmoid" and sigmoid.inputs[0] is gate:
            return _SILU, (sigmoid, node)
    return None


def _is_weight(node: ir.Node) -> bool:
    """Whether a node makes a stored value: its readers read the initializers themselves."""
    return all(is_stored(value) for value in node.outputs)


def _columns(value: ir.Value | None) -> int:
    assert value is not None
    columns = static_columns(value)
    assert columns is not None, value.name
    return columns
