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

# 0x47008000 ^ n << 8 is 2^15 + 128 + n in float32, for n of 8 bits in two's complement. Times a scale, less the scale
# times 2^15 + 128, it is rounded once, to bfloat16: all before is exact, because a scale has 11 bits. Codes of 4 bits
# are at three places of a word, with 2^15 + 8, 2^11 + 8 and 2^7 + 8.
_VALUES_OF_INT8 = """{ .reg .b32 w, high, a, b, c, d; .reg .f32 base, e, f, g, h;
xor.b32 w, $4, 0x80808080; mov.b32 high, 0x47000000; mul.rn.f32 base, $5, 0fC7008000;
prmt.b32 a, w, high, 0x7404; prmt.b32 b, w, high, 0x7414; prmt.b32 c, w, high, 0x7424; prmt.b32 d, w, high, 0x7434;
mov.b32 e, a; mov.b32 f, b; mov.b32 g, c; mov.b32 h, d;
fma.rn.f32 e, e, $5, base; fma.rn.f32 f, f, $5, base; fma.rn.f32 g, g, $5, base; fma.rn.f32 h, h, $5, base;
cvt.rn.bf16x2.f32 a, f, e; cvt.rn.bf16x2.f32 b, h, g; mov.b32 {$0, $1}, a; mov.b32 {$2, $3}, b; }"""
_VALUES_OF_INT4 = """{ .reg .b32 low, high, a, b, c, d, e, f, g, h; .reg .f32 x, y, z, i, j, k, l, m, n, o, p;
shl.b32 low, $8, 8; shr.u32 high, $8, 12;
mul.rn.f32 x, $9, 0fC7000800; mul.rn.f32 y, $9, 0fC5008000; mul.rn.f32 z, $9, 0fC3080000;
lop3.b32 a, low, 0x00000f00, 0x47000800, 0x6a; lop3.b32 b, low, 0x0000f000, 0x45008000, 0x6a;
lop3.b32 c, $8, 0x00000f00, 0x47000800, 0x6a; lop3.b32 d, $8, 0x0000f000, 0x45008000, 0x6a;
lop3.b32 e, $8, 0x000f0000, 0x43080000, 0x6a; lop3.b32 f, high, 0x00000f00, 0x47000800, 0x6a;
lop3.b32 g, high, 0x0000f000, 0x45008000, 0x6a; lop3.b32 h, high, 0x000f0000, 0x43080000, 0x6a;
mov.b32 i, a; mov.b32 j, b; mov.b32 k, c; mov.b32 l, d; mov.b32 m, e; mov.b32 n, f; mov.b32 o, g; mov.b32 p, h;
fma.rn.f32 i, i, $9, x; fma.rn.f32 j, j, $9, y; fma.rn.f32 k, k, $9, x; fma.rn.f32 l, l, $9, y;
fma.rn.f32 m, m, $9, z; fma.rn.f32 n, n, $9, x; fma.rn.f32 o, o, $9, y; fma.rn.f32 p, p, $9, z;
cvt.rn.bf16x2.f32 a, j, i; cvt.rn.bf16x2.f32 b, l, k; cvt.rn.bf16x2.f32 c, n, m; cvt.rn.bf16x2.f32 d, p, o;
mov.b32 {$0, $1}, a; mov.b32 {$2, $3}, b; mov.b32 {$4, $5}, c; mov.b32 {$6, $7}, d; }"""
VALUES_OF_INT8, VALUES_OF_INT4 = map(tl.constexpr, (_VALUES_OF_INT8, _VALUES_OF_INT4))


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
def _in_turn(parts):
    """Tensors [tokens, words] of the elements of words, as [tokens, elements]; 4 of them, or 8."""
    if len(parts) == 8:
        a, b, c, d, e, f, g, h = parts
        even, odd = tl.join(tl.join(a, e), tl.join(c, g)), tl.join(tl.join(b, f), tl.join(d, h))
    else:
        a, b, c, d = parts
        even, odd = tl.join(a, c), tl.join(b, d)
    return tl.reshape(tl.join(even, odd), (a.shape[0], len(parts) * a.shape[1]))


@triton.jit
def _codes(words, KIND: tl.constexpr):
    """Codes [tokens, dims] in float16 of 32-bit words [tokens, dims / 4], or dims / 8 for INT4; all exact."""
    if KIND == INT4 and not INTERPRETED:
        parts = tl.inline_asm_elementwise(
            CODES_OF_INT4, "=h,=h,=h,=h,=h,=h,=h,=h,r", [words], dtype=(tl.float16,) * 8, is_pure=True, pack=1
        )
    elif not INTERPRETED:
        parts = tl.inline_asm_elementwise(
            CODES_OF_INT8 if KIND == INT8 else CODES_OF_FP8,
            "=h,=h,=h,=h,r", [words], dtype=(tl.float16,) * 4, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        a, b, c, d = _code(words, 0, KIND), _code(words, 1, KIND), _code(words, 2, KIND), _code(words, 3, KIND)
        parts = (a, b, c, d)
        if KIND == INT4:
            e, f, g, h = _code(words, 4, KIND), _code(words, 5, KIND), _code(words, 6, KIND), _code(words, 7, KIND)
            parts = (a, b, c, d, e, f, g, h)
    return _in_turn(parts)


@triton.jit
def _values(words, factor, KIND: tl.constexpr):
    """Codes of words, as in `_codes`, times scales `factor` [tokens, 1] in float32: bfloat16, each rounded once.

    INT8 and INT4, compiled alone: the codes become floats without the unit of conversions.
    """
    if KIND == INT4:
        parts = tl.inline_asm_elementwise(
            VALUES_OF_INT4, "=h,=h,=h,=h,=h,=h,=h,=h,r,f", [words, factor],
            dtype=(tl.bfloat16,) * 8, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        parts = tl.inline_asm_elementwise(
            VALUES_OF_INT8, "=h,=h,=h,=h,r,f", [words, factor], dtype=(tl.bfloat16,) * 4, is_pure=True, pack=1
        )
    return _in_turn(parts)


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
    """Places of the vectors of tokens in the pool, and of their scales; `place` is a token's in its block."""
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


@triton.constexpr_function
def in_words(kind, width, dim):
    """Whether the codes of every vector are whole words of 32 bits."""
    return width % 4 == 0 and dim % (8 if kind == INT4 else 4) == 0


@triton.jit
def _load_words(pool, rows, inside, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, KIND: tl.constexpr):
    """Words of 32 bits [tokens, BLOCK_DIM / 4], or BLOCK_DIM / 8 for INT4; zeros as in `load_vectors`."""
    A_WORD: tl.constexpr = 8 if KIND == INT4 else 4
    word = tl.arange(0, BLOCK_DIM // A_WORD)
    mask = inside[:, None] & (word < DIM // A_WORD)[None, :]
    words = pool.to(tl.pointer_type(tl.int32), bitcast=True) + (rows // 4)[:, None] + word[None, :]
    return tl.load(words, mask=mask, other=0)


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

    Codes become float16 without the unit of conversions between whole numbers and floats, which has a quarter of the
    others' rate, where vectors are whole words.
    """
    if KIND != FLOAT and in_words(KIND, WIDTH, DIM):
        values = _codes(_load_words(pool, rows, inside, DIM, BLOCK_DIM, KIND), KIND)
    else:
        values = _load_singly(pool, rows, inside, DIM, BLOCK_DIM, KIND)
    return values.to(operand_type(KIND, DTYPE))


@triton.jit
def kept_apart(values, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """The same values, as one operand: Triton does not look through instructions that may have effects.

    Else it moves the conversion of codes to where an operand is read from registers, and every warp that shares the
    operand converts it again. It also chooses fragments of an operand by the narrowest load before it, half of that if
    tensors were joined; fragments for few bits take more instructions.
    """
    if KIND != FLOAT and DTYPE != tl.float32 and not INTERPRETED:  # noqa: SIM300
        values = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [values], dtype=values.dtype, is_pure=False, pack=2
        )
    return values


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
    IS_MADE_OF_WORDS: tl.constexpr = KIND != FLOAT and KIND != FP8 and in_words(KIND, WIDTH, DIM) and not INTERPRETED
    if KIND == FLOAT:
        values = load_codes(pool, rows, inside, WIDTH, DIM, BLOCK_DIM, KIND, DTYPE)
    else:
        factor = tl.load(scales + scale_rows, mask=inside, other=0.0)
        if DTYPE == tl.float16:  # noqa: SIM300
            # Rounds as float32 would, in which it is exact.
            values = load_codes(pool, rows, inside, WIDTH, DIM, BLOCK_DIM, KIND, DTYPE) * factor[:, None]
        elif DTYPE == tl.bfloat16 and IS_MADE_OF_WORDS:  # noqa: SIM300
            words = _load_words(pool, rows, inside, DIM, BLOCK_DIM, KIND)
            values = _values(words, factor.to(tl.float32)[:, None], KIND)
        else:
            values = _load_singly(pool, rows, inside, DIM, BLOCK_DIM, KIND).to(tl.float32)
            values = (values * factor.to(tl.float32)[:, None]).to(DTYPE)
    return kept_apart(values, KIND, DTYPE)


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
