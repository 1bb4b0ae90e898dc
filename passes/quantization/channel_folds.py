"""Where the scale of a linear layer's input channels can go without changing the model's function.

    x -> Gemm(x, W)      as      x / s -> Gemm(x / s, W * s)

x / s costs nothing where what makes x can take it up:

    x = RMSNormalization(h, w)                              w / s
    x = Mul(activation, up), up rows of Gemm(h, U, b?)      those rows of U and b / s
    x = PagedAttention(q, k, v), v rows of Gemm(h, V, b?)   those rows of V and b / s, one s for a group's heads

In exact arithmetic nothing changes; what is quantized afterwards does. Where nothing can take it up, a Mul can stand in
front of the layers, which costs a pass over the activations when the model runs:

    x -> Mul(x, 1 / s) -> Gemm(.., W * s)
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import onnx_ir as ir

from ingot.passes.calibration import Float32Array, Float64Array, LinearGroup
from ingot.passes.rewriting import Refusal, add_initializer, small_constant
from ingot.passes.weights import apply_to_array, drop_if_unused, float32_values, is_stored


@dataclass(frozen=True)
class Fold:
    """What takes up 1 / s: a norm (`rows` is None), or rows of a linear layer, repeated over heads where it is a value.

    heads    (kv heads, heads per kv head, head dim) of an attention between; None for none
    """

    node: ir.Node
    rows: slice | None = None
    heads: tuple[int, int, int] | None = None

    def shared(self, channels: Float64Array) -> Float64Array:
        """Per channel of x [in]: the mean over the channels that must have one scale."""
        if self.heads is None:
            return channels
        kv_heads, group, dim = self.heads
        mean = channels.reshape(kv_heads, group, dim).mean(axis=1, keepdims=True)
        return np.broadcast_to(mean, (kv_heads, group, dim)).reshape(-1)

    def of_rows(self, scale: Float64Array) -> Float64Array:
        """s of x [in] as that of the rows of the layer that makes it."""
        if self.heads is None:
            return scale
        return scale.reshape(self.heads)[:, 0].reshape(-1)


@dataclass(frozen=True)
class OwnMul:
    """A Mul by 1 / s in front of the layers."""

    def shared(self, channels: Float64Array) -> Float64Array:
        """Per channel of x [in]: each has a scale of its own."""
        return channels


INPUT_SCALE = ".input_scale"  # how the name of a Mul's constant ends


def can_scale(group: LinearGroup) -> bool:
    """Whether the columns of all of the group's layers can be scaled, whatever takes up the inverse."""
    return all(is_own(linear.inputs[1]) for linear in group.linears)


def find_fold(group: LinearGroup) -> Fold | Refusal:
    """What can take up the scale of a group's input, or why nothing can."""
    name, producer = group.linears[0].name or "", group.source.producer()
    for linear in group.linears:
        if not is_own(linear.inputs[1]):
            return Refusal(linear.name or "", "has a weight that others read too, or that is quantized already")
    if producer is None or set(group.source.consumers()) != set(group.linears) or group.source.is_graph_output():
        return Refusal(name, "reads what others read too")
    if producer.op_type == "RMSNormalization":
        return Fold(producer) if is_own(producer.inputs[1]) else Refusal(name, "follows a norm with a computed weight")
    if producer.op_type == "Mul":
        return next(filter(None, map(_maker, producer.inputs)), Refusal(name, "reads a product of no linear layer"))
    if producer.op_type == "PagedAttention":
        return _behind_attention(producer) or Refusal(name, "reads an attention whose values no linear layer makes")
    return Refusal(name, f"reads the result of {producer.op_type}, which cannot take up a scale")


def _behind_attention(node: ir.Node) -> Fold | None:
    maker = _maker(node.inputs[2])
    if maker is None:
        return None
    heads, kv_heads, dim = (node.attributes.get_int(name, 0) or 0 for name in ("num_heads", "num_kv_heads", "head_dim"))
    return Fold(maker.node, maker.rows, (kv_heads, heads // kv_heads, dim))


def _maker(value: ir.Value | None) -> Fold | None:
    """The rows of the linear layer that a value is, and that nothing else reads."""
    if value is None or len(value.uses()) != 1 or value.producer() is None:
        return None
    producer, start, columns = value.producer(), 0, value.shape[-1] if value.shape else None
    if producer is not None and producer.op_type == "Split":
        sizes = small_constant(producer.inputs[1])
        if sizes is None:
            return None
        start = sum(sizes[: producer.outputs.index(value)])
        source = producer.inputs[0]
        producer = source.producer() if source is not None and len(source.uses()) == 1 else None
    if producer is None or producer.op_type != "Gemm" or not isinstance(columns, int):
        return None
    own = all(is_own(operand) for operand in producer.inputs[1:] if operand is not None)
    return Fold(producer, slice(start, start + columns)) if own else None


def is_own(operand: ir.Value | None) -> bool:
    """Whether a stored operand, and the tensor behind its Cast, has one reader."""
    if operand is None or not is_stored(operand) or len(operand.uses()) != 1:
        return False
    producer = operand.producer()
    if producer is None:
        return True
    stored = producer.inputs[0]
    return producer.op_type == "Cast" and stored is not None and len(stored.uses()) == 1


@dataclass
class Scalings:
    """Scales that were chosen, to be applied at once: a layer may get one for its columns and one for its rows."""

    columns: dict[ir.Node, Float64Array] = field(default_factory=dict)
    rows: dict[ir.Node, Float64Array] = field(default_factory=dict)
    norms: dict[ir.Node, Float64Array] = field(default_factory=dict)
    inputs: dict[LinearGroup, Float64Array] = field(default_factory=dict)

    def add(self, group: LinearGroup, fold: Fold | OwnMul, scale: Float64Array) -> None:
        """W * s for the group's layers, 1 / s for what makes their input."""
        self.columns.update(dict.fromkeys(group.linears, scale))
        if isinstance(fold, OwnMul):
            self.inputs[group] = scale
            return
        if fold.rows is None:
            self.norms[fold.node] = scale
            return
        weight = fold.node.inputs[1]
        assert weight is not None
        assert weight.shape is not None
        rows = self.rows.setdefault(fold.node, np.ones(int(weight.shape.numpy()[0])))
        rows[fold.rows] = fold.of_rows(scale)

    def apply(self, graph: ir.Graph) -> None:
        """Put the scaled tensors in the place of the old ones, under their names, in float32; matrices are lazy."""
        for node in dict.fromkeys([*self.columns, *self.rows]):
            columns, rows = self.columns.get(node), self.rows.get(node)
            factor = _outer(rows, columns)
            scale_stored(graph, node, 1, factor)
            if rows is not None and len(node.inputs) > 2:
                scale_stored(graph, node, 2, (None, (1 / rows).astype(np.float32)))
        for group, scale in self.inputs.items():
            _multiply_input(graph, group, (1 / scale).astype(np.float32))
        for node, scale in self.norms.items():
            scale_stored(graph, node, 1, (None, (1 / scale).astype(np.float32)))


def _multiply_input(graph: ir.Graph, group: LinearGroup, factor: Float32Array) -> None:
    """Put one Mul between the group's input and its layers."""
    first = group.linears[0]
    constant = add_initializer(graph, ir.Tensor(factor, name=f"{first.name}{INPUT_SCALE}"))
    scaled = ir.Value(name=f"{first.name}.scaled_input", type=group.source.type, shape=group.source.shape)
    graph.insert_before(
        first, ir.node("Mul", [group.source, constant], outputs=[scaled], name=f"{first.name}.scale_input")
    )
    for linear in group.linears:
        linear.replace_input_with(0, scaled)


Factors = tuple[Float32Array | None, Float32Array | None]  # [rows, 1] and [columns]


def _outer(rows: Float64Array | None, columns: Float64Array | None) -> Factors:
    by_row = None if rows is None else (1 / rows).astype(np.float32)[:, None]
    return by_row, None if columns is None else columns.astype(np.float32)


def scale_stored(graph: ir.Graph, node: ir.Node, index: int, factors: Factors) -> None:
    """Make the stored operand the product; its Cast, where it has one, goes."""
    operand = node.inputs[index]
    assert operand is not None
    producer = operand.producer()
    stored = operand if producer is None else producer.inputs[0]
    assert stored is not None
    assert stored.const_value is not None
    tensor = stored.const_value
    make = partial(_product, tensor, factors)
    stored.const_value = ir.LazyTensor(make, ir.DataType.FLOAT, ir.Shape(tensor.shape.numpy()), name=stored.name)
    stored.type = ir.TensorType(ir.DataType.FLOAT)
    if operand is not stored:
        node.replace_input_with(index, stored)
        drop_if_unused(graph, operand)


def _product(tensor: ir.TensorProtocol, factors: Factors) -> ir.TensorProtocol:
    array = apply_to_array(tensor, lambda values: values.astype(np.float32))
    for factor in factors:
        array = array if factor is None else array * factor
    return ir.Tensor(array, name=tensor.name)


def block_of(graph: Iterable[ir.Node], group: LinearGroup) -> tuple[list[ir.Node], list[ir.Value]]:
    """Nodes from a group's layers to where their results join the residual stream, and what joins it there."""
    nodes: list[ir.Node] = []
    outputs: dict[ir.Value, None] = {}
    derived: set[ir.Value] = set()
    for node in graph:
        inputs = [value for value in node.inputs if value is not None and not is_stored(value)]
        inside = [value for value in inputs if value in derived]
        if node not in group.linears and not inside:
            continue
        if node.op_type == "Add" and len(inside) < len(inputs):
            outputs.update(dict.fromkeys(inside))
            continue
        nodes.append(node)
        derived.update(node.outputs)
    return nodes, list(outputs)


def weights_of(group: LinearGroup) -> dict[ir.Node, Float32Array]:
    """The group's weights [out, in] in float32."""
    return {node: float32_values(node.inputs[1]) for node in group.linears if node.inputs[1] is not None}
