"""Attention operands as the kernels want them: queries, keys, values in one row.

    Matched         a = ingot::PagedAttention(q, k, v, tables..; columns..)     of several values, or in another order
    Replacement     packed = Concat(q, k, v; axis=-1)                           a part of the segment, and fused there
                    a = ingot::PagedAttention(packed, packed, packed, tables..; columns 0, H * D, (H + KV) * D)

So queries and keys that are normed, or turned by the segment itself, need no kernel of their own. Refuses operands that
are a part of a wider value in another order.
"""

import onnx_ir as ir

from ingot.errors import PassError
from ingot.passes.rewriting import make_node, static_columns
from ingot.pipeline.tensorrt.stages import ATTENTION

_NAMES = ("query_column", "key_column", "value_column")


def pack_attention_operands(graph: ir.Graph) -> None:
    """Rewrite every attention whose operands do not lie packed."""
    for node in list(graph):
        if node.op_type == ATTENTION and not _is_packed(node):
            _pack(graph, node)


def _columns(node: ir.Node) -> tuple[int, int, int]:
    heads, kv_heads, dim = (node.attributes[name].as_int() for name in ("num_heads", "num_kv_heads", "head_dim"))
    return heads * dim, kv_heads * dim, kv_heads * dim


def _is_packed(node: ir.Node) -> bool:
    query, key, _ = _columns(node)
    begins = tuple(node.attributes.get_int(name, 0) for name in _NAMES)
    return len(set(node.inputs[:3])) == 1 and begins == (0, query, query + key)


def _pack(graph: ir.Graph, node: ir.Node) -> None:
    widths, operands = _columns(node), node.inputs[:3]
    if any(value is None or static_columns(value) != width for value, width in zip(operands, widths, strict=True)):
        raise PassError(f"{node.name!r} reads parts of wider values; only queries, keys, values in one row are packed")
    concat = make_node("Concat", f"{node.name}.operands", operands, [operands[0]], axis=-1)
    packed = concat.outputs[0]
    packed.name = concat.name
    assert packed.shape is not None
    packed.shape = ir.Shape([packed.shape[0], sum(widths)])
    graph.insert_before(node, concat)
    for index in range(3):
        node.replace_input_with(index, packed)
    for name, column in zip(_NAMES, (0, widths[0], widths[0] + widths[1]), strict=True):
        node.attributes[name] = ir.AttrInt64(name, column)
