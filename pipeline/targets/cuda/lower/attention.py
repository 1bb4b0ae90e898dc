"""Lowers ingot::PagedAttention: norms per head, rotary embedding and the write of keys and values into the KV pool are
one launch; attention over the pool follows. Also lowers RotaryEmbedding on its own.

Attention is divided among programs so that each fits the registers and shared memory of a GPU. Decode: chunks of a
context (attention_operands.py), shared by as many programs as fill a large GPU; their number follows from the bucket
and changes no bits. Ragged: a tile of
TILE_QUERIES queries; a program computes some of them with all heads that share a key. Measured with ptxas
(docs/kernels.md): no registers are spilled on any SM. On SM 90 a kernel with warps that only copy computes it where it
can (kernels/prefill_attention.py).

Batch-invariant programs have one attention kernel for both; see lower_fixed_splits.py. Latent attention has kernels of
its own; see latents.py.
"""

import onnx_ir as ir

from ingot.artifact.programs.launch_program import ELEMENT_BYTES, ActivationType
from ingot.errors import PassError
from ingot.passes.rewriting import attention_operands, attention_sinks, row_columns
from ingot.pipeline.targets.cuda.attention_operands import (
    TILE,
    Chunks,
    HeadSizes,
    QueryTile,
    int_attribute,
    pool_arguments,
    reader_arguments,
    reader_constants,
    sinks_argument,
    table_argument,
    tile_arguments,
    vector_constants,
)
from ingot.pipeline.targets.cuda.kernel_signatures import signature
from ingot.pipeline.targets.cuda.lower.fixed_splits import lower_fixed_splits
from ingot.pipeline.targets.cuda.lower.latents import lower_latent_attention
from ingot.pipeline.targets.cuda.lowering_context import LaunchContext, RowBuffer
from ingot.pipeline.targets.cuda.program_builder import TILE_QUERIES
from ingot.pipeline.targets.cuda.tiles import FEW_ROWS
from ingot.pipeline.targets.fusions import HeadNorms
from ingot.sizes import ceil_div, next_power_of_two

_MOST_SUMS = 128 * 128  # accumulators of a program (rows times head size)
_MOST_KEY_BYTES = 512  # two tiles of such keys, and of values, fit every SM's shared memory
_MANY_KEYS, _MOST_DIM = 64, 128  # keys of a ragged tile where they fit, and the largest head size for which they do
_MANY_REGISTERS = 90  # the SM whose matmuls read one operand from shared memory: it has registers for codes, too
_MOST_DIM_OF_CODES = 64  # the largest head size for which other SMs have registers for so many codes
# Sizes of kernels/prefill_attention.py.
_SPECIALIZED_DIMS, _SPECIALIZED_ROWS, _SPECIALIZED_KEYS = (64, 128), 128, 128
_SPECIALIZED_WARPS, _LEAST_BLOCK_TOKENS = 12, 8
_FEW_HEADS = 4  # heads of a token in one program, if there are few tokens
_MOST_ELEMENTS = 2048  # elements of all heads of a program, if there are many tokens
_ONE_WARP = 128  # head size up to which one warp is enough


def ragged_tile(sizes: HeadSizes, *, is_quantized: bool, sm: int | None, is_float32: bool = False) -> QueryTile:
    """Return the tile of a program of ragged attention; with `sm` None it fits every SM."""
    few_registers = is_quantized and sm != _MANY_REGISTERS
    sums = _MOST_SUMS // 2 if few_registers and sizes.block_dim > _MOST_DIM else _MOST_SUMS
    if is_float32:  # tiles need twice the shared memory
        sums = _MOST_SUMS // 4
    group = next_power_of_two(sizes.group)
    queries = max(1, min(TILE_QUERIES, sums // (group * sizes.block_dim)))  # a power of two, as both factors are
    warps = 8 if queries * group * sizes.block_dim >= _MOST_SUMS // 2 else 4
    are_many = sizes.block_dim <= (_MOST_DIM_OF_CODES if few_registers else _MOST_DIM) and not is_float32
    keys = _MANY_KEYS if are_many else TILE
    return QueryTile(queries, max(group, 16 // queries), warps, keys)


def specialized_tile(
    sizes: HeadSizes, *, block_tokens: int, is_quantized: bool, sm: int | None, is_float32: bool = False
) -> QueryTile | None:
    """Return the tile of kernels/prefill_attention.py, or None where that kernel cannot compute the attention.

    It is for SM 90 and pools of 16 bits.
    """
    group = next_power_of_two(sizes.group)
    fits_blocks = _LEAST_BLOCK_TOKENS <= block_tokens <= _SPECIALIZED_KEYS and block_tokens.bit_count() == 1
    if sm != signature("prefill_attention").sm or is_quantized or is_float32 or sizes.dim not in _SPECIALIZED_DIMS:
        return None
    if group > _SPECIALIZED_ROWS or not fits_blocks:
        return None
    return QueryTile(_SPECIALIZED_ROWS // group, group, _SPECIALIZED_WARPS, _SPECIALIZED_KEYS)


def decode_stages(sizes: HeadSizes, activations: ActivationType) -> int:
    """Stages of the decode kernel's loop: two more tiles of keys and values in flight where every SM has memory."""
    return 3 if sizes.block_dim * ELEMENT_BYTES[activations] <= _MOST_KEY_BYTES else 2


def lower_attention(context: LaunchContext, node: ir.Node) -> None:
    """Lower attention: split along the context in decode buckets, by tiles of queries in ragged ones; or invariant."""
    if node in context.latents:
        lower_latent_attention(context, node, context.latents[node])
        return
    heads, kv_heads, dim = (int_attribute(node, name) for name in ("num_heads", "num_kv_heads", "head_dim"))
    sizes = HeadSizes(heads, kv_heads, dim, in_4_bits=context.builder.kv.dtype == "int4")
    queries = write_pool(context, node, sizes)
    out = context.make(node.outputs[0])
    if context.builder.shared.batch_invariant:
        lower_fixed_splits(context, node, sizes, queries, out)
    elif context.builder.bucket.attention == "ragged":
        _ragged(context, node, sizes, queries, out)
    else:
        _decode(context, node, sizes, queries, out)


def lower_rotary(context: LaunchContext, node: ir.Node) -> None:
    """Lower RotaryEmbedding. PassError for interleaved pairs and for positions other than the model's input."""
    positions = node.inputs[3] if len(node.inputs) > 3 else None
    source = positions.producer() if positions is not None else None
    given = source.inputs[0] if source is not None and source.op_type == "Unsqueeze" else None
    if node.attributes.get_int("interleaved", 0) or given is None or given.name != "position_ids":
        raise PassError(
            f"{node.name!r} (RotaryEmbedding) rotates interleaved pairs, or by other positions than position_ids; "
            "CUDA kernels rotate the halves of a head by position_ids"
        )
    x, out, heads = context.read(node.inputs[0], node), context.make(node.outputs[0]), int_attribute(node, "num_heads")
    dim = row_columns(node.outputs[0]) // heads
    rotary = int_attribute(node, "rotary_embedding_dim") or dim
    context.builder.launch(
        "rotate_heads",
        node,
        (context.rows, heads),
        {"DIM": dim, "BLOCK_DIM": next_power_of_two(dim, 16), "ROTARY": rotary},
        num_warps=1 if dim <= _ONE_WARP else 2,
        x=x.buffer,
        positions=context.builder.external("position_ids"),
        cos=table_argument(context.builder, node, 1),
        sin=table_argument(context.builder, node, 2),
        out=out.buffer,
        x_stride=x.stride,
        out_stride=out.stride,
    )


def write_pool(context: LaunchContext, node: ir.Node, sizes: HeadSizes) -> RowBuffer:
    """Launch the write of keys and values into the pool; return the queries, normed and rotated.

    A layer that shares the keys and values of another writes none: no program of the launch is for them.
    """
    builder, rotary = context.builder, int_attribute(node, "rotary_dim")
    norms = context.fusions.at.get(node)
    norms = norms if isinstance(norms, HeadNorms) else None
    q, *written = _operands(context, node, sizes, norms)
    k, v = written or (q, q)
    width = sizes.heads * sizes.dim
    queries = RowBuffer(builder.buffer(f"{node.name}.queries", context.rows * width), width, width)
    are_few = context.rows <= FEW_ROWS or builder.shared.batch_invariant
    at_once = _FEW_HEADS if are_few else max(_FEW_HEADS, _MOST_ELEMENTS // sizes.block_dim)
    at_once = min(at_once, next_power_of_two(sizes.heads))
    builder.launch(
        "rotary_kv_write",
        node,
        (context.rows, ceil_div(sizes.heads, at_once) + (ceil_div(sizes.kv_heads, at_once) if written else 0)),
        {
            **vector_constants(builder, sizes),
            "HEADS": sizes.heads,
            "KV_HEADS": sizes.kv_heads,
            "HEADS_AT_ONCE": at_once,
            "ROTARY": rotary,
            "PARTS": q.partials,
            "HAS_NORM": norms is not None,
        },
        q=q.buffer,
        k=k.buffer,
        v=v.buffer,
        positions=builder.external("position_ids"),
        slots=builder.external("slots"),
        cos=table_argument(builder, node, 3) if rotary else None,
        sin=table_argument(builder, node, 4) if rotary else None,
        q_norm=context.vector(norms.query.weight) if norms else None,
        k_norm=context.vector(norms.key.weight) if norms and norms.key else None,
        q_out=queries.buffer,
        **pool_arguments(builder, node),
        epsilon=norms.query.epsilon if norms else 0.0,
        q_stride=q.stride,
        k_stride=k.stride,
        v_stride=v.stride,
        part_stride=q.partial_stride,
        q_out_stride=width,
    )
    return queries


def _operands(context: LaunchContext, node: ir.Node, sizes: HeadSizes, norms: HeadNorms | None) -> list[RowBuffer]:
    """Queries, keys and values as views, partials only if all three are of one matmul; queries alone if they share."""
    sources = list(attention_operands(node)[:3])
    if norms:
        sources[:2] = norms.query.source, norms.key.source if norms.key else None
    if sources[1] is None:
        del sources[1:]
    starts = [int_attribute(node, f"{name}_column") for name in ("query", "key", "value")]
    widths = [heads * sizes.dim for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads)]

    def views(partials: bool) -> list[RowBuffer]:
        rows = (context.read(source, node, partials=partials, unaligned=True) for source in sources)
        return [each.slice(start, width) for each, start, width in zip(rows, starts, widths, strict=False)]

    found = views(partials=True)
    if len({(rows.partials, rows.partial_stride, rows.buffer.type) for rows in found}) > 1:
        found = views(partials=False)
    if any(not rows.is_aligned for rows in found):
        found = [context.copied(rows, f"{node.name}.{name}", node) for rows, name in zip(found, "qkv", strict=False)]
    return found


def _decode(context: LaunchContext, node: ir.Node, sizes: HeadSizes, queries: RowBuffer, out: RowBuffer) -> None:
    builder, rows = context.builder, context.rows
    chunks = Chunks.of(builder.bucket.context_tokens, rows, sizes.kv_heads)
    sums = builder.buffer(f"{node.name}.sums", rows * sizes.heads * chunks.count * sizes.dim, "fp32")
    weights = builder.buffer(f"{node.name}.weights", rows * sizes.heads * chunks.count * 2, "fp32")
    builder.launch(
        "decode_attention",
        node,
        (rows, sizes.kv_heads, chunks.programs),
        {
            **reader_constants(builder, node, sizes),
            **chunks.constants,
            "TILE": sizes.decode_tile(builder.activation_type, is_quantized=builder.kv.is_quantized),
            "KV_HEADS": sizes.kv_heads,
            "BLOCK_GROUP": next_power_of_two(sizes.group, 16),
            "HAS_SINKS": attention_sinks(node) is not None,
        },
        num_warps=sizes.num_warps,
        num_stages=decode_stages(sizes, builder.activation_type),
        **reader_arguments(builder, node, queries),
        sinks=sinks_argument(builder, node),
        sums=sums,
        weights=weights,
        counters=builder.counters(rows * sizes.kv_heads),
        out=out.buffer,
        out_stride=out.stride,
    )


def _ragged(context: LaunchContext, node: ir.Node, sizes: HeadSizes, queries: RowBuffer, out: RowBuffer) -> None:
    builder = context.builder
    is_float32 = builder.activation_type == "fp32"
    sm, is_quantized = builder.shared.tiles.sm, builder.kv.is_quantized
    form = {"is_quantized": is_quantized, "is_float32": is_float32}
    own = specialized_tile(sizes, block_tokens=builder.kv.block_tokens, sm=sm, **form)
    tile = own if own and builder.shared.specialized else ragged_tile(sizes, sm=sm, **form)
    builder.launch(
        "prefill_attention" if tile is own else "ragged_attention",
        node,
        (builder.bucket.tiles, sizes.kv_heads, ceil_div(TILE_QUERIES, tile.queries)),
        {
            **reader_constants(builder, node, sizes),
            "TILE": tile.keys,
            "BLOCK_GROUP": tile.group,
            "TILE_QUERIES": TILE_QUERIES,
            "QUERIES": tile.queries,
            "HAS_SINKS": attention_sinks(node) is not None,
        },
        num_warps=tile.num_warps,
        num_stages=sizes.num_stages,
        **reader_arguments(builder, node, queries),
        **tile_arguments(builder),
        sinks=sinks_argument(builder, node),
        out=out.buffer,
        out_stride=out.stride,
    )
