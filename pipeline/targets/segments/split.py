"""A partitioned IR -> the program: an ONNX model per segment; steps run these, attentions and recurrent ops."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Literal

import onnx_ir as ir

from ingot.artifact import AttentionStep, Program, RotaryTables, SegmentStep, SinkTensor, ValueFacts
from ingot.artifact.manifest import Step
from ingot.artifact.recurrent import ConvolutionFacts, DeltaRuleFacts
from ingot.artifact.recurrent_steps import ConvolutionStep, DeltaRuleStep, RecurrentStep, ScanStep, StepTensor
from ingot.errors import BuildError
from ingot.passes.lowering.partition_at_attention import ATTENTION, CUTS, segment_of
from ingot.passes.rewriting import attention_operands
from ingot.pipeline.targets.recurrent_layers import recurrent_facts, require_stored_operands

WEIGHTS = "weights.safetensors"  # file in the program's folder
_WEIGHTS_FILE = f"program/{WEIGHTS}"

_DTYPES: dict[ir.DataType | None, Literal["float32", "float16", "int64"]] = {
    ir.DataType.FLOAT: "float32",
    ir.DataType.FLOAT16: "float16",
    ir.DataType.INT64: "int64",
}
_ZERO_BY_DEFAULT = ("window", "value_dim", "query_column", "key_column", "value_column")
_ROWS: dict[str, Literal["tokens", "logits"]] = {"T": "tokens", "R": "logits"}


def split_program(model: ir.Model) -> tuple[Program, list[ir.Model]]:
    """Cut the model at its attentions and recurrent ops, as partition-at-attention numbered the segments.

    Returns the program, and its segments in the order of its SegmentSteps, named segment-000 and so on. Values keep
    the IR's names, in the segments and in the program; initializers are shared with `model`, not copied. Raises
    PassError when the model is not partitioned, BuildError when it has no attention to cut at, or a value between steps
    has no fixed layout.
    """
    nodes, cuts = _by_segment(model.graph)
    if not any(node.op_type == ATTENTION for found in cuts.values() for node in found):
        raise BuildError(
            f"the program has no {ATTENTION} left, which the runtime computes between its segments; take the pass that "
            "expands it (attention-reference is for debugging) out of the recipe"
        )
    steps: list[Step] = []
    segments: list[ir.Model] = []
    for number in sorted({*nodes, *cuts}):
        if number in nodes:
            segments.append(_segment(model, nodes[number], f"segment-{len(segments):03}"))
            steps.append(_segment_step(segments[-1]))
        steps.extend(_cut_step(node) for node in cuts[number])
    values = {value.name or "": _facts(value) for value in _values(model.graph, steps)}
    return Program(steps=tuple(steps), values=values), segments


def _by_segment(graph: ir.Graph) -> tuple[dict[int, list[ir.Node]], dict[int, list[ir.Node]]]:
    """Nodes, and cuts, of each segment in graph order."""
    nodes: dict[int, list[ir.Node]] = defaultdict(list)
    cuts: dict[int, list[ir.Node]] = defaultdict(list)
    for node in graph:
        (cuts if node.op_type in CUTS else nodes)[segment_of(node)].append(node)
    return dict(nodes), cuts


def _segment(model: ir.Model, nodes: list[ir.Node], name: str) -> ir.Model:
    """A model of copies of these nodes; its inputs and outputs are what crosses."""
    inside = set(nodes)
    inputs = _ordered(model.graph, (value for node in nodes for value in _read(node) if value.producer() not in inside))
    outputs = [value for node in nodes for value in node.outputs if _leaves(value, inside)]
    initializers = _unique(value for node in nodes for value in _read(node) if value.is_initializer())
    copies = {value: _copy(value) for value in (*inputs, *initializers)}
    graph = ir.Graph(
        [copies[value] for value in inputs],
        [],
        nodes=[_copy_node(node, copies) for node in nodes],
        initializers=[copies[value] for value in initializers],
        opset_imports={domain: version for domain, version in model.graph.opset_imports.items() if domain != "ingot"},
        name=name,
    )
    graph.outputs.extend(copies[value] for value in outputs)
    return ir.Model(graph, ir_version=model.ir_version, producer_name="ingot")


def _read(node: ir.Node) -> Iterator[ir.Value]:
    return (value for value in node.inputs if value is not None)


def _leaves(value: ir.Value, inside: set[ir.Node]) -> bool:
    return value.is_graph_output() or any(reader not in inside for reader in value.consumers())


def _unique(values: Iterable[ir.Value]) -> list[ir.Value]:
    return list(dict.fromkeys(values))


def _ordered(graph: ir.Graph, values: Iterable[ir.Value]) -> list[ir.Value]:
    """Values other than initializers: the graph's inputs in its order, then the others in order of use."""
    found = [value for value in _unique(values) if not value.is_initializer()]
    given = [value for value in graph.inputs if value in found]
    return [*given, *(value for value in found if value not in given)]


def _copy(value: ir.Value) -> ir.Value:
    return ir.Value(name=value.name, type=value.type, shape=value.shape, const_value=value.const_value)


def _copy_node(node: ir.Node, copies: dict[ir.Value, ir.Value]) -> ir.Node:
    """Copy a node onto the copied values; its outputs join them."""
    copies.update((value, _copy(value)) for value in node.outputs)
    return ir.Node(
        node.domain,
        node.op_type,
        [None if value is None else copies[value] for value in node.inputs],
        list(node.attributes.values()),
        outputs=[copies[value] for value in node.outputs],
        name=node.name,
        metadata_props=dict(node.metadata_props),
    )


def _segment_step(segment: ir.Model) -> SegmentStep:
    graph = segment.graph
    return SegmentStep(
        file=f"program/{graph.name}.onnx",
        inputs=tuple(value.name or "" for value in graph.inputs),
        outputs=tuple(value.name or "" for value in graph.outputs),
    )


def _cut_step(node: ir.Node) -> AttentionStep | RecurrentStep:
    return _attention_step(node) if node.op_type == ATTENTION else _recurrent_step(node)


def _recurrent_step(node: ir.Node) -> RecurrentStep:
    facts, names = recurrent_facts(node), [value.name or "" for value in _read(node)]
    sizes, output = facts.model_dump(), node.outputs[0].name or ""
    if isinstance(facts, ConvolutionFacts):
        weight, *bias = map(_step_tensor, names[1:])
        return ConvolutionStep(**sizes, input=names[0], weight=weight, bias=bias[0] if bias else None, output=output)
    if isinstance(facts, DeltaRuleFacts):
        q, k, v, decay, beta = names
        return DeltaRuleStep(**sizes, query=q, key=k, value=v, decay=decay, beta=beta, output=output)
    x, dt, b, c, *tensors = names
    a, d = map(_step_tensor, tensors)
    return ScanStep(**sizes, input=x, dt=dt, b=b, c=c, a=a, d=d, output=output)


def _step_tensor(name: str) -> StepTensor:
    return StepTensor(file=_WEIGHTS_FILE, name=name)


def _attention_step(node: ir.Node) -> AttentionStep:
    query, key, value, cos, sin, sinks = (
        None if operand is None else operand.name for operand in attention_operands(node)
    )
    assert query is not None
    scale, softcap = node.attributes.get_float("scale"), node.attributes.get_float("softcap", 0.0)
    if scale is None or softcap is None:
        raise BuildError(f"attention {node.name!r} has no scale")
    return AttentionStep(
        layer=_integer(node, "layer"),
        query=query,
        key=key,
        value=value,
        query_column=_integer(node, "query_column"),
        key_column=_integer(node, "key_column"),
        value_column=_integer(node, "value_column"),
        rotary=_rotary(node, cos, sin) if cos is not None and sin is not None else None,
        sinks=None if sinks is None else SinkTensor(file=_WEIGHTS_FILE, name=sinks),
        output=node.outputs[0].name or "",
        num_heads=_integer(node, "num_heads"),
        num_kv_heads=_integer(node, "num_kv_heads"),
        head_dim=_integer(node, "head_dim"),
        scale=scale,
        softcap=softcap,
        window=_integer(node, "window"),
        value_dim=_integer(node, "value_dim") or None,
    )


def _rotary(node: ir.Node, cos: str, sin: str) -> RotaryTables:
    return RotaryTables(file=_WEIGHTS_FILE, cos=cos, sin=sin, rotary_dim=_integer(node, "rotary_dim"))


def cut_tensors(model: ir.Model) -> list[ir.Value]:
    """Initializers that steps other than segments read, each once: rotary tables, sinks, those of recurrent ops.

    PassError for an operand of a recurrent op that must be stored and is computed.
    """
    for node in model.graph:
        if node.op_type in CUTS and node.op_type != ATTENTION:
            require_stored_operands(node)
    cuts = (node for node in model.graph if node.op_type in CUTS)
    return _unique(value for node in cuts for value in _read(node) if value.is_initializer())


def _integer(node: ir.Node, name: str) -> int:
    number = node.attributes.get_int(name, 0 if name in _ZERO_BY_DEFAULT else None)
    if number is None:
        raise BuildError(f"attention {node.name!r} has no {name}")
    return number


def _values(graph: ir.Graph, steps: Iterable[Step]) -> Iterator[ir.Value]:
    """The graph's inputs, and its values that the steps name, in graph order."""
    named = {value.name or "" for value in graph.inputs}
    for step in steps:
        if isinstance(step, SegmentStep):
            named.update((*step.inputs, *step.outputs))
        else:
            named.update((*step.inputs, step.output))
    made = (value for node in graph for value in node.outputs)
    return (value for value in (*graph.inputs, *made) if value.name in named)


def _facts(value: ir.Value) -> ValueFacts:
    shape = list(value.shape or ())
    rows = _ROWS.get(str(shape[0])) if len(shape) in (1, 2) else None
    columns = shape[1] if len(shape) == 2 else 0
    dtype = _DTYPES.get(value.dtype)
    if rows is None or dtype is None or not isinstance(columns, int):
        raise BuildError(
            f"value {value.name!r} between two steps is {value.dtype} {shape}; it must be float32, float16 or int64, "
            "[T], [R], [T, columns] or [R, columns]"
        )
    return ValueFacts(dtype=dtype, rows=rows, columns=columns)
