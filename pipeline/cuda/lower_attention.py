"""ingot::PagedAttention as launches: keys and values into the pool (lower_pool.py), then attention over it."""

from typing import Any

import onnx_ir as ir

from ingot.pipeline.cuda.attention_tiles import (
    DECODE_WARPS,
    LEAST_CHUNK,
    MOST_CHUNKS,
    TILE,
    HeadSizes,
    ragged_tile,
)
from ingot.pipeline.cuda.lower_pool import float_attribute, int_attribute, pool_arguments, vector_constants, write_pool
from ingot.pipeline.cuda.placed_rows import Rows
from ingot.pipeline.cuda.program_builder import TILE_QUERIES, ProgramBuilder, next_power_of_two
from ingot.pipeline.cuda.scope import Scope


def lower_attention(scope: Scope, node: ir.Node) -> None:
    """Write, then attend: split along the context in decode buckets, by tiles of queries in others."""
    sizes = HeadSizes(*(int_attribute(node, name) for name in ("num_heads", "num_kv_heads", "head_dim")))
    queries = write_pool(scope, node, sizes)
    out = scope.make(node.outputs[0])
    if scope.builder.bucket.attention == "ragged":
        _ragged(scope, node, sizes, queries, out)
    else:
        _decode(scope, node, sizes, queries, out)


def _decode(scope: Scope, node: ir.Node, sizes: HeadSizes, queries: Rows, out: Rows) -> None:
    builder, rows, context = scope.builder, scope.rows, scope.builder.bucket.context_tokens
    chunks = min(MOST_CHUNKS, -(-context // LEAST_CHUNK))
    split = {"CHUNKS": chunks, "LEAST_CHUNK": LEAST_CHUNK, "TILE": TILE}
    sums = builder.buffer(f"{node.name}.sums", rows * sizes.heads * chunks * sizes.dim, "fp32")
    weights = builder.buffer(f"{node.name}.weights", rows * sizes.heads * chunks * 2, "fp32")
    group = next_power_of_two(sizes.group, 16)
    builder.launch(
        "decode_attention",
        node,
        (rows, sizes.kv_heads, chunks),
        {**_read(builder, node, sizes), **split, "KV_HEADS": sizes.kv_heads, "BLOCK_GROUP": group},
        num_warps=DECODE_WARPS,
        num_stages=sizes.num_stages,
        **_common(builder, node, queries),
        sums=sums,
        weights=weights,
    )
    builder.launch(
        "join_chunks",
        node,
        (rows, sizes.heads),
        {
            **split,
            "HEADS": sizes.heads,
            "DIM": sizes.dim,
            "BLOCK_DIM": sizes.block_dim,
            "BLOCK_CHUNKS": next_power_of_two(chunks),
            "HAS_SINKS": False,
        },
        sums=sums,
        weights=weights,
        lengths=builder.external("lengths"),
        sinks=None,
        out=out.buffer,
        window=int_attribute(node, "window"),
        out_stride=out.stride,
    )


def _ragged(scope: Scope, node: ir.Node, sizes: HeadSizes, queries: Rows, out: Rows) -> None:
    builder = scope.builder
    is_float32 = builder.activation_type == "fp32"
    sm, is_quantized = builder.shared.tiles.sm, builder.kv.is_quantized
    tile = ragged_tile(sizes, is_quantized=is_quantized, sm=sm, is_float32=is_float32)
    builder.launch(
        "ragged_attention",
        node,
        (builder.bucket.tiles, sizes.kv_heads, TILE_QUERIES // tile.queries),
        {
            **_read(builder, node, sizes),
            "TILE": TILE,
            "BLOCK_GROUP": tile.group,
            "TILE_QUERIES": TILE_QUERIES,
            "QUERIES": tile.queries,
            "HAS_SINKS": False,
        },
        num_warps=tile.num_warps,
        num_stages=sizes.num_stages,
        **_common(builder, node, queries),
        query_starts=builder.external("query_starts"),
        tile_sequences=builder.external("tile_sequences"),
        tile_starts=builder.external("tile_starts"),
        sinks=None,
        out=out.buffer,
        out_stride=out.stride,
    )


def _read(builder: ProgramBuilder, node: ir.Node, sizes: HeadSizes) -> dict[str, Any]:
    """Constants of both kernels that read the pool."""
    return {
        **vector_constants(builder, sizes),
        "WIDTH": builder.kv.width,
        "GROUP": sizes.group,
        "HAS_SOFTCAP": float_attribute(node, "softcap") > 0,
        "DTYPE": builder.activation_type,
    }


def _common(builder: ProgramBuilder, node: ir.Node, queries: Rows) -> dict[str, Any]:
    """Arguments of both kernels that read the pool."""
    return {
        **pool_arguments(builder, node),
        "q": queries.buffer,
        "tables": builder.external("tables"),
        "lengths": builder.external("lengths"),
        "scale": float_attribute(node, "scale"),
        "softcap": float_attribute(node, "softcap"),
        "window": int_attribute(node, "window"),
        "q_stride": queries.stride,
        "table_stride": -(-builder.bucket.context_tokens // builder.kv.block_tokens),
    }
