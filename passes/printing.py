"""The IR as text: one line per input, initializer and node, in graph order, without weights' values.

    ingot.model {"family": ...}
    input  input_ids: INT64[T]
    weight model.norm.weight: BFLOAT16[64]
    %x = Gemm(%input, %model.w) {transB=1}            # layers.0.self_attn.q_proj, FLOAT[T,64]
    output logits: FLOAT[R,256]

Equal programs print equal text, so that tests can compare it.
"""

from functools import lru_cache

import numpy as np
import onnx_ir as ir

SMALL_CONSTANT = 4  # largest number of elements that are printed


def model_to_text(model: ir.Model) -> str:
    """The whole program as text, ending in a newline."""
    graph = model.graph
    lines = [f"{key} {value}" for key, value in sorted(model.metadata_props.items())]
    lines += [f"input  {_typed(value)}" for value in graph.inputs]
    lines += [f"weight {_typed(value)}{_small_value(value)}" for value in graph.initializers.values()]
    lines += [node_to_text(node) for node in graph]
    lines += [f"output {_typed(value)}" for value in graph.outputs]
    return "\n".join(lines) + "\n"


def node_to_text(node: ir.Node) -> str:
    """One node as text: outputs, op, inputs, attributes, then its name and the types of its outputs."""
    outputs = ", ".join([f"%{value.name}" if value.name else "_" for value in node.outputs])
    inputs = ", ".join(["_" if value is None else f"%{value.name}" for value in node.inputs])
    op = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
    attributes = ", ".join([f"{key}={_attribute(node.attributes[key])}" for key in sorted(node.attributes)])
    types = ", ".join([_type(value) for value in node.outputs if value.name])
    return f"{outputs} = {op}({inputs})" + (f" {{{attributes}}}" if attributes else "") + f"  # {node.name}, {types}"


def _typed(value: ir.Value) -> str:
    return f"{value.name}: {_type(value)}"


def _type(value: ir.Value) -> str:
    return _type_text(value.dtype, None if value.shape is None else value.shape.dims)


@lru_cache(4096)
def _type_text(dtype: ir.DataType | None, dims: tuple[int | ir.SymbolicDim, ...] | None) -> str:
    sizes = "?" if dims is None else ",".join(str(_dim(dim)) for dim in dims)
    return f"{'?' if dtype is None else dtype.name}[{sizes}]"


def _dim(dim: int | ir.SymbolicDimProtocol) -> int | str:
    return dim if isinstance(dim, int) else dim.value or "?"


def _small_value(value: ir.Value) -> str:
    """` = [1, 2]` for a constant that a pass made; a checkpoint's own tensor is never read."""
    tensor = value.const_value
    if tensor is None or isinstance(tensor, ir.ExternalTensor | ir.LazyTensor) or tensor.size > SMALL_CONSTANT:
        return ""
    return f" = {_values(tensor)}"


def _values(tensor: ir.TensorProtocol) -> str:
    """All elements on one line, floats with as many digits as their own dtype needs."""
    return f"[{', '.join(str(element) for element in tensor.numpy().reshape(-1))}]"


def _attribute(attribute: ir.Attr) -> str:
    if attribute.type == ir.AttributeType.TENSOR:
        tensor = attribute.as_tensor()
        small = _values(tensor) if tensor.size <= SMALL_CONSTANT else "..."
        return f"{tensor.dtype.name}[{','.join(str(_dim(dim)) for dim in tensor.shape)}] {small}"
    if attribute.type == ir.AttributeType.FLOAT:
        return str(np.float32(attribute.as_float()))  # ONNX holds 32 bits; more digits would be noise
    return str(attribute.value)
