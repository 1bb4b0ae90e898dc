"""Products in the interpreter against float64: shapes that divide by nothing, groups, zero points, splits."""

import numpy as np
import pytest
import torch
import triton.language as tl
from numpy.typing import NDArray

from ingot.kernels.matmul import matmul, quantize_rows
from ingot.kernels.matmul_nbits import add_splits, matmul_nbits
from tests.kernels.reference import FLOAT, FP8, INT8, numpy64

SPAN = 64


def packed_spans(codes: NDArray[np.uint8]) -> torch.Tensor:
    """Codes [N, whole spans] as matmul_nbits reads 4-bit ones."""
    halves = codes.reshape(len(codes), -1, 2, SPAN // 2)
    return torch.from_numpy((halves[:, :, 0] | halves[:, :, 1] << np.uint8(4)).reshape(len(codes), -1))


@pytest.mark.parametrize("scale_weights", [False, True])
@pytest.mark.parametrize(
    ("bits", "rows", "n", "columns", "group", "splits", "symmetric"),
    [
        (4, 1, 48, 256, 128, 1, True),
        (4, 1, 40, 320, 64, 3, False),
        (4, 5, 33, 172, 32, 1, False),
        (4, 17, 96, 192, 32, 2, True),
        (4, 64, 32, 128, 128, 1, False),
        (8, 3, 40, 172, 32, 2, True),
        (8, 1, 33, 128, 128, 1, False),
    ],
)
def test_the_product_is_that_of_the_dequantized_weight(
    bits: int, rows: int, n: int, columns: int, group: int, splits: int, symmetric: bool, scale_weights: bool
) -> None:
    rng = np.random.default_rng(rows)
    spans, groups = -(-columns // SPAN), -(-columns // group)
    levels = 1 << bits
    codes = rng.integers(0, levels, (n, spans * SPAN), np.uint8)
    scales = rng.uniform(0.01, 0.1, (n, groups)).astype(np.float16)
    zeros = rng.integers(0, levels, (n, groups), np.uint8)
    if symmetric:
        zeros[:] = levels // 2
    x = torch.from_numpy(rng.standard_normal((rows, columns)).astype(np.float32))
    bias = torch.from_numpy(rng.standard_normal(n).astype(np.float32))
    group_of = np.arange(columns) // group
    weight = (codes[:, :columns].astype(np.float64) - zeros[:, group_of]) * scales.astype(np.float64)[:, group_of]
    out = torch.full((rows, n), torch.nan)
    parts = torch.full((splits, rows, n), torch.nan) if splits > 1 else out
    tile, tile_rows = 32, 16
    matmul_nbits[(-(-n // tile), -(-rows // tile_rows), splits)](
        *(
            x,
            packed_spans(codes) if bits == 4 else torch.from_numpy(codes),
            torch.from_numpy(scales),
            None if symmetric else torch.from_numpy(zeros),
        ),
        *(bias, parts, rows, columns, n),
        N=n,
        COLUMNS=columns,
        SPANS=spans,
        GROUP=group,
        GROUPS=groups,
        SPLITS=splits,
        TILE_ROWS=tile_rows,
        TILE=tile,
        BITS=bits,
        HAS_ZERO_POINTS=not symmetric,
        HAS_BIAS=True,
        SCALE_WEIGHTS=scale_weights,
        DTYPE=tl.float32,
    )
    if splits > 1:
        add_splits[(rows, -(-n // 64))](parts, bias, out, rows, n, N=n, SPLITS=splits, BLOCK=64, HAS_BIAS=True)
    wanted = numpy64(x) @ weight.T + numpy64(bias)
    assert np.abs(numpy64(out) - wanted).max() <= 3e-6 * np.abs(wanted).max()


@pytest.mark.parametrize("kind", [FLOAT, FP8, INT8])
@pytest.mark.parametrize(("rows", "n", "columns"), [(1, 40, 100), (33, 70, 64), (70, 17, 172)])
def test_products_of_16_and_8_bits(kind: int, rows: int, n: int, columns: int) -> None:
    rng = np.random.default_rng(kind)
    x = torch.from_numpy(rng.standard_normal((rows, columns)).astype(np.float32))
    w = torch.from_numpy(rng.standard_normal((n, columns)).astype(np.float32))
    bias = torch.from_numpy(rng.standard_normal(n).astype(np.float32))
    (left, left_scale), (right, right_scale) = quantized(x, kind), quantized(w, kind)
    exact = [numpy64(codes) * numpy64(scale)[:, None] for codes, scale in ((left, left_scale), (right, right_scale))]
    out = torch.full((rows, n), torch.nan)
    tile_rows = tile = 32
    matmul[(-(-n // tile) * -(-rows // tile_rows),)](
        *(left, right, left_scale, right_scale, bias, out, rows, columns, n),
        N=n,
        COLUMNS=columns,
        TILE_ROWS=tile_rows,
        TILE=tile,
        TILE_COLUMNS=32,
        BAND=2,
        KIND=kind,
        HAS_BIAS=True,
        UPCAST=True,
    )
    wanted = exact[0] @ exact[1].T + numpy64(bias)
    assert np.abs(numpy64(out) - wanted).max() <= 3e-6 * np.abs(wanted).max()


def quantized(x: torch.Tensor, kind: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of rows, by the kernel; the rows themselves and ones for FLOAT."""
    if kind == FLOAT:
        return x.to(torch.float16), torch.ones(len(x))
    codes = torch.zeros(x.shape, dtype=torch.float8_e4m3fn if kind == FP8 else torch.int8)
    scales = torch.zeros(len(x))
    columns = x.shape[1]
    block = 1 << (columns - 1).bit_length()
    quantize_rows[(len(x),)](x, codes, scales, columns, COLUMNS=columns, BLOCK=block, KIND=kind)
    return codes, scales


@pytest.mark.parametrize("kind", [FP8, INT8])
def test_rows_are_quantized_to_the_nearest_code(kind: int) -> None:
    rng = np.random.default_rng(4)
    x = torch.from_numpy((rng.standard_normal((6, 100)) * np.logspace(-6, 3, 6)[:, None]).astype(np.float32))
    x[2] = 0
    codes, scales = quantized(x, kind)
    if kind == FP8:
        nearest = (x / scales[:, None]).to(torch.float8_e4m3fn)
    else:
        nearest = torch.round(x / scales[:, None]).to(torch.int8)
    assert torch.equal(codes.to(torch.float32), nearest.to(torch.float32))
    assert scales[2] == 1
