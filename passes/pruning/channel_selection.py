"""Takes columns out of a value of the graph, all the way back to the linear layers that make them.

    Gemm(x, W, b?)                                rows of W and b
    Split(packed; axis=-1)                        rows of its input, and the sizes
    Mul, Sigmoid, Gelu, ...                       the same columns of every input but constants
    RotaryEmbedding, its Unsqueeze, Squeeze       whole heads, and the attribute num_heads
    Reshape, RMSNormalization per head            whole heads, and the shape
    PagedAttention                                whole groups: a KV head with the query heads that share it; sinks

`select` only reads the graph, so a PassError leaves it unchanged; `apply` changes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ingot.errors import PassError
from ingot.passes.numerics.pruning import Integers
from ingot.passes.rewriting import add_constant, attention_sinks, head_counts, required_input, small_constant
from ingot.passes.weights import change_stored, drop_if_unused, readers, stored_value

ELEMENTWISE = ("Mul", "Sigmoid", "Gelu", "QuickGelu", "Swish", "Relu", "Tanh")


@dataclass
class ChannelSelection:
    """Columns of values to keep, and the changes that follow.

    rows        Gemm -> the rows of its weight and bias to keep
    vectors     stored vector -> its elements to keep
    sizes       value, axis, new size of the axis
    numbers     node, attribute, its new value
    constants   node, operand, its new values
    """

    rows: dict[ir.Node, Integers] = field(default_factory=dict)
    vectors: dict[ir.Value, Integers] = field(default_factory=dict)
    sizes: list[tuple[ir.Value, int, int]] = field(default_factory=list)
    numbers: list[tuple[ir.Node, str, int]] = field(default_factory=list)
    constants: list[tuple[ir.Node, int, list[int]]] = field(default_factory=list)
    _splits: dict[ir.Node, dict[int, Integers]] = field(default_factory=dict)
    _nodes: set[ir.Node] = field(default_factory=set)
    _values: dict[ir.Value, Integers] = field(default_factory=dict)

    def select(self, value: ir.Value, keep: Integers, read_by: Sequence[ir.Node]) -> None:
        """Keep these columns of a value that `read_by` reads; the caller selects the columns of these readers' weights.

        PassError for a column that another node reads, or that no linear layer makes.
        """
        self._trace(value, keep)
        for split, parts in list(self._splits.items()):
            self._trace_split(split, parts)
        allowed = self._nodes | set(read_by)
        for traced in self._values:
            stranger = next((node for node in traced.consumers() if node not in allowed), None)
            if stranger is not None or traced.is_graph_output():
                reader = f"node {stranger.name!r}" if stranger is not None else "the graph's output"
                raise PassError(f"{reader} reads {traced.name!r} too, some columns of which should go")

    def apply(self, graph: ir.Graph) -> None:
        """Change weights, shapes, attributes and constants."""
        for node, keep in self.rows.items():
            for operand in node.inputs[1:]:
                select_stored(graph, operand, keep, axis=0)
        for vector, keep in self.vectors.items():
            select_stored(graph, vector, keep, axis=0)
        for value, axis, size in self.sizes:
            assert value.shape is not None
            value.shape = ir.Shape([size if index == axis else dim for index, dim in enumerate(value.shape)])
        for node, name, number in self.numbers:
            node.attributes[name] = ir.AttrInt64(name, number)
        for node, index, values in self.constants:
            old = node.inputs[index]
            assert old is not None
            name = "integers." + ".".join(map(str, values))
            node.replace_input_with(index, add_constant(graph, name, np.array(values, np.int64)))
            drop_if_unused(graph, old)

    def _trace(self, value: ir.Value, keep: Integers) -> None:
        if value in self._values:
            if not np.array_equal(self._values[value], keep):
                raise PassError(f"{value.name!r} has two readers that would keep different columns")
            return
        node = value.producer()
        if node is None:
            raise PassError(f"no linear layer makes {value.name!r}, so none of its columns can go")
        self._values[value] = keep
        self._nodes.add(node)
        axis = 1 if node.op_type == "Reshape" and _rank(value) == 3 else _rank(value) - 1
        self.sizes.append((value, axis, len(keep)))
        self._trace_inputs(node, value, keep)

    def _trace_inputs(self, node: ir.Node, value: ir.Value, keep: Integers) -> None:
        """Trace the columns of `value` through the node that makes it."""
        if node.op_type == "Gemm":
            self._check_own(node)
            self.rows[node] = keep
        elif node.op_type == "Split":
            self._splits.setdefault(node, {})[list(node.outputs).index(value)] = keep
        elif node.op_type in ELEMENTWISE:
            for operand in node.inputs:
                if operand is not None and not _is_constant(operand):
                    self._trace(operand, keep)
        elif node.op_type in ("Squeeze", "Unsqueeze"):
            self._trace(required_input(node), keep)
        elif node.op_type == "RotaryEmbedding":
            heads = node.attributes.get_int("num_heads", 0) or 0
            width = _width(required_input(node))
            self.numbers.append((node, "num_heads", len(keep) * heads // width))
            self._trace(required_input(node), keep)
        elif node.op_type == "PagedAttention":
            self._trace_attention(node, keep)
        elif node.op_type == "Reshape" and _rank(value) == 2:
            self._trace_heads(node, keep)
        else:
            raise PassError(f"node {node.name!r} ({node.op_type}) mixes channels, so none of {value.name!r} can go")

    def _trace_attention(self, node: ir.Node, keep: Integers) -> None:
        heads, kv_heads, dim = head_counts(node)
        kept_heads = keep[::dim] // dim
        kept_kv = np.unique(kept_heads // (heads // kv_heads))
        self.numbers += [(node, "num_heads", len(kept_heads)), (node, "num_kv_heads", len(kept_kv))]
        if (sinks := attention_sinks(node)) is not None:
            self.vectors[sinks] = kept_heads
        columns = (kept_kv[:, None] * dim + np.arange(dim)).reshape(-1)
        for index, selected in enumerate((keep, columns, columns)):
            self._trace(required_input(node, index), selected)

    def _trace_heads(self, flat: ir.Node, keep: Integers) -> None:
        """Reshape [T, width] to heads, a norm of each, and Reshape back."""
        norm = required_input(flat).producer()
        split = required_input(norm).producer() if norm is not None and norm.op_type == "RMSNormalization" else None
        if norm is None or split is None or split.op_type != "Reshape":
            raise PassError(f"node {flat.name!r} reshapes a value other than a norm per head")
        shape = required_input(flat).shape
        assert shape is not None
        dim = int(str(shape[-1]))
        heads = len(keep) // dim
        self._nodes.update((norm, split))
        self._values.update({norm.outputs[0]: keep, split.outputs[0]: keep})
        self.sizes += [(norm.outputs[0], 1, heads), (split.outputs[0], 1, heads)]
        self.constants += [(flat, 1, [0, len(keep)]), (split, 1, [0, heads, dim])]
        self._trace(required_input(split), keep)

    def _trace_split(self, split: ir.Node, parts: dict[int, Integers]) -> None:
        """Keep rows of the Split's input; outputs that are not selected stay whole."""
        sizes = small_constant(split.inputs[1])
        if sizes is None:
            raise PassError(f"node {split.name!r} splits into computed sizes")
        starts = np.cumsum([0, *sizes[:-1]])
        keeps = [parts.get(index, np.arange(size)) for index, size in enumerate(sizes)]
        self.constants.append((split, 1, [len(keep) for keep in keeps]))
        self._trace(required_input(split), np.concatenate([s + k for s, k in zip(starts, keeps, strict=True)]))

    def _check_own(self, node: ir.Node) -> None:
        for operand in node.inputs[1:]:
            stored = stored_value(operand)
            if stored is None:
                raise PassError(
                    f"layer {node.name!r} has a weight that is computed or quantized; prune before quantizing"
                )
            if len(readers(stored)) > 1:
                raise PassError(f"layer {node.name!r} shares {stored.name!r} with others, which would lose rows too")


def select_stored(graph: ir.Graph, operand: ir.Value | None, keep: Integers, axis: int) -> None:
    """Keep some rows (axis 0) or columns (axis 1) of a stored weight, or elements of a bias; the new tensor is lazy."""
    stored = stored_value(operand)
    assert stored is not None
    assert stored.const_value is not None
    shape = list(stored.const_value.shape.numpy())
    shape[axis] = len(keep)
    change_stored(graph, stored, lambda values: np.take(values, keep, axis), shape)


def _is_constant(value: ir.Value) -> bool:
    return value.is_initializer() and value.const_value is not None and value.const_value.size == 1


def _rank(value: ir.Value) -> int:
    assert value.shape is not None
    return len(value.shape)


def _width(value: ir.Value) -> int:
    assert value.shape is not None
    return int(str(value.shape[-1]))
