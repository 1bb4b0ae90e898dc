"""Lowers copies between the GPU and stages of the host (targets/cuda/host_stage.py makes their nodes).

    sent = SendToHost(x, ...; stage, buffers, columns)        the values go to the host's buffers, at these columns
    y, ... = ReceiveFromHost(sent?; stage, buffers, columns)  the host runs the stage, and its values come back

Nodes between the two are computed while the host runs the stage.
"""

from collections.abc import Sequence
from typing import Literal

import onnx_ir as ir

from ingot.artifact.programs.launch_program import HostCopy, HostValue
from ingot.pipeline.targets.cuda.lowering_context import LaunchContext, RowBuffer

SEND, RECEIVE = "SendToHost", "ReceiveFromHost"


def lower_send(context: LaunchContext, node: ir.Node) -> None:
    """Copy the node's inputs to the host; partial sums are added first, in float32."""
    rows = [context.read(value, node, partials=True, unaligned=True) for value in node.inputs]
    _copy(context, node, "send", [_contiguous(context, one, node, number) for number, one in enumerate(rows)])


def lower_receive(context: LaunchContext, node: ir.Node) -> None:
    """Copy the node's outputs from the host."""
    _copy(context, node, "receive", [context.make(value) for value in node.outputs])


def _contiguous(context: LaunchContext, rows: RowBuffer, node: ir.Node, number: int) -> RowBuffer:
    if rows.partials == 1 and rows.stride == rows.columns:
        return rows
    buffer = context.builder.buffer(f"{node.name}.{number}", context.rows * rows.columns, rows.buffer.type)
    out = RowBuffer(buffer, rows.columns, rows.columns)
    context.map(node, rows, out)
    return out


def _copy(
    context: LaunchContext, node: ir.Node, direction: Literal["send", "receive"], rows: Sequence[RowBuffer]
) -> None:
    buffers, columns = node.attributes["buffers"].as_strings(), node.attributes["columns"].as_ints()
    values = tuple(
        HostValue(buffer=buffer, column=column, columns=one.columns, rows=one.buffer)
        for buffer, column, one in zip(buffers, columns, rows, strict=True)
    )
    stage = node.attributes["stage"].as_int()
    context.builder.call(HostCopy(stage=stage, direction=direction, values=values, node=node.name or ""))
