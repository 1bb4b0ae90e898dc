"""Storage of key and value vectors in the KV pool: 16 bits, or 8 or 4 bits with a float16 scale per vector.

    FLOAT    the pool's own floats                                      no scale
    FP8      e4m3fn, value / scale                                      scale = max|value| / 448
    INT8     -127..127, value / scale rounded to the nearest            scale = max|value| / 127
    INT4     -7..7, two to a byte: dim 2 j in the low half of byte j    scale = max|value| / 7

Each token and head has a vector. The scale is rounded to float16 first, and the codes use the rounded scale; a vector
of zeros has scale 1. (One scale per token as in KIVI's value cache, arXiv:2402.02750, which also has groups.)
"""

import triton
import triton.language as tl

from ingot.kernels.common import INTERPRETED

FLOAT, FP8, INT8, INT4 = (tl.constexpr(kind) for kind in range(4))


@triton.jit
def round_to_nearest(x):
    """Ties to even, for |x| < 2^22: adding 1.5 * 2^23 removes all fractional bits."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def vector_scale(largest, KIND: tl.constexpr):
    """The scale of a vector with this largest magnitude, rounded to float16, in float32."""
    if KIND == FP8:
        scale = largest / 448.0
    elif KIND == INT8:
        scale = largest / 127.0
    else:
        scale = largest / 7.0
    scale = tl.minimum(scale, 65504.0).to(tl.float16).to(tl.float32)
    return tl.where(scale > 0.0, scale, 1.0)


@triton.jit
def round_to_e4m3(x):
    """Nearest number of e4m3fn, ties to even, as float32, for |x| up to 448: the cast to eight bits is then exact.

    Uses integers because casts differ: Triton's interpreter truncates where the GPU rounds.
    """
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)  # 3 bits of mantissa
    return tl.where(tl.abs(x) < 0.015625, round_to_nearest(x * 512.0) / 512.0, normal)  # below 2^-6: steps of 2^-9


@triton.jit
def encode(x, scale, KIND: tl.constexpr):
    """Codes of values as float32: the values that FP8 is cast from, or whole numbers."""
    if KIND == FP8:
        return round_to_e4m3(tl.minimum(tl.maximum(x / scale, -448.0), 448.0))
    limit: tl.constexpr = 127.0 if KIND == INT8 else 7.0
    return tl.minimum(tl.maximum(round_to_nearest(x / scale), -limit), limit)


@triton.constexpr_function
def operand_type(kind, dtype):
    """The type of a matmul's operands: codes are multiplied as float16, which has all of them, or as float32."""
    return dtype if kind == FLOAT or dtype == tl.float32 else tl.float16


# 0x6400 | n is 1024 + n in float16, for n below 1024; so is 0x6408 ^ n for the n + 8 of 4 bits in two's complement.
_CODES_OF_INT8 = """{ .reg .b32 w, high, base, a, b;
xor.b32 w, $4, 0x80808080; mov.b32 high, 0x64646464; mov.b32 base, 0xe480e480;
prmt.b32 a, w, high, 0x4140; prmt.b32 b, w, high, 0x4342; add.f16x2 a, a, base; add.f16x2 b, b, base;
mov.b32 {$0, $1}, a; mov.b32 {$2, $3}, b; }"""
_CODES_OF_FP8 = """{ .reg .b16 low, high; .reg .b32 a, b;
mov.b32 {low, high}, $4; cvt.rn.f16x2.e4m3x2 a, low; cvt.rn.f16x2.e4m3x2 b, high;
mov.b32 {$0, $1}, a; mov.b32 {$2, $3}, b; }"""
_CODES_OF_INT4 = """{ .reg .b32 high, base, a, b, c, d;
shr.u32 high, $8, 4; mov.b32 base, 0xe408e408;
prmt.b32 a, $8, high, 0x4440; prmt.b32 b, $8, high, 0x5551; prmt.b32 c, $8, high, 0x6662; prmt.b32 d, $8, high, 0x7773;
lop3.b32 a, a, 0x000f000f, 0x64086408, 0x6a; lop3.b32 b, b, 0x000f000f, 0x64086408, 0x6a;
lop3.b32 c, c, 0x000f000f, 0x64086408, 0x6a; lop3.b32 d, d, 0x000f000f, 0x64086408, 0x6a;
add.f16x2 a, a, base; add.f16x2 b, b, base; add.f16x2 c, c, base; add.f16x2 d, d, base;
mov.b32 {$0, $1}, a; mov.b32 {$2, $3}, b; mov.b32 {$4, $5}, c; mov.b32 {$6, $7}, d; }"""
CODES_OF_INT8, CODES_OF_FP8, CODES_OF_INT4 = map(tl.constexpr, (_CODES_OF_INT8, _CODES_OF_FP8, _CODES_OF_INT4))


@triton.jit
def _code(words, place: tl.constexpr, KIND: tl.constexpr):
    """One code of each word, as the instructions make it; for the interpreter."""
    if KIND == INT4:
        found = ((words << (28 - 4 * place)) >> 28).to(tl.float16)
    elif KIND == INT8:
        found = ((words << (24 - 8 * place)) >> 24).to(tl.float16)
    else:
        found = (words >> 8 * place).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return found


@triton.jit
def _codes(words, KIND: tl.constexpr):
    """Codes [tokens, dims] in float16 of 32-bit words [tokens, dims / 4], or dims / 8 for INT4; all exact."""
    if KIND == INT4:
        if INTERPRETED:
            a, b, c, d = _code(words, 0, KIND), _code(words, 1, KIND), _code(words, 2, KIND), _code(words, 3, KIND)
            e, f, g, h = _code(words, 4, KIND), _code(words, 5, KIND), _code(words, 6, KIND), _code(words, 7, KIND)
        else:
            a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
                CODES_OF_INT4, "=h,=h,=h,=h,=h,=h,=h,=h,r", [words], dtype=(tl.float16,) * 8, is_pure=True, pack=1
            )
        even, odd = tl.join(tl.join(a, e), tl.join(c, g)), tl.join(tl.join(b, f), tl.join(d, h))
        values = tl.reshape(tl.join(even, odd), (words.shape[0], 8 * words.shape[1]))
    else:
        if INTERPRETED:
            a, b, c, d = _code(words, 0, KIND), _code(words, 1, KIND), _code(words, 2, KIND), _code(words, 3, KIND)
        else:
            a, b, c, d = tl.inline_asm_elementwise(
                CODES_OF_INT8 if KIND == INT8 else CODES_OF_FP8,
                "=h,=h,=h,=h,r", [words], dtype=(tl.float16,) * 4, is_pure=True, pack=1,
            )  # fmt: skip
        values = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (words.shape[0], 4 * words.shape[1]))
    return values


@triton.jit
def block_of(tile, inner, BLOCK_TOKENS: tl.constexpr, TILE: tl.constexpr):
    """Number of the block of token `tile + inner`; `tile` is a multiple of TILE, inner [TILE] counts from 0.

    Fewer instructions than a division of the sum where tiles are whole blocks, or blocks whole tiles.
    """
    if TILE % BLOCK_TOKENS == 0:
        number = tile // BLOCK_TOKENS + inner // BLOCK_TOKENS
    elif BLOCK_TOKENS % TILE == 0:
        number = tile // BLOCK_TOKENS + inner * 0
    else:
        number = (tile + inner) // BLOCK_TOKENS
    return number


@triton.jit
def place_in_block(tile, inner, BLOCK_TOKENS: tl.constexpr, TILE: tl.constexpr):
    """Place of token `tile + inner` in its block."""
    if TILE % BLOCK_TOKENS == 0:
        place = inner % BLOCK_TOKENS
    elif BLOCK_TOKENS % TILE == 0:
        place = tile % BLOCK_TOKENS + inner
    else:
        place = (tile + inner) % BLOCK_TOKENS
    return place


@triton.jit
def block_ids(table, tile, inner, end, BLOCK_TOKENS: tl.constexpr, TILE: tl.constexpr):
    """Ids [TILE] of the blocks of tokens `tile + inner` in a sequence's table; 0 for tokens from `end` on."""
    return tl.load(table + block_of(tile, inner, BLOCK_TOKENS, TILE), mask=tile + inner < end, other=0)


@triton.jit
def vector_places(
    block,
    place,
    kv_head,
    block_stride,
    head_stride,
    scale_block_stride,
    WIDTH: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Where the vectors of tokens begin in the pool, and where their scales are; `place` is a token's in its block."""
    block = block.to(tl.int64)
    rows = block * block_stride + kv_head * head_stride + place * WIDTH
    return rows, block * scale_block_stride + kv_head * BLOCK_TOKENS + place


@triton.jit
def _load_singly(pool, rows, inside, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, KIND: tl.constexpr):
    """Elements of the pool as they are, or whole numbers of 4 bits."""
    if KIND == INT4:
        half = tl.arange(0, BLOCK_DIM // 2)
        mask = inside[:, None] & (half < DIM // 2)[None, :]
        packed = tl.load(pool + rows[:, None] + half[None, :], mask=mask, other=0).to(tl.int32)
        low = ((packed & 15) ^ 8) - 8  # two's complement of 4 bits
        high = ((packed >> 4) ^ 8) - 8
        values = tl.interleave(low, high)
    else:
        at = tl.arange(0, BLOCK_DIM)
        mask = inside[:, None] & (at < DIM)[None, :]
        values = tl.load(pool + rows[:, None] + at[None, :], mask=mask, other=0.0)
    return values


@triton.jit
def load_codes(
    pool,
    rows,
    inside,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    KIND: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Vectors [tokens, BLOCK_DIM] without their scales, in operand_type(KIND, DTYPE); zeros as in `load_vectors`.

    Codes are loaded in words of 32 bits, where vectors are whole words, and become float16 without the unit of
    conversions between whole numbers and floats, which has a quarter of the others' rate.
    """
    A_WORD: tl.constexpr = 8 if KIND == INT4 else 4
    if KIND != FLOAT and WIDTH % 4 == 0 and DIM % A_WORD == 0:
        word = tl.arange(0, BLOCK_DIM // A_WORD)
        mask = inside[:, None] & (word < DIM // A_WORD)[None, :]
        words = pool.to(tl.pointer_type(tl.int32), bitcast=True) + (rows // 4)[:, None] + word[None, :]
        values = _codes(tl.load(words, mask=mask, other=0), KIND)
    else:
        values = _load_singly(pool, rows, inside, DIM, BLOCK_DIM, KIND)
    return values.to(operand_type(KIND, DTYPE))


@triton.jit
def load_vectors(
    pool,
    scales,
    rows,
    scale_rows,
    inside,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    KIND: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Vectors [tokens, BLOCK_DIM] as DTYPE, zeros where not inside and beyond DIM.

    rows, scale_rows [tokens] int64    where each vector begins, in elements of the pool (bytes for INT4), and its scale
    WIDTH                              elements of the pool of which all rows and strides are multiples
    """
    if KIND == FLOAT:
        values = load_codes(pool, rows, inside, WIDTH, DIM, BLOCK_DIM, KIND, DTYPE)
    else:
        factor = tl.load(scales + scale_rows, mask=inside, other=0.0)
        if DTYPE == tl.float16:  # noqa: SIM300
            # Rounds as float32 would, in which it is exact.
            values = load_codes(pool, rows, inside, WIDTH, DIM, BLOCK_DIM, KIND, DTYPE) * factor[:, None]
        else:
            # From float16 to bfloat16 codes would go through float32: more instructions than this.
            values = _load_singly(pool, rows, inside, DIM, BLOCK_DIM, KIND).to(tl.float32)
            values = (values * factor.to(tl.float32)[:, None]).to(DTYPE)
    return values


@triton.jit
def kept_apart(values, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """The same values: Triton does not look through instructions that may have effects.

    It chooses fragments of an operand by the narrowest load before it, half of that if tensors were joined. Fragments
    for few bits take more instructions where an operand's columns are not stored in runs, as those of values.
    """
    if KIND != FLOAT and DTYPE != tl.float32 and not INTERPRETED:  # noqa: SIM300
        values = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [values], dtype=tl.float16, is_pure=False, pack=2)
    return values


@triton.jit
def query_of_codes(query, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Queries [rows, dims] as operand_type(KIND, DTYPE), and the factors [rows, 1] of their scores.

    bfloat16 has a wider range than float16: there a row is divided by a power of two near its largest magnitude.
    """
    unit = tl.max(tl.abs(query.to(tl.float32)), 1, keep_dims=True).to(tl.int32, bitcast=True) & 0x7F800000
    if DTYPE == tl.bfloat16:  # noqa: SIM300
        inverse = (0x7F000000 - unit).to(tl.float32, bitcast=True)
        made = (query.to(tl.float32) * inverse).to(tl.float16), unit.to(tl.float32, bitcast=True)
    else:
        made = query.to(DTYPE), tl.zeros_like(unit).to(tl.float32) + 1.0
    return made


@triton.jit
def power_of_scale(scale):
    """The logarithm to base 2 of scales in float32, and their inverses: an instruction each, right to 2^-22."""
    if INTERPRETED:
        found = tl.log2(scale), 1.0 / scale
    else:
        found = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $2; rcp.approx.ftz.f32 $1, $2;", "=&f,=f,f", [scale],
            dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    return found
