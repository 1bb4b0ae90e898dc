"""Operands that the attention kernels share: sizes of heads, the pool of keys and values, tiles of queries."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from ingot.artifact.programs.launch_program import ELEMENT_BYTES, ActivationType, Argument
from ingot.errors import PassError
from ingot.passes.rewriting import attention_sinks
from ingot.passes.weights import float32_values
from ingot.pipeline.targets.cuda.lowering_context import ALIGNED_BYTES, RowBuffer
from ingot.pipeline.targets.cuda.program_builder import ProgramBuilder
from ingot.sizes import ceil_div, next_power_of_two

TILE = 32  # tokens read at once
USUAL_CHUNK = 128  # tokens of a chunk of decode attention
MOST_CHUNKS = 64
_MOST_LATENT_STATES = 2048  # heads times chunks of a sequence: each is a vector in float32
_LARGE_GPU = 128  # multiprocessors that the chunks of one sequence fill, if it has tokens enough
_DECODE_PROGRAMS = 2048  # several waves of a large GPU's multiprocessors; more of them would find no chunk
_LEAST_DIM = 32  # a tile whose codes have 4 bits needs it (cubins.require_whole_fragments), so all tiles have it
_SMALL_DIM = 128  # head size up to which one more tile of keys and values is in flight
_LARGE_DIM = 256  # head size above which a program of few rows has half of the tokens and twice the warps
_LOG2_E = 1.4426950408889634
_KINDS = {"fp8": 1, "int8": 2, "int4": 3}  # kernels/kv_precision.py; floats are 0


@dataclass(frozen=True)
class HeadSizes:
    """Number and size of an attention's heads, and whether the pool stores them in 4 bits."""

    heads: int
    kv_heads: int
    dim: int
    in_4_bits: bool = False

    @property
    def group(self) -> int:
        """Heads that share a key."""
        return self.heads // self.kv_heads

    @property
    def block_dim(self) -> int:
        """Head size of a tile: a power of two."""
        return next_power_of_two(self.dim, _LEAST_DIM)

    def decode_tile(self, activations: ActivationType, *, is_quantized: bool) -> int:
        """Tokens that a program of decode attention reads at once: more of codes, where every SM has the memory."""
        return 2 * TILE if is_quantized and activations != "fp32" and self.block_dim <= _SMALL_DIM else self.tile

    @property
    def tile(self) -> int:
        """Tokens that a program of few rows reads at once: of decode attention and of batch-invariant programs.

        Codes of 4 bits need all (cubins.require_whole_fragments); their tiles of large heads take less shared memory.
        """
        return TILE // 2 if self.block_dim > _LARGE_DIM and not self.in_4_bits else TILE

    @property
    def num_warps(self) -> int:
        """Warps of a program of few rows."""
        return 4 if self.block_dim <= _LARGE_DIM else 8

    @property
    def num_stages(self) -> int:
        """Tiles of keys and values in flight: as many as fit the smallest shared memory of all SMs."""
        return 3 if self.block_dim <= _SMALL_DIM else 2


@dataclass(frozen=True)
class Chunks:
    """How decode attention divides a context; see kernels/decode_attention.py.

    filling    depends on the model alone, so that a sequence has the same sums in every bucket
    programs   of a sequence and a group of its heads; their number changes no bits
    """

    count: int
    filling: int
    programs: int

    @classmethod
    def of(cls, context_tokens: int, rows: int, groups: int) -> "Chunks":
        """Divide contexts for `rows` sequences, each with as many `groups` of heads, a program each.

        A chunk stores a vector for each head that shares its keys: 64 chunks of 8 groups of 4 heads take 1 MiB.
        """
        filling = ceil_div(_LARGE_GPU, groups)
        most = max(ceil_div(context_tokens, USUAL_CHUNK), min(ceil_div(context_tokens, TILE), 2 * filling))
        return cls._shared(min(MOST_CHUNKS, most), filling, rows * groups)

    @classmethod
    def of_latents(cls, context_tokens: int, rows: int, heads: int, groups: int) -> "Chunks":
        """The same for latents: a chunk's vectors are larger than its keys, so that there are fewer, of 128 tokens."""
        count = min(MOST_CHUNKS, _MOST_LATENT_STATES // heads or 1, ceil_div(context_tokens, USUAL_CHUNK))
        return cls._shared(count, 1, rows * groups)

    @classmethod
    def _shared(cls, count: int, filling: int, others: int) -> "Chunks":
        return cls(count, filling, min(count, ceil_div(_DECODE_PROGRAMS, others)))

    @property
    def constants(self) -> dict[str, int]:
        """Constants of the kernels."""
        return {"CHUNKS": self.count, "FILLING": self.filling, "USUAL_CHUNK": USUAL_CHUNK}


@dataclass(frozen=True)
class QueryTile:
    """Queries of a program with all heads that share a key: queries * group rows; a matmul needs 16 at least.

    keys    tokens read at once
    """

    queries: int
    group: int
    num_warps: int
    keys: int = TILE


def vector_constants(builder: ProgramBuilder, sizes: HeadSizes) -> dict[str, int]:
    """Constants of every kernel that accesses the pool."""
    kind = _KINDS.get(builder.kv.dtype, 0)
    return {"DIM": sizes.dim, "BLOCK_DIM": sizes.block_dim, "BLOCK_TOKENS": builder.kv.block_tokens, "KIND": kind}


def pool_arguments(builder: ProgramBuilder, node: ir.Node) -> dict[str, Any]:
    """Pointers to the layer's keys and values, and their strides. PassError for keys that are not aligned."""
    layer, kv = int_attribute(node, "layer"), builder.kv
    pool = builder.external("kv_pool", kv.pool_offset(layer))
    scales = builder.external("kv_scales", kv.scale_offset(layer)) if kv.is_quantized else None
    for pointer in (pool, scales):
        if pointer is not None and pointer.offset * ELEMENT_BYTES[pointer.type] % ALIGNED_BYTES:
            raise PassError(
                f"{node.name!r}: in blocks of {kv.block_tokens} tokens the keys of layer {layer}, or their scales, do "
                f"not begin at a multiple of {ALIGNED_BYTES} bytes, where the kernels read them: set "
                "engine.block_tokens to 16 or a multiple of it"
            )
    return {"pool": pool, "scales": scales, **kv.strides(layer)}


def reader_constants(builder: ProgramBuilder, node: ir.Node, sizes: HeadSizes) -> dict[str, Any]:
    """Constants of every attention kernel."""
    return {
        **vector_constants(builder, sizes),
        "WIDTH": builder.kv.vector_elements(int_attribute(node, "layer")),
        "GROUP": sizes.group,
        "HAS_SOFTCAP": _float_attribute(node, "softcap") > 0,
        "DTYPE": builder.activation_type,
    }


def reader_arguments(builder: ProgramBuilder, node: ir.Node, queries: RowBuffer) -> dict[str, Any]:
    """Arguments of every attention kernel."""
    return {
        **pool_arguments(builder, node),
        "q": queries.buffer,
        "tables": builder.external("tables"),
        "lengths": builder.external("lengths"),
        "scale": _float_attribute(node, "scale"),
        "softcap": _float_attribute(node, "softcap"),
        "window": int_attribute(node, "window"),
        "q_stride": queries.stride,
        "table_stride": ceil_div(builder.bucket.context_tokens, builder.kv.block_tokens),
    }


def sinks_argument(builder: ProgramBuilder, node: ir.Node, *, base_2: bool = False) -> Argument | None:
    """The sinks of an attention; None without them. base_2: as exponents of 2, like the scores."""
    sinks = attention_sinks(node)
    if sinks is None:
        return None
    if not base_2:
        return builder.weight(sinks.name or "", "fp32", lambda: float32_values(sinks))
    return builder.weight(f"{sinks.name}.base-2", "fp32", lambda: float32_values(sinks) * np.float32(_LOG2_E))


def table_argument(builder: ProgramBuilder, node: ir.Node, index: int) -> Argument:
    """A table of a rotary embedding: cos is operand 3 of an attention, sin operand 4."""
    table = node.inputs[index]
    assert table is not None
    return builder.weight(table.name or "", "fp32", lambda: float32_values(table))


def tile_arguments(builder: ProgramBuilder) -> dict[str, Any]:
    """Arguments of the kernels that read tiles of queries."""
    return {name: builder.external(name) for name in ("query_starts", "tile_sequences", "tile_starts")}


def int_attribute(node: ir.Node, name: str) -> int:
    """Return an attribute; 0 if it is missing."""
    return node.attributes.get_int(name, 0) or 0


def _float_attribute(node: ir.Node, name: str) -> float:
    """Return an attribute; 0 if it is missing."""
    return float(node.attributes.get_float(name, 0.0) or 0.0)
