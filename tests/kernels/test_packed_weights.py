"""Kernels of packed weights over random shapes, and the instructions that make floats of 4-bit codes."""

import re
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import torch
import triton.language as tl
from numpy.typing import NDArray

from ingot.kernels import gluon
from ingot.kernels.matmul_int4 import matmul_int4
from tests.each_case import each_case
from tests.kernels.packed_cases import LIMITS, Packed, error
from tests.simulators.triton_interpreter import use_ordered_dots

CASES = 12  # of each kernel: `python -m tests.kernels.packed_cases` runs hundreds


@pytest.mark.parametrize("kernel", LIMITS)
@each_case("seed", range(CASES))
def test_a_random_case_is_as_close_to_float64_as_its_precision_allows(kernel: str, seed: int) -> None:
    assert error(kernel, seed) <= LIMITS[kernel]


def test_a_row_has_the_same_bits_alone_and_in_any_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    use_ordered_dots(monkeypatch)
    rng = np.random.default_rng(0)
    weight = Packed.random(rng, 4)
    n, columns = weight.values.shape
    x = torch.from_numpy(rng.standard_normal((19, columns))).to(torch.float16)

    def computed(rows: torch.Tensor, tile_rows: int, tile: int, warps: int) -> torch.Tensor:
        out = torch.full((len(rows), n), torch.nan)
        matmul_int4[(-(-len(rows) // tile_rows), -(-n // tile), 1)](
            *(rows, weight.codes, weight.scales, weight.zero_points, None, out),
            *(len(rows), columns, n, 1.0, 0.0),
            **{**weight.constants, "AHEAD": 1, "WARPS": warps},
            SPLITS=1,
            TILE_ROWS=tile_rows,
            TILE=tile,
            HAS_BIAS=False,
            HAS_SOFTCAP=False,
            DTYPE=tl.float16,
            FOLDS=False,
        )
        return out

    together = computed(x, 16, 64, 4)
    assert torch.equal(computed(x[18:], 8, 32, 2)[0], together[18])
    assert torch.equal(computed(x, 32, 32, 1), together)


Words = NDArray[np.uint32]


def run_ptx(text: str, words: Words, offsets: Words, dtype: type) -> list[Words]:
    """Compute the instructions of `unpack` in numpy; registers $4 and $5 are its operands."""
    registers = {"$4": words, "$5": offsets}

    def value(name: str) -> Words:
        return registers[name] if name in registers else np.full_like(words, int(name, 0))

    def fused(a: Words, b: Words, c: Words) -> Words:
        floats = [np.ascontiguousarray(one).view(dtype).astype(np.float64) for one in (a, b, c)]
        result: Words = (floats[0] * floats[1] + floats[2]).astype(dtype).view(np.uint32)
        return result

    operations: dict[str, Callable[..., Words]] = {
        "shr": lambda a, b: a >> b,
        "mov": lambda a: a,
        "lop3": lambda a, b, c, table: (a & b) | c,
        "fma": fused,
    }
    for name, target, rest in re.findall(r"(\w+)[.\w]* (\$?\w+), ([^;]+);", text.split("one;", 1)[1]):
        if name == "lop3":
            assert rest.endswith("0xea")  # the table of (a & b) | c
        registers[target] = operations[name](*(value(one.strip()) for one in rest.split(",")))
    return [registers[f"${place}"] for place in range(4)]


@pytest.mark.parametrize(
    ("text", "dtype", "base"),
    [(gluon.BF16_CODE.value, ml_dtypes.bfloat16, 128), (gluon.FP16_CODE.value, np.float16, 1024)],
)
def test_codes_become_floats_and_zero_points_are_subtracted_exactly(text: str, dtype: type, base: int) -> None:
    low, high, zero = np.meshgrid(np.arange(256), np.arange(256), np.arange(16), indexing="ij")
    halves = np.stack([low | high << 8, (low * 7 + high) % 65536], axis=-1).astype(np.uint16)  # two of a register
    offsets: NDArray[np.generic] = np.repeat((-base - zero).astype(dtype)[..., None], 2, axis=-1)
    words, packed_offsets = halves.view(np.uint32)[..., 0], offsets.view(np.uint32)[..., 0]
    for place, found in enumerate(run_ptx(text, words, packed_offsets, dtype)):
        expected = (halves >> (4 * place) & 15).astype(np.float64) - zero[..., None]
        np.testing.assert_array_equal(found[..., None].view(dtype).astype(np.float64), expected)
