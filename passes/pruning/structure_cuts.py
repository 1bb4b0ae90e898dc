"""Inputs that linear layers lose: where that can be, and the weights while the walk goes on and when it is over."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.errors import PassError
from ingot.passes.calibration import LinearGroup
from ingot.passes.pruning.channel_selection import ELEMENTWISE, ChannelSelection, Integers
from ingot.passes.pruning.column_pruning import KeptColumns
from ingot.passes.stored_weights import change_stored, readers, stored_value
from ingot.passes.weight_values import float32_values

SiteKind = Literal["kv_groups", "ffn"]
FloatArray = NDArray[np.float32]
_HEADS = ("num_heads", "num_kv_heads", "head_dim")


@dataclass(frozen=True)
class Cut:
    """A decision: the layers that read one value, what they keep of it, and what goes from what makes it."""

    group: LinearGroup
    kept: KeptColumns
    selection: ChannelSelection


def site_of(group: LinearGroup) -> tuple[SiteKind | None, int]:
    """What the linear layers of a group read, and how many columns belong together."""
    producer = group.source.producer()
    if producer is not None and producer.op_type == "PagedAttention":
        heads, kv_heads, dim = (producer.attributes.get_int(name, 0) or 0 for name in _HEADS)
        return "kv_groups", heads // kv_heads * dim
    if producer is not None and producer.op_type in ELEMENTWISE:
        return "ffn", 1
    return None, 1


def own_weight(node: ir.Node) -> FloatArray:
    """A layer's weight [out, in]; PassError where it is quantized, or read by others, which would lose inputs, too."""
    stored = stored_value(node.inputs[1])
    if stored is None:
        raise PassError(f"layer {node.name!r} has a weight that is computed or quantized; prune before")
    if len(readers(stored)) > 1:
        raise PassError(f"layer {node.name!r} shares {stored.name!r} with others, which would lose inputs, too")
    return float32_values(stored)


def _parts(cut: Cut) -> Iterator[tuple[ir.Value, FloatArray]]:
    """The weights of a cut's layers, and what they become."""
    row = 0
    for node in cut.group.linears:
        stored = stored_value(node.inputs[1])
        assert stored is not None
        assert stored.shape is not None
        rows = int(str(stored.shape[0]))
        yield stored, cut.kept.weight[row : row + rows]
        row += rows


def zero_columns(graph: ir.Graph, cut: Cut) -> None:
    """The kept weights among zeros, in the old shape: what the rest of the walk computes with."""
    for stored, kept in _parts(cut):
        change_stored(graph, stored, partial(_widened, kept=kept, columns=cut.kept.columns))


def _widened(values: FloatArray, kept: FloatArray, columns: Integers) -> FloatArray:
    result = np.zeros_like(values)
    result[:, columns] = kept
    return result


def put_weights(cut: Cut) -> None:
    """The kept weights alone, in the new shape; what makes the inputs must lose its rows then."""
    for stored, kept in _parts(cut):
        stored.const_value = ir.Tensor(np.ascontiguousarray(kept), name=stored.name)
        stored.shape = ir.Shape(kept.shape)
