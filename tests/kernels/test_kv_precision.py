"""Codes of the KV pool as floats: the instructions that make them, and queries that multiply them."""

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from ingot.kernels.kv_precision import (
    CODES_OF_FP8,
    CODES_OF_INT4,
    CODES_OF_INT8,
    FP8,
    INT4,
    INT8,
    VALUES_OF_INT4,
    VALUES_OF_INT8,
    load_codes,
    query_of_codes,
)

Words = NDArray[np.uint32]
WORDS = np.random.default_rng(0).integers(0, 1 << 32, 4096, dtype=np.uint32)
WORDS[:256] = np.arange(256, dtype=np.uint32) * 0x01010101


def run_ptx(text: str, words: Words, outputs: int, scales: NDArray[np.float32] | None = None) -> NDArray[np.uint16]:
    """Compute the inline instructions in numpy: 16 bits of registers $0, $1, ... for words in the next one, and scales
    in the one after it."""
    registers = {f"${outputs}": words}
    if scales is not None:
        registers[f"${outputs + 1}"] = scales.view(np.uint32)

    def value(name: str) -> Words:
        return registers[name] if name in registers else np.full_like(words, int(re.sub("^0f", "0x", name), 0))

    def floats(name: str) -> NDArray[np.float64]:
        return value(name).view(np.float32).astype(np.float64)

    def halves(name: str) -> NDArray[np.float16]:
        return np.ascontiguousarray(value(name))[:, None].view(np.float16)

    for name, target, rest in re.findall(
        r"(mov|xor|shr|shl|prmt|lop3|add|mul|fma|cvt)\.[\w.]* (\{[^}]*\}|\$?\w+), ([^;]+);", text
    ):
        given = [one.strip() for one in rest.split(",")]
        if target.startswith("{"):
            low, high = target.strip("{}").split(", ")
            registers |= {low: value(given[0]) & 0xFFFF, high: value(given[0]) >> 16}
            continue
        if name == "prmt":
            eight = value(given[0]).astype(np.uint64) | value(given[1]).astype(np.uint64) << 32
            picks = [int(given[2], 0) >> 4 * place & 15 for place in range(4)]
            assert max(picks) < 8
            bytes_ = [(eight >> 8 * pick & 255) << 8 * place for place, pick in enumerate(picks)]
            made = np.sum(bytes_, axis=0).astype(np.uint32)
        elif name == "lop3":
            assert given[3] == "0x6a"  # the table of (a & b) ^ c
            made = value(given[0]) & value(given[1]) ^ value(given[2])
        elif name == "add":
            made = (halves(given[0]) + halves(given[1])).view(np.uint32)[:, 0]
        elif name in ("mul", "fma"):
            exact = floats(given[0]) * floats(given[1])  # in 64 bits, as is the sum
            made = (exact + (floats(given[2]) if name == "fma" else 0.0)).astype(np.float32).view(np.uint32)
        elif name == "cvt" and len(given) == 2:
            pair = np.stack([floats(given[1]), floats(given[0])], 1).astype(np.float32).astype(ml_dtypes.bfloat16)
            made = np.ascontiguousarray(pair).view(np.uint32)[:, 0]
        elif name == "cvt":
            pair = np.ascontiguousarray(value(given[0]).astype(np.uint16))[:, None].view(ml_dtypes.float8_e4m3fn)
            made = np.ascontiguousarray(pair.astype(np.float16)).view(np.uint32)[:, 0]
        else:
            compute: dict[str, Any] = {
                "mov": np.positive,
                "xor": np.bitwise_xor,
                "shr": np.right_shift,
                "shl": np.left_shift,
            }
            made = compute[name](*map(value, given))
        registers[target] = made
    return np.stack([registers[f"${place}"] for place in range(outputs)], 1).astype(np.uint16)


def expected(kind: int) -> NDArray[np.float16]:
    """The codes of WORDS, lowest bits first."""
    bytes_ = WORDS[:, None].view(np.uint8)
    if kind == INT8.value:
        return bytes_.view(np.int8).astype(np.float16)
    if kind == FP8.value:
        return np.asarray(bytes_.view(ml_dtypes.float8_e4m3fn), np.float16)
    nibbles = np.stack([bytes_ & 15, bytes_ >> 4], -1).reshape(len(WORDS), 8).astype(np.int8)
    return ((nibbles ^ 8) - 8).astype(np.float16)


@pytest.mark.parametrize(("kind", "text"), [(INT8, CODES_OF_INT8), (FP8, CODES_OF_FP8), (INT4, CODES_OF_INT4)])
def test_instructions_make_every_code_exactly(kind: tl.constexpr, text: tl.constexpr) -> None:
    wanted = expected(kind.value)
    np.testing.assert_array_equal(run_ptx(text.value, WORDS, wanted.shape[1]).view(np.float16), wanted)


@pytest.mark.parametrize(("kind", "text"), [(INT8, VALUES_OF_INT8), (INT4, VALUES_OF_INT4)])
def test_values_in_bfloat16_are_codes_times_scales_rounded_once(kind: tl.constexpr, text: tl.constexpr) -> None:
    bits = np.random.default_rng(1).integers(1, 0x7C00, len(WORDS), dtype=np.uint16)  # every finite scale above zero
    bits[:2] = 1, 0x7BFF
    scales = bits.view(np.float16).astype(np.float32)
    codes = expected(kind.value).astype(np.float32)
    wanted = (codes * scales[:, None]).astype(ml_dtypes.bfloat16)  # exact in float32, before that
    found = run_ptx(text.value, WORDS, codes.shape[1], scales).view(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(found.astype(np.float32), wanted.astype(np.float32))


@triton.jit
def _load(pool, out, width: tl.constexpr, dim: tl.constexpr, kind: tl.constexpr):
    at, token = tl.arange(0, 16), tl.arange(0, 4)
    codes = load_codes(pool, token.to(tl.int64) * width, token < 3, width, dim, 16, kind, tl.float16)
    tl.store(out + token[:, None] * 16 + at[None, :], codes)


@pytest.mark.parametrize("kind", [INT8, INT4])
@pytest.mark.parametrize("dim", [16, 12, 8, 10, 6])  # whole words, and not
def test_words_hold_the_codes_of_single_loads(kind: tl.constexpr, dim: int) -> None:
    width = dim // 2 if kind.value == INT4.value else dim
    raw = np.random.default_rng(dim).integers(0, 256, (4, width), dtype=np.uint8)
    out = torch.full((4, 16), torch.nan, dtype=torch.float16)
    pool = torch.from_numpy(raw if kind.value == INT4.value else raw.view(np.int8))
    _load[(1,)](pool, out, width, dim, kind)
    codes = np.stack([raw & 15, raw >> 4], -1).reshape(4, -1).astype(np.int8) if width < dim else raw.view(np.int8)
    wanted = np.zeros((4, 16))
    wanted[:3, :dim] = ((codes ^ 8) - 8 if width < dim else codes)[:3]
    np.testing.assert_array_equal(out.numpy(), wanted)


@triton.jit
def _divide(query, out, units):
    at, row = tl.arange(0, 16), tl.arange(0, 4)
    place = row[:, None] * 16 + at[None, :]
    made, unit = query_of_codes(tl.load(query + place), 2, tl.bfloat16)
    tl.store(out + place, made)
    tl.store(units + row[:, None], unit)


def test_a_wide_query_is_a_power_of_two_times_one_in_float16() -> None:
    query = torch.from_numpy(np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)).bfloat16().float()
    query *= torch.tensor([1.0, 2.0**100, 2.0**-100, 0.0])[:, None]
    out, units = torch.full((4, 16), torch.nan, dtype=torch.float16), torch.full((4, 1), torch.nan)
    _divide[(1,)](query, out, units)
    assert torch.equal(out.float() * units, query)
    assert out.abs().max() < 2
