"""Lowers latent attention: every token is computed in the absorbed form, as on the CPU (docs/models.md).

    key_up of all heads                          head_matmul, or head_matmul_nbits
    norm of the latent, rotation of the key,
    the write of both into the pool              latent_kv_write
    rotation of the queries, attention           latent_decode_attention, or latent_ragged_attention
    value_up of all heads                        head_matmul, or head_matmul_nbits

A program has heads of one query (decode), or of some queries of a tile, as its rows: all heads of a sequence where they
fit, so that a latent is read once. Batch-invariant programs have latent_ragged_attention in all buckets: it adds over
all keys of a query in one order, for any rows.
"""

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from ingot.artifact.programs.launch_program import Constant
from ingot.passes.rewriting import row_columns
from ingot.pipeline.targets.cuda.attention_operands import (
    Chunks,
    pool_arguments,
    table_argument,
    tile_arguments,
)
from ingot.pipeline.targets.cuda.expert_layers import ExpertLinear
from ingot.pipeline.targets.cuda.latent_layers import LatentLayers
from ingot.pipeline.targets.cuda.lowering_context import LaunchContext, RowBuffer
from ingot.pipeline.targets.cuda.program_builder import TILE_QUERIES, ProgramBuilder
from ingot.pipeline.targets.cuda.tiles import FEW_ROWS, span_columns
from ingot.sizes import ceil_div, next_power_of_two

_LEAST_HEADS = 16  # a matmul needs as many rows
_LARGE_RANK = 256
_WIDE_SM = 90  # reads queries from shared memory: it has registers for the sums of more rows
_LARGE_MEMORY = (80, 90)  # SMs with more than 99 KiB of shared memory for a program
_KINDS = {"fp8": 1, "int8": 2}  # kernels/kv_precision.py; floats are 0


@dataclass(frozen=True)
class LatentTile:
    """Rows of a program of latent attention, keys that it reads at once, warps and stages."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, rank: int, *, sm: int | None, is_float32: bool, is_ragged: bool) -> "LatentTile":
        """Return the tile for latents of `rank` dims; with `sm` None it fits every SM.

        By ptxas for 512 + 64 dims of 16 bits: decode 32 rows take 104 KiB, 16 rows 86, 64 rows 272; ragged 64 rows 144
        and all registers of SM 90, 32 rows 74.
        """
        if is_float32:  # tiles need twice the shared memory, and no tensor core multiplies them
            return cls(_LEAST_HEADS, 16, 4, 1)
        if rank <= _LARGE_RANK:
            return cls(32, 32, 4, 2)
        if is_ragged:
            return cls(64 if sm == _WIDE_SM else 32, 32, 8, 2)
        return cls(32 if sm in _LARGE_MEMORY else _LEAST_HEADS, 32, 8, 2)


def lower_latent_attention(context: LaunchContext, node: ir.Node, layers: LatentLayers) -> None:
    """Lower a latent attention with the linear layers of its heads."""
    query = context.read(layers.query, node, unaligned=True)
    heads, head_dim = layers.heads, layers.head_dim
    absorbed = _multiply(context, node, layers.key_up, query, head_dim)
    _write_latents(context, node, layers)
    rank = layers.key_up.n
    attended = RowBuffer(
        context.builder.buffer(f"{node.name}.latents", context.rows * heads * rank), heads * rank, heads * rank
    )
    _attend(context, node, layers, query, absorbed, attended)
    out = _multiply(context, node, layers.value_up, attended, rank)
    context.put(layers.result, out)


def _multiply(context: LaunchContext, node: ir.Node, linear: ExpertLinear, x: RowBuffer, head_stride: int) -> RowBuffer:
    """Multiply each head's first columns of x by the head's weight: [rows, heads * n]."""
    builder, heads, n = context.builder, len(linear.nodes), linear.n
    out = RowBuffer(builder.buffer(f"{linear.name}.out", context.rows * heads * n), heads * n, heads * n)
    source, offset = x.unaligned
    is_float32, are_few = builder.activation_type == "fp32", _are_few(context)
    rows = (16 if context.rows <= 16 else 32) if are_few else 64
    tile = min(next_power_of_two(n, 16), 64)
    constants: dict[str, Constant] = {
        "HEAD_STRIDE": head_stride,
        "N": n,
        "COLUMNS": linear.columns,
        "TILE_ROWS": rows,
        "TILE": tile,
    }
    grid = (ceil_div(context.rows, rows), ceil_div(n, tile), heads)
    common: dict[str, Any] = {
        "x": source,
        "out": out.buffer,
        "rows": context.rows,
        "x_offset": offset,
        "x_stride": x.stride,
        "out_stride": out.stride,
    }
    if not linear.is_packed:
        constants["TILE_COLUMNS"] = min(next_power_of_two(linear.columns, 16), 32 if is_float32 else 64)
        builder.launch("head_matmul", node, grid, constants, weight=linear.plain(builder), **common)
        return out
    weight = linear.spans(builder)
    spans, at_once = weight.spans, 128 // span_columns(weight.bits)
    if weight.bits == 4 or spans % at_once or weight.group % 128:
        at_once = 1
    constants |= {
        **weight.constants,
        "GROUPS": weight.groups,
        "BITS": weight.bits,
        "SPANS_AT_ONCE": at_once,
        "SCALE_WEIGHTS": not are_few,
        "DTYPE": builder.activation_type,
    }
    given: dict[str, Any] = {"codes": weight.codes, "scales": weight.scales, "zero_points": weight.zero_points}
    builder.launch("head_matmul_nbits", node, grid, constants, **given, **common)
    return out


def _are_few(context: LaunchContext) -> bool:
    """Whether tiles are those of few rows: up to 32, as in safe_tile, so that a row has equal bits in all of them."""
    return context.rows <= FEW_ROWS and not context.builder.shared.batch_invariant


def _sizes(builder: ProgramBuilder, node: ir.Node, layers: LatentLayers) -> dict[str, Constant]:
    """Constants of every kernel that accesses latents in the pool."""
    rank, rope = layers.key_up.n, row_columns(layers.rope)
    return {
        "RANK": rank,
        "BLOCK_RANK": next_power_of_two(rank, 16),
        "ROPE": rope,
        "BLOCK_ROPE": next_power_of_two(rope, 16),
        "BLOCK_TOKENS": builder.kv.block_tokens,
        "KIND": _KINDS.get(builder.kv.dtype, 0),
    }


def _write_latents(context: LaunchContext, node: ir.Node, layers: LatentLayers) -> None:
    builder = context.builder
    both = [layers.latent.source, layers.rope]
    latent, rope = (context.read(one, node, partials=True, unaligned=True) for one in both)
    if (latent.stride, latent.partials, latent.partial_stride) != (rope.stride, rope.partials, rope.partial_stride):
        latent, rope = (
            context.copied(one, f"{node.name}.{name}", node) for one, name in ((latent, "latent"), (rope, "rope"))
        )
    (source, offset), (turned, turned_offset) = latent.unaligned, rope.unaligned
    builder.launch(
        "latent_kv_write",
        node,
        (context.rows,),
        {**_sizes(builder, node, layers), "PARTS": latent.partials},
        latent=source,
        rope=turned,
        positions=builder.external("position_ids"),
        slots=builder.external("slots"),
        cos=table_argument(builder, node, 3),
        sin=table_argument(builder, node, 4),
        norm=context.vector(layers.latent.weight),
        **_pool(builder, node),
        epsilon=layers.latent.epsilon,
        latent_offset=offset,
        rope_offset=turned_offset,
        x_stride=latent.stride,
        part_stride=latent.partial_stride,
    )


def _attend(
    context: LaunchContext, node: ir.Node, layers: LatentLayers, query: RowBuffer, absorbed: RowBuffer, out: RowBuffer
) -> None:
    builder, heads, rank = context.builder, layers.heads, layers.key_up.n
    is_ragged, is_float32 = builder.bucket.attention == "ragged", builder.activation_type == "fp32"
    tile = LatentTile.of(rank, sm=builder.shared.tiles.sm, is_float32=is_float32, is_ragged=is_ragged)
    source, offset = query.unaligned
    constants: dict[str, Constant] = {
        **_sizes(builder, node, layers),
        "HEADS": heads,
        "HEAD_DIM": layers.head_dim,
        "TILE": tile.keys,
        "DTYPE": builder.activation_type,
    }
    common: dict[str, Any] = {
        "q": source,
        "absorbed": absorbed.buffer,
        "cos": table_argument(builder, node, 3),
        "sin": table_argument(builder, node, 4),
        **_pool(builder, node),
        "tables": builder.external("tables"),
        "lengths": builder.external("lengths"),
        "out": out.buffer,
        "scale": float(node.attributes["scale"].as_float()),
        "q_offset": offset + layers.key_up.columns,
        "q_stride": query.stride,
        "absorbed_stride": absorbed.stride,
        "out_stride": out.stride,
        "table_stride": ceil_div(builder.bucket.context_tokens, builder.kv.block_tokens),
    }
    options: dict[str, Any] = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    if is_ragged:
        block = min(next_power_of_two(heads), tile.rows)
        queries = min(tile.rows // block, TILE_QUERIES)
        block = max(block, _LEAST_HEADS // queries)
        grid = (builder.bucket.tiles, ceil_div(heads, block), TILE_QUERIES // queries)
        constants |= {"BLOCK_HEADS": block, "QUERIES": queries}
        builder.launch("latent_ragged_attention", node, grid, constants, **options, **common, **tile_arguments(builder))
        return
    block = min(next_power_of_two(heads, _LEAST_HEADS), tile.rows)
    tiles = ceil_div(heads, block)
    chunks = Chunks.of_latents(builder.bucket.context_tokens, context.rows, heads, tiles)
    states = context.rows * heads * chunks.count
    builder.launch(
        "latent_decode_attention",
        node,
        (context.rows, tiles, chunks.programs),
        {**constants, **chunks.constants, "BLOCK_HEADS": block},
        **options,
        **common,
        sums=builder.buffer(f"{node.name}.sums", states * rank, "fp32"),
        weights=builder.buffer(f"{node.name}.weights", states * 2, "fp32"),
        counters=builder.counters(context.rows * tiles),
    )


def _pool(builder: ProgramBuilder, node: ir.Node) -> dict[str, Any]:
    """The pool and the strides of its blocks: there is one head, and no values."""
    given = pool_arguments(builder, node)
    return {name: given[name] for name in ("pool", "scales", "block_stride", "scale_block_stride")}
