"""ingot::PagedAttention and its rotary embedding as launches: keys and values into the pool, attention over it."""

from typing import Any

import onnx_ir as ir

from ingot.artifact.launch_program import Argument, BufferArgument
from ingot.errors import PassError
from ingot.passes.weight_values import float32_values
from ingot.pipeline.cuda.program_builder import TILE_QUERIES, ProgramBuilder, next_power_of_two

_KINDS = {"fp8": 1, "int8": 2, "int4": 3}  # kernels/kv_precision.py; floats are 0
_TILE = 32
_MOST_CHUNKS = 64
_LEAST_CHUNK = 256


def lower_attention(builder: ProgramBuilder, node: ir.Node, qkv: BufferArgument) -> None:
    """Refuses, by name, operands that do not lie packed as queries, keys, values."""
    heads, kv_heads, dim, layer = (_int(node, name) for name in ("num_heads", "num_kv_heads", "head_dim", "layer"))
    columns = tuple(_int(node, f"{name}_column") for name in ("query", "key", "value"))
    packed = len(set(node.inputs[:3])) == 1
    if not packed or columns != (0, heads * dim, (heads + kv_heads) * dim):
        raise PassError(
            f"{node.name!r} reads queries, keys and values that are not one packed projection; put pack-projections "
            "and fuse-rotary-attention before the CUDA lowering. Normed queries and keys have no kernel"
        )
    rows, width = builder.bucket.rows, (heads + 2 * kv_heads) * dim
    queries = builder.buffer(f"{node.name}.queries", rows * heads * dim)
    pool, scales = (
        builder.external("kv_pool", builder.kv.pool_offset(layer)),
        builder.external("kv_scales", builder.kv.scale_offset(layer)) if builder.kv.is_quantized else None,
    )
    rotary = _int(node, "rotary_dim")
    tables = [_table(builder, node, index) if rotary else None for index in (3, 4)]
    vector = {"DIM": dim, "BLOCK_DIM": next_power_of_two(dim, 16), "BLOCK_TOKENS": builder.kv.block_tokens}
    kind = {"KIND": _KINDS.get(builder.kv.dtype, 0)}
    builder.launch(
        "rotary_kv_write",
        node,
        (rows, heads + kv_heads),
        {**vector, **kind, "HEADS": heads, "KV_HEADS": kv_heads, "ROTARY": rotary},
        qkv=qkv,
        positions=builder.external("position_ids"),
        slots=builder.external("slots"),
        cos=tables[0],
        sin=tables[1],
        q_out=queries,
        pool=pool,
        scales=scales,
        qkv_stride=width,
        q_out_stride=heads * dim,
        **builder.kv.strides(),
    )
    softcap, scale = (float(node.attributes.get_float(name, 0.0) or 0.0) for name in ("softcap", "scale"))
    read = {
        **vector,
        **kind,
        "WIDTH": builder.kv.width,
        "GROUP": heads // kv_heads,
        "TILE": _TILE,
        "HAS_SOFTCAP": softcap > 0,
        "DTYPE": builder.activation_type,
    }
    out = builder.buffer(node.outputs[0].name or "", rows * heads * dim)
    common: dict[str, Any] = {
        "q": queries,
        "pool": pool,
        "scales": scales,
        "tables": builder.external("tables"),
        "lengths": builder.external("lengths"),
        "scale": scale,
        "softcap": softcap,
        "window": _int(node, "window"),
        "q_stride": heads * dim,
        "table_stride": -(-builder.bucket.context_tokens // builder.kv.block_tokens),
        **builder.kv.strides(),
    }
    if builder.bucket.attention == "ragged":
        group = next_power_of_two(heads // kv_heads)
        builder.launch(
            "ragged_attention",
            node,
            (builder.bucket.tiles, kv_heads),
            {**read, "BLOCK_GROUP": group, "TILE_QUERIES": TILE_QUERIES, "HAS_SINKS": False},
            **common,
            query_starts=builder.external("query_starts"),
            tile_sequences=builder.external("tile_sequences"),
            tile_starts=builder.external("tile_starts"),
            sinks=None,
            out=out,
            out_stride=heads * dim,
        )
        return
    chunk = max(_LEAST_CHUNK, -(-builder.bucket.context_tokens // (_MOST_CHUNKS * _TILE)) * _TILE)
    chunks = -(-builder.bucket.context_tokens // chunk)
    sums = builder.buffer(f"{node.name}.sums", rows * heads * chunks * dim, "fp32")
    weights = builder.buffer(f"{node.name}.weights", rows * heads * chunks * 2, "fp32")
    group = next_power_of_two(heads // kv_heads, 16)
    builder.launch(
        "decode_attention",
        node,
        (rows, kv_heads, chunks),
        {**read, "KV_HEADS": kv_heads, "BLOCK_GROUP": group, "CHUNK": chunk},
        **common,
        sums=sums,
        weights=weights,
    )
    builder.launch(
        "join_chunks",
        node,
        (rows, heads),
        {"HEADS": heads, "DIM": dim, "BLOCK_DIM": vector["BLOCK_DIM"], "CHUNK": chunk, "HAS_SINKS": False},
        sums=sums,
        weights=weights,
        lengths=builder.external("lengths"),
        sinks=None,
        out=out,
        window=_int(node, "window"),
        chunks=chunks,
        out_stride=heads * dim,
    )


def _table(builder: ProgramBuilder, node: ir.Node, index: int) -> Argument:
    table = node.inputs[index]
    assert table is not None
    return builder.weight(table.name or "", "fp32", lambda: float32_values(table))


def _int(node: ir.Node, name: str) -> int:
    return node.attributes.get_int(name, 0) or 0
