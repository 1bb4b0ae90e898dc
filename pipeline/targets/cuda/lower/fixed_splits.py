"""Lowers attention of batch-invariant programs: one compiled kernel for prompts and decode steps.

The context is cut into splits of a fixed number of tokens. For many rows a program computes all splits of its queries
and adds them; for few rows several programs share the splits, and another kernel adds them. The bits are the same
(kernels/fixed_split_attention.py).
"""

from dataclasses import dataclass

import onnx_ir as ir

from ingot.pipeline.targets.cuda.attention_operands import (
    HeadSizes,
    QueryTile,
    int_attribute,
    reader_arguments,
    reader_constants,
    sinks_argument,
    tile_arguments,
)
from ingot.pipeline.targets.cuda.lowering_context import LaunchContext, RowBuffer
from ingot.pipeline.targets.cuda.program_builder import TILE_QUERIES
from ingot.pipeline.targets.cuda.tiles import FEW_ROWS
from ingot.sizes import ceil_div, next_power_of_two

_MOST_SPLITS = 128  # splits of the longest context
_LEAST_SPLIT = 256  # tokens
_MOST_SUMS = 32 * 128  # accumulators of a program, which has two sets: of a split, and of those before it
_PROGRAMS = 1024  # programs for few rows: several per multiprocessor of a large GPU
_JOINED_AT_ONCE = 8


@dataclass(frozen=True)
class FixedSplits:
    """Splits of `tokens` of the longest context: a property of the model, never of a sequence or a batch."""

    tokens: int
    count: int

    @classmethod
    def of(cls, context_tokens: int) -> "FixedSplits":
        """Return the splits for a context: as few tokens as gives at most _MOST_SPLITS of them."""
        tokens = max(_LEAST_SPLIT, next_power_of_two(ceil_div(context_tokens, _MOST_SPLITS)))
        return cls(tokens, ceil_div(context_tokens, tokens))

    def programs(self, rows: int, kv_heads: int) -> int:
        """Programs that share the splits of a tile of queries: 1 for many rows, else enough to fill a GPU."""
        if rows > FEW_ROWS or self.count == 1:
            return 1
        return min(self.count, max(2, ceil_div(_PROGRAMS, rows * kv_heads)))


def invariant_tile(sizes: HeadSizes) -> QueryTile:
    """Return the tile of a program of batch-invariant attention: the same for prompts and decode steps, on every SM."""
    group = next_power_of_two(sizes.group)
    queries = max(1, min(TILE_QUERIES, _MOST_SUMS // (group * sizes.block_dim)))
    return QueryTile(queries, max(group, 16 // queries), sizes.num_warps)


def lower_fixed_splits(
    context: LaunchContext, node: ir.Node, sizes: HeadSizes, queries: RowBuffer, out: RowBuffer
) -> None:
    """Launch attention over the pool, and where several programs share the splits, the kernel that joins them."""
    builder, rows = context.builder, context.rows
    assert builder.bucket.attention == "ragged", "buckets of batch-invariant programs are ragged"
    tile, splits = invariant_tile(sizes), FixedSplits.of(builder.bucket.context_tokens)
    programs = splits.programs(rows, sizes.kv_heads)
    shape = {"SPLITS": splits.count, "SPLIT": splits.tokens}
    sinks = sinks_argument(builder, node, base_2=True)
    states = rows * sizes.heads * splits.count if programs > 1 else 1
    sums = builder.buffer(f"{node.name}.sums", states * sizes.dim, "fp32")
    weights = builder.buffer(f"{node.name}.weights", states * 2, "fp32")
    builder.launch(
        "fixed_split_attention",
        node,
        (builder.bucket.tiles, sizes.kv_heads * (TILE_QUERIES // tile.queries), programs),
        {
            **reader_constants(builder, node, sizes),
            **shape,
            "TILE": sizes.tile,
            "KV_HEADS": sizes.kv_heads,
            "BLOCK_GROUP": tile.group,
            "QUERIES": tile.queries,
            "HAS_SINKS": sinks is not None,
        },
        num_warps=tile.num_warps,
        num_stages=sizes.num_stages,
        **reader_arguments(builder, node, queries),
        **tile_arguments(builder),
        sinks=sinks,
        sums=sums,
        weights=weights,
        out=out.buffer,
        out_stride=out.stride,
    )
    if programs > 1:
        builder.launch(
            "join_fixed_splits",
            node,
            (rows, sizes.heads),
            {
                **shape,
                "HEADS": sizes.heads,
                "DIM": sizes.dim,
                "BLOCK_DIM": sizes.block_dim,
                "AT_ONCE": _JOINED_AT_ONCE,
                "HAS_SINKS": sinks is not None,
            },
            sums=sums,
            weights=weights,
            positions=builder.external("position_ids"),
            sinks=sinks,
            out=out.buffer,
            window=int_attribute(node, "window"),
            out_stride=out.stride,
        )
