"""RotaryEmbedding with tokens along the batch axis, for onnxruntime's CPU kernel; a part of lower-onnxruntime-cpu.

    Matched       RotaryEmbedding(Unsqueeze(x, 0), cos, sin, Unsqueeze(positions, 0)) -> Squeeze(.., 0)    [1, T, W]
    Replacement   RotaryEmbedding(Unsqueeze(x, 1), cos, sin, Unsqueeze(positions, 1)) -> Squeeze(.., 1)    [T, 1, W]

The kernel refuses more tokens along the sequence axis than the tables have rows, whatever their positions. A step's
tokens belong to many sequences, so a batch may be longer than a context. The result is the same bit for bit, and takes
the same time.
"""

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from ingot.errors import PassError
from ingot.passes.rewriting import add_constant

_AXIS = "rotary.token_axis"
_LAYOUT_OPS = ("Unsqueeze", "Squeeze")


def put_tokens_on_batch_axis(graph: ir.Graph) -> bool:
    """Rewrite every RotaryEmbedding of the graph; return whether there was one to rewrite.

    PassError when anything but Unsqueeze and Squeeze makes its operands or reads its result.
    """
    rotations = [node for node in graph if node.op_type == "RotaryEmbedding"]
    values = dict.fromkeys(value for node in rotations for value in _batched(node) if _is_batched(value))
    for value in values:
        _swap_axes(graph, value)
    return bool(values)


def _batched(node: ir.Node) -> Iterator[ir.Value]:
    """The op's values with a batch axis: x, position_ids, result."""
    for value in (node.inputs[0], node.inputs[3], node.outputs[0]):
        assert value is not None
        yield value


def _is_batched(value: ir.Value) -> bool:
    return value.shape is not None and value.shape[0] == 1


def _swap_axes(graph: ir.Graph, value: ir.Value) -> None:
    """[1, T, ...] -> [T, 1, ...], at the Unsqueeze that makes the value, or at each Squeeze that reads it."""
    maker, readers = value.producer(), list(value.consumers())
    made_here = maker is not None and maker.op_type == "RotaryEmbedding"
    changed = readers if made_here else [maker]
    others = [] if made_here else [node for node in readers if node.op_type != "RotaryEmbedding"]
    if others or any(node is None or node.op_type not in _LAYOUT_OPS for node in changed):
        raise PassError(
            f"{value.name!r} at a RotaryEmbedding is not reached by Unsqueeze and Squeeze alone; "
            "onnxruntime needs its tokens along the first axis"
        )
    for node in changed:
        assert node is not None
        node.replace_input_with(1, add_constant(graph, _AXIS, np.array([1], np.int64)))
    assert value.shape is not None
    first, second, *rest = value.shape
    value.shape = ir.Shape([second, first, *rest])
