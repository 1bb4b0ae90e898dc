"""Takes columns out of a value of the graph, all the way back to the linear layers that make them.

    Gemm(x, W, b?)                                rows of W and b
    Split(packed; axis=-1)                        rows of what it splits, and the sizes
    Mul, Sigmoid, Gelu, ...                       the same columns of every input but constants
    RotaryEmbedding, its Unsqueeze, Squeeze       whole heads, and the attribute num_heads
    Reshape, RMSNormalization per head            whole heads, and the shape
    PagedAttention                                whole groups: a KV head with the query heads that share it

First everything is looked at, so that a PassError leaves the graph as it was; `apply` then changes it.

Which inputs of a linear layer can go, and what the others' weights become, given the Gram matrix of its inputs.

For W [out, in], inputs X [tokens, in] and H = X^T X + damping, a set S of inputs stays; the best weights for it are

    W' = W H[:, S] H[S, S]^-1                      least squares: || X W^T - X_S W'^T || is smallest

Inputs go in rounds, those first whose loss is smallest with the others making up for it: tr(W_u C_uu^-1 W_u^T) for
the columns u of a unit, with C = H^-1 of what is left by then (Hassibi and Stork, Optimal Brain Surgeon, 1993; for
structures ZipLM, arXiv:2302.04089). Without refitting the loss of a unit is that of its columns alone,
tr(W_u H_uu W_u^T).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.errors import PassError
from ingot.passes.rewriting import add_constant, small_constant
from ingot.passes.weights import change_stored, drop_if_unused, readers, stored_value

Array = NDArray[np.float64]
Integers = NDArray[np.int64]

_ROUNDS = 32


@dataclass(frozen=True)
class KeptColumns:
    """units that stay, sorted; their columns; the weight [out, columns] for them; error relative to the outputs."""

    units: Integers
    columns: Integers
    weight: NDArray[np.float32]
    output_error: float

    def arrays(self, name: str) -> dict[str, NDArray[Any]]:
        """As arrays, under names that begin with this one."""
        return {f"{name}:{field.name}": np.asarray(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[Any]], name: str) -> "KeptColumns":
        """What `arrays` gave."""
        units, columns, weight, error = (arrays[f"{name}:{field.name}"] for field in fields(cls))
        return cls(units, columns, weight, float(error))


def keep_columns(weight: Array, gram: Array, unit: int, keep: int, *, refit: bool, damping: float) -> KeptColumns:
    """Keep `keep` of the units of `unit` neighbouring columns. ValueError when the inputs are zero or not finite."""
    mean = float(np.diagonal(gram).mean())
    if not np.isfinite(gram).all() or mean <= 0:
        raise ValueError("inputs that are zero on all of the calibration data, or not finite")
    damped = gram + damping * mean * np.eye(len(gram))
    drop = len(gram) // unit - keep
    order = _dropped_by_surgeon(weight, damped, unit, drop) if refit else _dropped_alone(weight, gram, unit, drop)
    units = np.setdiff1d(np.arange(len(gram) // unit), order)
    columns = _columns(units, unit)
    kept: Array = weight[:, columns]
    if refit:
        kept = np.linalg.solve(damped[np.ix_(columns, columns)], (weight @ damped[:, columns]).T).T.astype(np.float64)
    return KeptColumns(units, columns, kept.astype(np.float32), _error(weight, kept, columns, gram))


def _columns(units: Integers, unit: int) -> Integers:
    """The columns of units, in order."""
    columns: Integers = (units[:, None] * unit + np.arange(unit)).reshape(-1)
    return columns


def _dropped_alone(weight: Array, gram: Array, unit: int, drop: int) -> Integers:
    """The units whose columns give the least to the outputs."""
    return np.argsort(_traces(weight, _blocks(gram, unit)), kind="stable")[:drop]


def _dropped_by_surgeon(weight: Array, damped: Array, unit: int, drop: int) -> Integers:
    """Round by round, the units that the others make up for best."""
    inverse: Array = np.linalg.inv(damped).astype(np.float64)
    left = weight.copy()
    alive = np.arange(len(damped) // unit)
    for number in range(min(_ROUNDS, drop)):
        goal = len(damped) // unit - drop
        batch = -(-(len(alive) - goal) // (min(_ROUNDS, drop) - number))
        losses = _traces(left, np.linalg.inv(_blocks(inverse, unit)).astype(np.float64))
        gone = np.sort(np.argsort(losses, kind="stable")[:batch])
        stay, out = (_columns(units, unit) for units in (np.setdiff1d(np.arange(len(alive)), gone), gone))
        solved = np.linalg.solve(inverse[np.ix_(out, out)], inverse[np.ix_(out, stay)])  # [out, stay]
        left = left[:, stay] - left[:, out] @ solved
        inverse = inverse[np.ix_(stay, stay)] - inverse[np.ix_(stay, out)] @ solved
        alive = np.delete(alive, gone)
    return np.setdiff1d(np.arange(len(damped) // unit), alive)


def _blocks(matrix: Array, unit: int) -> Array:
    """Blocks on the diagonal [units, unit, unit]."""
    count = len(matrix) // unit
    return matrix.reshape(count, unit, count, unit)[np.arange(count), :, np.arange(count), :]


def _traces(weight: Array, blocks: Array) -> Array:
    """tr(W_u B_u W_u^T) per unit, for blocks [units, unit, unit]."""
    grouped = weight.reshape(len(weight), *blocks.shape[:2])  # [out, units, unit]
    traces: Array = np.einsum("oui,uij,ouj->u", grouped, blocks, grouped, optimize=True)
    return traces


def _error(weight: Array, kept: Array, columns: Integers, gram: Array) -> float:
    """|| X W^T - X_S W'^T || / || X W^T ||"""
    difference = weight.copy()
    difference[:, columns] -= kept
    lost, norm = (float(np.einsum("oi,oi->", w @ gram, w)) for w in (difference, weight))
    return float((max(lost, 0.0) / norm) ** 0.5) if norm > 0 else 0.0


ELEMENTWISE = ("Mul", "Sigmoid", "Gelu", "QuickGelu", "Swish", "Relu", "Tanh")
_HEADS = ("num_heads", "num_kv_heads", "head_dim")


@dataclass
class ChannelSelection:
    """What a selection changes.

    rows        Gemm -> the rows of its weight and bias that stay
    sizes       values and the new size of one of their axes
    numbers     node, attribute, its new value
    constants   node, operand, its new values
    """

    rows: dict[ir.Node, Integers] = field(default_factory=dict)
    sizes: list[tuple[ir.Value, int, int]] = field(default_factory=list)
    numbers: list[tuple[ir.Node, str, int]] = field(default_factory=list)
    constants: list[tuple[ir.Node, int, list[int]]] = field(default_factory=list)
    _splits: dict[ir.Node, dict[int, Integers]] = field(default_factory=dict)
    _nodes: set[ir.Node] = field(default_factory=set)
    _values: dict[ir.Value, Integers] = field(default_factory=dict)

    def select(self, value: ir.Value, keep: Integers, read_by: Sequence[ir.Node]) -> None:
        """Keep these columns of a value that `read_by` reads; their weights' columns are the caller's to select."""
        self._trace(value, keep)
        for split, parts in list(self._splits.items()):
            self._trace_split(split, parts)
        allowed = self._nodes | set(read_by)
        for traced in self._values:
            stranger = next((node for node in traced.consumers() if node not in allowed), None)
            if stranger is not None or traced.is_graph_output():
                reader = f"node {stranger.name!r}" if stranger is not None else "the graph's output"
                raise PassError(f"{reader} reads {traced.name!r}, some columns of which should go, as well")

    def apply(self, graph: ir.Graph) -> None:
        """Change weights, shapes, attributes and constants."""
        for node, keep in self.rows.items():
            for operand in node.inputs[1:]:
                select_stored(graph, operand, keep, axis=0)
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
                raise PassError(f"{value.name!r} is used twice, in different places of its columns")
            return
        node = value.producer()
        if node is None:
            raise PassError(f"{value.name!r} is made by no linear layer, so none of its columns can go")
        self._values[value] = keep
        self._nodes.add(node)
        self.sizes.append(
            (value, 1 if node.op_type == "Reshape" and _rank(value) == 3 else _rank(value) - 1, len(keep))
        )
        self._behind(node, value, keep)

    def _behind(self, node: ir.Node, value: ir.Value, keep: Integers) -> None:
        """Go on with what the node reads."""
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
            self._trace(_input(node), keep)
        elif node.op_type == "RotaryEmbedding":
            heads = node.attributes.get_int("num_heads", 0) or 0
            width = _width(_input(node))
            self.numbers.append((node, "num_heads", len(keep) * heads // width))
            self._trace(_input(node), keep)
        elif node.op_type == "PagedAttention":
            self._trace_attention(node, keep)
        elif node.op_type == "Reshape" and _rank(value) == 2:
            self._trace_heads(node, keep)
        else:
            raise PassError(f"node {node.name!r} ({node.op_type}) mixes channels, so none of {value.name!r} can go")

    def _trace_attention(self, node: ir.Node, keep: Integers) -> None:
        heads, kv_heads, dim = (node.attributes.get_int(name, 0) or 0 for name in _HEADS)
        kept_heads = keep[::dim] // dim
        kept_kv = np.unique(kept_heads // (heads // kv_heads))
        self.numbers += [(node, "num_heads", len(kept_heads)), (node, "num_kv_heads", len(kept_kv))]
        columns = (kept_kv[:, None] * dim + np.arange(dim)).reshape(-1)
        for index, selected in enumerate((keep, columns, columns)):
            self._trace(_input(node, index), selected)

    def _trace_heads(self, flat: ir.Node, keep: Integers) -> None:
        """Reshape [T, width] to heads, a norm of each, and Reshape back."""
        norm = _input(flat).producer()
        split = _input(norm).producer() if norm is not None and norm.op_type == "RMSNormalization" else None
        if norm is None or split is None or split.op_type != "Reshape":
            raise PassError(f"node {flat.name!r} reshapes what no norm per head makes")
        shape = _input(flat).shape
        assert shape is not None
        dim = int(str(shape[-1]))
        heads = len(keep) // dim
        self._nodes.update((norm, split))
        self._values.update({norm.outputs[0]: keep, split.outputs[0]: keep})
        self.sizes += [(norm.outputs[0], 1, heads), (split.outputs[0], 1, heads)]
        self.constants += [(flat, 1, [0, len(keep)]), (split, 1, [0, heads, dim])]
        self._trace(_input(split), keep)

    def _trace_split(self, split: ir.Node, parts: dict[int, Integers]) -> None:
        """Rows of what is split; parts that were not asked for stay whole."""
        sizes = small_constant(split.inputs[1])
        if sizes is None:
            raise PassError(f"node {split.name!r} splits at places that are computed")
        starts = np.cumsum([0, *sizes[:-1]])
        keeps = [parts.get(index, np.arange(size)) for index, size in enumerate(sizes)]
        self.constants.append((split, 1, [len(keep) for keep in keeps]))
        self._trace(_input(split), np.concatenate([s + k for s, k in zip(starts, keeps, strict=True)]))

    def _check_own(self, node: ir.Node) -> None:
        for operand in node.inputs[1:]:
            stored = stored_value(operand)
            if stored is None:
                raise PassError(f"layer {node.name!r} has a weight that is computed or quantized; prune before")
            if len(readers(stored)) > 1:
                raise PassError(f"layer {node.name!r} shares {stored.name!r} with others, which would lose rows, too")


def select_stored(graph: ir.Graph, operand: ir.Value | None, keep: Integers, axis: int) -> None:
    """Keep some rows (axis 0) or columns (axis 1) of a stored weight, or elements of a bias, lazily."""
    stored = stored_value(operand)
    assert stored is not None
    assert stored.const_value is not None
    shape = list(stored.const_value.shape.numpy())
    shape[axis] = len(keep)
    change_stored(graph, stored, lambda values: np.take(values, keep, axis), shape)


def _is_constant(value: ir.Value) -> bool:
    return value.is_initializer() and value.const_value is not None and value.const_value.size == 1


def _input(node: ir.Node, index: int = 0) -> ir.Value:
    value = node.inputs[index]
    assert value is not None
    return value


def _rank(value: ir.Value) -> int:
    assert value.shape is not None
    return len(value.shape)


def _width(value: ir.Value) -> int:
    assert value.shape is not None
    return int(str(value.shape[-1]))
