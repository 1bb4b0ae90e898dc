"""RotaryEmbedding with tokens along the batch axis, for onnxruntime's CPU kernel.

    Matched       RotaryEmbedding(Unsqueeze(x, 0), cos, sin, Unsqueeze(positions, 0)) -> Squeeze(.., 0)    [1, T, W]
    Replacement   RotaryEmbedding(Unsqueeze(x, 1), cos, sin, Unsqueeze(positions, 1)) -> Squeeze(.., 1)    [T, 1, W]

The kernel refuses more tokens along the sequence axis than the tables have rows, whatever their positions are. Here
one step's tokens are of many sequences, so a batch may well be longer than a context. The numbers are the same, bit for
bit, and so is the time.
"""

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from ingot.errors import PassError
from ingot.passes.rewriting import add_initializer

_AXIS = "rotary.token_axis"
_LAYOUT_OPS = ("Unsqueeze", "Squeeze")


def turn_rotary_rows(graph: ir.Graph) -> bool:
    """Rewrite every RotaryEmbedding of the graph; return whether there was one to rewrite.

    Raises PassError where its operands and results are not reached by Unsqueeze and Squeeze alone.
    """
    rotations = [node for node in graph if node.op_type == "RotaryEmbedding"]
    values = dict.fromkeys(value for node in rotations for value in _batched(node) if _is_batched(value))
    for value in values:
        _turn(graph, value)
    return bool(values)


def _batched(node: ir.Node) -> Iterator[ir.Value]:
    """What the op reads and makes with a batch axis: x, position_ids, result."""
    for value in (node.inputs[0], node.inputs[3], node.outputs[0]):
        assert value is not None
        yield value


def _is_batched(value: ir.Value) -> bool:
    return value.shape is not None and value.shape[0] == 1


def _turn(graph: ir.Graph, value: ir.Value) -> None:
    """[1, T, ...] -> [T, 1, ...]: at the Unsqueeze that makes the value, or at each Squeeze that reads it."""
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
        node.replace_input_with(1, _token_axis(graph))
    assert value.shape is not None
    first, second, *rest = value.shape
    value.shape = ir.Shape([second, first, *rest])


def _token_axis(graph: ir.Graph) -> ir.Value:
    known = graph.initializers.get(_AXIS)
    return known if known is not None else add_initializer(graph, ir.Tensor(np.array([1], np.int64), name=_AXIS))
