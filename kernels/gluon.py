"""Gluon, in which a kernel chooses the layout of its tensors, and its stand-in for Triton's interpreter.

Gluon is Triton's language below the choice of layouts (triton.experimental). The interpreter has no Gluon, and layouts
do not change a result: where it runs, `gl` has Triton's functions, which drop the layouts, `mma` is a plain dot, and
`unpack` computes with whole numbers what its instructions do with bits.
"""

from typing import Any

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gluon_language
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from ingot.kernels.common import INTERPRETED


class _TritonsLanguage:
    """Gluon's names for functions of Triton, looked up at each call, because the interpreter replaces them."""

    SliceLayout = gluon_language.SliceLayout

    def __getattr__(self, name: str) -> Any:
        return getattr(tl, name)

    @staticmethod
    def arange(start: int, end: int, layout: object = None) -> Any:
        return tl.arange(start, end)

    @staticmethod
    def full(shape: Any, value: Any, dtype: Any, layout: object = None) -> Any:
        return tl.full(shape, value, dtype)

    @staticmethod
    def barrier() -> None:
        """Programs are interpreted as one thread."""

    @staticmethod
    def convert_layout(value: Any, layout: object, assert_trivial: bool = False) -> Any:
        return value


jit: Any = triton.jit if INTERPRETED.value else gluon.jit
gl: Any = _TritonsLanguage() if INTERPRETED.value else gluon_language
async_copy: Any = hopper.async_copy
# Triton 3.9 renamed it.
async_load: Any = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.constexpr_function
def result_layout(warps):
    """Sums [n, rows] of warps that share n, 16 by 8 in each multiplication."""
    return gluon_language.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps, 1], instr_shape=[16, 8])


@gluon.constexpr_function
def gated_layout(n, rows, warps):
    """Results [n / 2, rows] of two sums each: those of rows g and g + 8 of every 16 in `result_layout`."""
    registers = [[0, 1], *([0, 8 << bit] for bit in range((rows // 8).bit_length() - 1))]
    registers += [[8 * warps << bit, 0] for bit in range((n // (16 * warps)).bit_length() - 1)]
    return gluon_language.DistributedLinearLayout(
        reg_bases=registers,
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8 << bit, 0] for bit in range(warps.bit_length() - 1)],
        block_bases=[],
        shape=[n // 2, rows],
    )


@gluon.constexpr_function
def left_layout(warps):
    """Weights [n, columns] as the left operand of a multiplication."""
    return gluon_language.DotOperandLayout(operand_index=0, parent=result_layout(warps), k_width=2)


@gluon.constexpr_function
def right_layout(warps):
    """Rows [columns, rows] as the right operand."""
    return gluon_language.DotOperandLayout(operand_index=1, parent=result_layout(warps), k_width=2)


@gluon.constexpr_function
def runs_layout(n, run, warps):
    """A tensor [n, 4 * run] of which thread 4 g + t of a warp has a run of `run` in rows g and g + 8 of every 16."""
    registers = [*([0, 1 << bit] for bit in range(run.bit_length() - 1)), [8, 0]]
    registers += [[16 * warps << bit, 0] for bit in range((n // (16 * warps)).bit_length() - 1)]
    return gluon_language.DistributedLinearLayout(
        reg_bases=registers,
        lane_bases=[[0, run], [0, 2 * run], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16 << bit, 0] for bit in range(warps.bit_length() - 1)],
        block_bases=[],
        shape=[n, 4 * run],
    )


@gluon.constexpr_function
def rows_layout(rows, words, warps):
    """A tensor [rows, 32 * words] of which thread 4 g + t of a warp has 8 columns in each 32 of rows g, g + 8, ..."""
    registers = [[0, 1], [0, 2], [0, 4], *([0, 32 << bit] for bit in range(words.bit_length() - 1))]
    registers += [[8 << bit, 0] for bit in range((rows // 8).bit_length() - 1)]
    return gluon_language.DistributedLinearLayout(
        reg_bases=registers,
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[0, 0] for _ in range(warps.bit_length() - 1)],
        block_bases=[],
        shape=[rows, 32 * words],
    )


@gluon.constexpr_function
def scores_layout(columns):
    """Results [64, columns] of one group of four warps by wgmma."""
    return gluon_language.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.constexpr_function
def left_of(results):
    """The left operand, 16 bits in registers, of a wgmma with such results."""
    return gluon_language.DotOperandLayout(operand_index=0, parent=results, k_width=2)


@gluon.constexpr_function
def runs_of_rows_layout(rows):
    """A tensor [rows, 128] of which each thread of four warps has runs of 32 columns, neighbours in other rows."""
    registers = [[0, 1 << bit] for bit in range(5)] + [
        [32 << bit, 0] for bit in range(max(rows // 32, 1).bit_length() - 1)
    ]
    return gluon_language.DistributedLinearLayout(
        reg_bases=registers,
        lane_bases=[[1, 0], [2, 0], [4, 0], [0, 32], [0, 64]],
        warp_bases=[[8 << bit, 0] if 8 << bit < rows else [0, 0] for bit in range(2)],
        block_bases=[],
        shape=[rows, 128],
    )


@gluon.constexpr_function
def vectors_layout(dim):
    """Vectors [tokens, dim] of 16 bits that four warps load or copy, 16 bytes of a vector by each thread."""
    return gluon_language.BlockedLayout([1, 8], [256 // dim, dim // 8], [4, 1], [1, 0])


@gluon.constexpr_function
def plain_layout(rank):
    """A tensor in shared memory, in order."""
    return gluon_language.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=list(reversed(range(rank))))


@gluon.constexpr_function
def copied_layout(dtype, warps):
    """A vector of which each copy takes 16 bytes."""
    return gluon_language.BlockedLayout([128 // dtype.primitive_bitwidth], [32], [warps], [0])


@gluon.constexpr_function
def tile_layout():
    """Vectors [tokens, dim] of 16 bits in shared memory, from where wgmma reads them."""
    return gluon_language.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@gluon.constexpr_function
def base_of(dtype):
    """The number that `unpack` adds to a code."""
    return 128.0 if dtype == tl.bfloat16 else 1024.0


_UNPACK = """{{ .reg .b32 a, b, c, d, one;
shr.u32 b, $4, 4; shr.u32 c, $4, 8; shr.u32 d, $4, 12; mov.b32 one, {one};
lop3.b32 a, $4, 0x000f000f, {base}, 0xea; lop3.b32 b, b, 0x000f000f, {base}, 0xea;
lop3.b32 c, c, 0x000f000f, {base}, 0xea; lop3.b32 d, d, 0x000f000f, {base}, 0xea;
fma.rn.{type} $0, a, one, $5; fma.rn.{type} $1, b, one, $5;
fma.rn.{type} $2, c, one, $5; fma.rn.{type} $3, d, one, $5; }}"""
BF16_CODE = tl.constexpr(_UNPACK.format(one="0x3f803f80", base="0x43004300", type="bf16x2"))
FP16_CODE = tl.constexpr(_UNPACK.format(one="0x3c003c00", base="0x64006400", type="f16x2"))
_OPERANDS = tl.constexpr("=r,=r,=r,=r,r,r")


@jit
def unpack(packed, offset, DTYPE: tl.constexpr):
    """Codes in bits 0, 4, 8 and 12 of uint16, each plus base + offset; offset is a whole number in DTYPE.

    Exact: `0x4300 | code` is 128 + code in bfloat16, `0x6400 | code` 1024 + code in float16.
    """
    if INTERPRETED:
        offset = offset.to(tl.float32) + base_of(DTYPE)
        first = ((packed & 15).to(tl.float32) + offset).to(DTYPE)
        second = ((packed >> 4 & 15).to(tl.float32) + offset).to(DTYPE)
        third = ((packed >> 8 & 15).to(tl.float32) + offset).to(DTYPE)
        fourth = ((packed >> 12).to(tl.float32) + offset).to(DTYPE)
        found = (first, second, third, fourth)
    elif DTYPE == tl.bfloat16:  # noqa: SIM300
        found = gl.inline_asm_elementwise(
            BF16_CODE, _OPERANDS, [packed, offset], dtype=(gl.bfloat16,) * 4, is_pure=True, pack=2
        )
    else:
        found = gl.inline_asm_elementwise(
            FP16_CODE, _OPERANDS, [packed, offset], dtype=(gl.float16,) * 4, is_pure=True, pack=2
        )
    return found


@jit
def mma(left, right, total):
    """total + left @ right, in float32."""
    if INTERPRETED:  # noqa: SIM108  # only the branch that is taken can be compiled
        found = tl.dot(left, right, total, input_precision="ieee")
    else:
        found = mma_v2(left, right, total)
    return found
