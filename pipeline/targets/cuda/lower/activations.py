"""Lowers activations, with a gate and without."""

from collections.abc import Mapping
from types import MappingProxyType

import onnx_ir as ir

from ingot.artifact.programs.launch_program import Constant
from ingot.errors import PassError
from ingot.pipeline.targets.cuda.lowering_context import ACTIVATIONS, LaunchContext, RowBuffer
from ingot.pipeline.targets.fusions import Curve, Gate, activation, clip_bounds


def lower_gate(context: LaunchContext, node: ir.Node, gate: Gate) -> None:
    """Lower a gated activation. Both halves may be views or split-K partials."""
    x = context.read(gate.gate, node, partials=True)
    up = context.read(gate.up, node, partials=True, unaligned=True)
    if x.partials != up.partials:
        x, up = context.read(gate.gate, node), context.read(gate.up, node, unaligned=True)
    _launch_gate(context, node, gate, x, up, {})


def lower_interleaved_gate(context: LaunchContext, node: ir.Node, gate: Gate, x: RowBuffer) -> None:
    """Lower the gated activation of interleaved gates and ups x."""
    _launch_gate(context, node, gate, x, x, {"INTERLEAVED": True})


def _launch_gate(
    context: LaunchContext, node: ir.Node, gate: Gate, x: RowBuffer, up: RowBuffer, form: dict[str, Constant]
) -> None:
    launch_gate(context, node, gate, x, up, context.make(node.outputs[0]), context.rows, form)


def launch_gate(
    context: LaunchContext,
    node: ir.Node,
    gate: Gate,
    x: RowBuffer,
    up: RowBuffer,
    out: RowBuffer,
    rows: int,
    form: Mapping[str, Constant] = MappingProxyType({}),
) -> None:
    """Launch the gated activation of so many rows. x must be aligned, up may be unaligned."""
    source, offset = up.unaligned
    (_, blocks), shape = context.blocks(out.columns)
    context.builder.launch(
        "gated_activation",
        node,
        (rows, blocks),
        {**shape, "PARTS": x.partials, "KIND": ACTIVATIONS[gate.activation], **form},
        gate=x.buffer,
        up=source,
        numbers=context.activation_numbers(node, gate.numbers),
        out=out.buffer,
        gate_stride=x.stride,
        gate_part_stride=x.partial_stride,
        up_offset=offset,
        up_stride=up.stride,
        up_part_stride=up.partial_stride,
        out_stride=out.stride,
    )


def lower_activation(context: LaunchContext, node: ir.Node) -> None:
    """Lower an activation without a gate; Tanh is a softcap of 1."""
    found = None if node.op_type == "Tanh" else activation(node.outputs[0])
    if found is None and node.op_type != "Tanh":
        raise PassError(f"{node.name!r} ({node.op_type}) has an alpha other than 1, and no CUDA kernel does")
    x = context.read(node.inputs[0], node, partials=True, unaligned=True)
    name = "none" if found is None else found[1]
    context.map(node, x, context.make(node.outputs[0]), name, softcap=1.0 if node.op_type == "Tanh" else 0.0)


def lower_clip(context: LaunchContext, node: ir.Node) -> None:
    """Lower a clip between two stored numbers, or one of them."""
    bounds = clip_bounds(node)
    if bounds is None:
        raise PassError(f"{node.name!r} ({node.op_type}) clips to computed bounds, and the CUDA kernel to stored ones")
    x = context.read(node.inputs[0], node, partials=True, unaligned=True)
    context.map(node, x, context.make(node.outputs[0]), "clamp", numbers=bounds)


def lower_curve(context: LaunchContext, node: ir.Node, curve: Curve) -> None:
    """Lower an activation of several nodes."""
    x = context.read(curve.source, node, partials=True, unaligned=True)
    context.map(node, x, context.make(node.outputs[0]), curve.activation, numbers=curve.numbers)
