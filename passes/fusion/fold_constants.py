"""The pass fold-constants: computes at build time what does not depend on the tokens.

    Matched         w1 = Add(Cast(w), 1)        Gemma's norms multiply by 1 + w
                    s = Mul(2.0, 3.0)           scalar arithmetic on constants

    Replacement     the result, as an initializer under the name of the value it replaces

Evaluated with numpy, in the dtype that the op has in ONNX, so that the engine would compute the same bits. Only weights
that are folded are read.

Refuses: a result of more than `max_bytes`; the matrix of a matmul, embedding or quantizer, which stays in the
checkpoint for later passes; an op that is not in its table; a result of unknown shape. The engine computes what is
refused when it loads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.errors import PassError
from ingot.passes.base import Pass, PassKind, Range
from ingot.passes.rewriting import Refusal, add_initializer, settle
from ingot.passes.weights import apply_to_array, drop_if_unused

Array = NDArray[Any]
MATRIX_OPERAND = {"Gemm": 1, "MatMul": 1, "Gather": 0, "DequantizeLinear": 0, "QuantizeLinear": 0}


@dataclass(frozen=True)
class FoldConstants(Pass):
    """Options:

    max_bytes    largest result to keep as a constant, in bytes
    """

    name: ClassVar[str] = "fold-constants"
    kind: ClassVar[PassKind] = "clean-up"
    summary: ClassVar[str] = "Computes small constant results at build time; matrices stay in the checkpoint."

    max_bytes: Annotated[int, Range(ge=0, le=1 << 30)] = 1 << 20

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Fold node by node, in graph order, so that a node can read earlier results."""
        refusals, folded = [], 0
        for node in list(model.graph):
            if not _is_constant(node):
                continue
            refusal = _check(node, self.max_bytes)
            if refusal is None:
                _replace(model.graph, node)
                folded += 1
            else:
                refusals.append(refusal)
        settle(self.name, refusals, strict=False, is_present=True)
        return ir.passes.PassResult(model, modified=folded > 0)


def _is_constant(node: ir.Node) -> bool:
    """Whether every input is an initializer, or the node is a Constant."""
    if node.op_type == "Constant":
        return True
    return bool(node.inputs) and all(value is None or value.is_initializer() for value in node.inputs)


def _check(node: ir.Node, max_bytes: int) -> Refusal | None:
    name = node.name or ""
    if node.domain != "" or node.op_type not in _NUMPY:
        return Refusal(name, f"is a constant {node.op_type}, which is not in the table of ops to fold")
    if node.outputs[0].is_graph_output():
        return Refusal(name, "makes a graph output")
    if any(_is_matrix(use.node, use.idx) for use in node.outputs[0].uses()):
        return Refusal(name, "makes the matrix of a matmul or embedding, which stays in the checkpoint")
    num_bytes = _result_bytes(node)
    if num_bytes is None:
        return Refusal(name, "makes a result of unknown dtype or shape")
    if num_bytes > max_bytes:
        return Refusal(name, f"makes {num_bytes} bytes, more than max_bytes {max_bytes}")
    return None


def _is_matrix(reader: ir.Node, index: int) -> bool:
    """Whether the reader takes the value as its weight matrix, directly or through a Transpose."""
    if reader.op_type == "Transpose":
        return any(_is_matrix(use.node, use.idx) for use in reader.outputs[0].uses())
    return MATRIX_OPERAND.get(reader.op_type) == index


def _result_bytes(node: ir.Node) -> int | None:
    if node.op_type == "Constant":
        return node.attributes["value"].as_tensor().nbytes if "value" in node.attributes else None
    value = node.outputs[0]
    if value.dtype is None or value.shape is None or not value.shape.is_static():
        return None
    return int(np.prod(value.shape.numpy(), dtype=np.int64) * value.dtype.itemsize)


def _replace(graph: ir.Graph, node: ir.Node) -> None:
    old, inputs = node.outputs[0], [value for value in node.inputs if value is not None]
    tensor = _evaluate(node)
    name = old.name or ""
    old.name = None  # frees the name for the initializer
    new = add_initializer(graph, ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=name))
    ir.convenience.replace_all_uses_with(old, new)
    graph.remove(node, safe=True)
    for value in inputs:
        drop_if_unused(graph, value)


def _evaluate(node: ir.Node) -> ir.TensorProtocol:
    if node.op_type == "Constant":
        return node.attributes["value"].as_tensor()
    tensors = [value.const_value for value in node.inputs if value is not None]
    arrays = [apply_to_array(tensor, np.copy) for tensor in tensors if tensor is not None]
    expected = node.outputs[0]
    with np.errstate(all="ignore"):  # the engine would return inf and nan too
        result = np.asarray(_NUMPY[node.op_type](node, *arrays))
    if expected.shape is None or list(result.shape) != list(expected.shape):
        raise PassError(f"node {node.name!r} makes shape {list(result.shape)}, but the IR says {expected.shape}")
    return ir.Tensor(result, dtype=expected.dtype, name=expected.name)


def _cast(node: ir.Node, x: Array) -> Array:
    return x.astype(ir.DataType(node.attributes["to"].as_int()).numpy())


def _divide(node: ir.Node, a: Array, b: Array) -> Array:
    """Division; integers are truncated towards zero, as in ONNX."""
    return a // b + ((a % b != 0) & ((a < 0) != (b < 0))) if a.dtype.kind in "iu" else a / b


def _transpose(node: ir.Node, x: Array) -> Array:
    return np.ascontiguousarray(np.transpose(x, node.attributes.get_ints("perm")))


def _squeeze(node: ir.Node, x: Array, axes: Array | None = None) -> Array:
    return np.squeeze(x, None if axes is None else tuple(axes.tolist()))


def _concat(node: ir.Node, *arrays: Array) -> Array:
    return np.concatenate(arrays, axis=node.attributes["axis"].as_int())


_NUMPY: dict[str, Callable[..., Array]] = {
    "Add": lambda node, a, b: a + b,
    "Cast": _cast,
    "Concat": _concat,
    "Constant": lambda node: np.empty(0),  # the value is an attribute
    "Div": _divide,
    "Identity": lambda node, x: x,
    "Mul": lambda node, a, b: a * b,
    "Neg": lambda node, x: -x,
    "Softplus": lambda node, x: np.log1p(np.exp(-np.abs(x))) + np.maximum(x, 0),
    "Sqrt": lambda node, x: np.sqrt(x),
    "Squeeze": _squeeze,
    "Sub": lambda node, a, b: a - b,
    "Transpose": _transpose,
    "Unsqueeze": lambda node, x, axes: np.expand_dims(x, tuple(axes.tolist())),
}
