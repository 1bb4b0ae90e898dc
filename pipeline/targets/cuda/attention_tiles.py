"""How attention is divided among programs so that each fits the registers and shared memory of a GPU.

Decode: chunks of a context, at most MOST_CHUNKS of at least LEAST_CHUNK tokens (kernels/decode_attention.py).
Ragged: a tile of TILE_QUERIES queries; a program computes `queries` of them with all heads that share a key.
Measured with ptxas (docs/kernels.md): no registers are spilled on any SM.
"""

from dataclasses import dataclass

from ingot.pipeline.targets.cuda.program_builder import TILE_QUERIES
from ingot.sizes import next_power_of_two

TILE = 32  # tokens read at once
MOST_CHUNKS = 64
LEAST_CHUNK = 128
DECODE_WARPS = 4
_MOST_SUMS = 128 * 128  # accumulators of a program (rows times head size); half of them for a quantized pool
_MANY_REGISTERS = 90  # the SM whose matmuls read one operand from shared memory: it has registers for all accumulators
_SMALL_DIM = 128  # head size up to which one more tile of keys and values is in flight


@dataclass(frozen=True)
class HeadSizes:
    """Number and size of an attention's heads."""

    heads: int
    kv_heads: int
    dim: int

    @property
    def group(self) -> int:
        """Heads that share a key."""
        return self.heads // self.kv_heads

    @property
    def block_dim(self) -> int:
        """Head size of a tile: a power of two."""
        return next_power_of_two(self.dim, 16)

    @property
    def num_stages(self) -> int:
        """Tiles of keys and values in flight: as many as fit the smallest shared memory of all SMs."""
        return 3 if self.block_dim <= _SMALL_DIM else 2


@dataclass(frozen=True)
class RaggedTile:
    """queries * group rows; a matmul needs 16 at least."""

    queries: int
    group: int
    num_warps: int


def ragged_tile(sizes: HeadSizes, *, is_quantized: bool, sm: int | None, is_float32: bool = False) -> RaggedTile:
    """Return the tile of a program of ragged attention; with `sm` None it fits every SM."""
    sums = _MOST_SUMS // 2 if is_quantized and sm != _MANY_REGISTERS else _MOST_SUMS
    if is_float32:  # tiles need twice the shared memory
        sums = _MOST_SUMS // 4
    group = next_power_of_two(sizes.group)
    queries = max(1, min(TILE_QUERIES, sums // (group * sizes.block_dim)))  # a power of two, as both factors are
    warps = 8 if queries * group * sizes.block_dim >= _MOST_SUMS // 2 else 4
    return RaggedTile(queries, max(group, 16 // queries), warps)
