"""What works on rows as they come: look-ups, activations, multiplications, and views that need no launch."""

from typing import Any

import onnx_ir as ir

from ingot.artifact.launch_program import Argument
from ingot.errors import PassError
from ingot.passes.rewriting import small_constant
from ingot.passes.weight_values import is_stored
from ingot.pipeline.cuda import weight_forms
from ingot.pipeline.cuda.fusions import IDENTITY, Epilogue, Gate, activation, scalar
from ingot.pipeline.cuda.lower_norms import MULTIPLY, combine
from ingot.pipeline.cuda.placed_rows import Rows
from ingot.pipeline.cuda.scope import Scope, columns_of


def lower_gather(scope: Scope, node: ir.Node) -> None:
    """Rows of a stored table, or of hidden states; or columns of these."""
    source, indices = node.inputs[0], node.inputs[1]
    assert source is not None
    assert indices is not None
    if node.attributes.get_int("axis", 0) in (1, -1):
        _gather_columns(scope, node, indices)
        return
    if not indices.is_graph_input():
        raise PassError(f"{node.name!r} (Gather) takes rows by {indices.name!r}, which is no input of the model")
    table = None if is_stored(source) else scope.read(source, node)
    if indices.name == "logits_indices":
        scope.builder.begin_head()
    found = scope.fusions.at.get(node)
    epilogue = found if isinstance(found, Epilogue) else Epilogue(node.outputs[0])
    out = scope.make(epilogue.result)
    _gather_rows(scope, node, source, table, out, epilogue.alpha)
    if epilogue.softcap:
        scope.map(node, out, out, softcap=epilogue.softcap)


def _gather_rows(scope: Scope, node: ir.Node, source: ir.Value, table: Rows | None, out: Rows, alpha: float) -> None:
    indices = node.inputs[1]
    assert indices is not None
    dequantize, builder = weight_forms.quantizer(source), scope.builder
    grid, shape = scope.blocks(out.columns)
    common: dict[str, Any] = {
        "indices": builder.external(indices.name or ""),
        "out": out.buffer,
        "out_stride": out.stride,
    }
    if table is None and dequantize is not None:
        if weight_forms.float8(dequantize):
            raise PassError(f"{node.name!r} reads a table of float8, for which there is no CUDA kernel; leave it out")
        spans = weight_forms.spans(builder, dequantize)
        given: dict[str, Any] = {"codes": spans.codes, "scales": spans.scales, "zero_points": spans.zero_points}
        constants = {**shape, **spans.constants, "TABLE_ROWS": _table_rows(source)}
        builder.launch("gather_quantized_rows", node, grid, constants, **common, **given, alpha=alpha)
        return
    plain: Argument = table.buffer if table else scope.vector(source)
    stride = table.stride if table else out.columns
    builder.launch("gather_rows", node, grid, shape, **common, table=plain, table_stride=stride, alpha=alpha)


def _table_rows(table: ir.Value) -> int:
    assert table.shape is not None
    return int(table.shape.numpy()[0])


def _gather_columns(scope: Scope, node: ir.Node, indices: ir.Value) -> None:
    x, out = scope.read(node.inputs[0], node), scope.make(node.outputs[0])
    if not is_stored(indices):
        raise PassError(f"{node.name!r} (Gather) takes columns by {indices.name!r}, which is no stored list")
    grid, shape = scope.blocks(out.columns)
    given: dict[str, Any] = {"x": x.buffer, "columns": scope.numbers(indices), "out": out.buffer}
    scope.builder.launch("gather_columns", node, grid, shape, **given, x_stride=x.stride, out_stride=out.stride)


def lower_gate(scope: Scope, node: ir.Node, gate: Gate) -> None:
    """Both halves where they lie, be it in parts."""
    x = scope.read(gate.gate, node, parts=True)
    up = scope.read(gate.up, node, parts=True, unaligned=True)
    if x.parts != up.parts:
        x, up = scope.read(gate.gate, node), scope.read(gate.up, node, unaligned=True)
    out, (source, offset) = scope.make(node.outputs[0]), up.unaligned
    grid, shape = scope.blocks(out.columns)
    scope.builder.launch(
        "gated_activation",
        node,
        grid,
        {**shape, "PARTS": x.parts, "KIND": gate.kind},
        gate=x.buffer,
        up=source,
        out=out.buffer,
        gate_stride=x.stride,
        gate_part_stride=x.part_stride,
        up_offset=offset,
        up_stride=up.stride,
        up_part_stride=up.part_stride,
        out_stride=out.stride,
    )


def lower_multiplication(scope: Scope, node: ir.Node) -> None:
    """Mul and Div: by a scalar, by a vector, or of two results."""
    one, other = node.inputs[0], node.inputs[1]
    factor = scalar(other) if scalar(other) is not None or node.op_type == "Div" else scalar(one)
    if factor is not None and factor != 0:
        x = scope.read(one if scalar(other) is not None else other, node, parts=True, unaligned=True)
        alpha = 1.0 / factor if node.op_type == "Div" else factor
        scope.map(node, x, scope.make(node.outputs[0]), alpha=alpha)
    elif node.op_type == "Mul":
        combine(scope, node, MULTIPLY)
    else:
        raise PassError(f"{node.name!r} (Div) divides by other than a stored number; there is no CUDA kernel for that")


def lower_activation(scope: Scope, node: ir.Node) -> None:
    """An activation that gates nothing; Tanh is a softcap of 1."""
    found = None if node.op_type == "Tanh" else activation(node.outputs[0])
    if found is None and node.op_type != "Tanh":
        raise PassError(f"{node.name!r} ({node.op_type}) has an alpha other than 1, for which there is no CUDA kernel")
    x = scope.read(node.inputs[0], node, parts=True, unaligned=True)
    kind = IDENTITY if found is None else found[1]
    scope.map(node, x, scope.make(node.outputs[0]), kind, softcap=1.0 if node.op_type == "Tanh" else 0.0)


def lower_split(scope: Scope, node: ir.Node) -> None:
    """Parts where they lie."""
    if node.attributes.get_int("axis", 0) not in (-1, 1):
        raise PassError(f"{node.name!r} (Split) splits another axis than the last; there is no CUDA kernel for that")
    x, start = scope.read(node.inputs[0], node, parts=True, unaligned=True), 0
    for output in node.outputs:
        columns = columns_of(output)
        scope.put(output, x.slice(start, columns))
        start += columns


def lower_view(scope: Scope, node: ir.Node) -> None:
    """Reshape between [T, heads * dim] and [T, heads, dim], Squeeze and Unsqueeze of a batch of one: the same rows."""
    sizes = small_constant(node.inputs[1]) if len(node.inputs) > 1 else None
    is_view = sizes in ([0],) or (node.op_type == "Reshape" and sizes is not None and sizes[0] in (0, -1))
    source = node.inputs[0]
    if source is not None and is_view and source.is_graph_input():
        return  # position_ids as a batch of one, which rotary embeddings read from the input itself
    if not is_view:
        raise PassError(f"{node.name!r} ({node.op_type}) does more than view rows; there is no CUDA kernel for that")
    scope.put(node.outputs[0], scope.read(source, node, parts=True, unaligned=True))
