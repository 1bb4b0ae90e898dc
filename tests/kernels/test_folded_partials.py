"""Split-K partials that one program adds have the bits of partials that the reader adds."""

from typing import Any

import numpy as np
import pytest
import torch

from ingot.kernels.elementwise import map_rows
from ingot.kernels.gated_activation import IDENTITY
from ingot.kernels.matmul import matmul
from ingot.kernels.matmul_nbits import matmul_nbits
from tests.kernels.cases import DOT_TYPES, random
from tests.kernels.reference import FLOAT, Float64Array, numpy64
from tests.kernels.row_cases import spans

ROWS, N, COLUMNS, SPLITS = 20, 48, 320, 3
SHAPE: dict[str, Any] = {"N": N, "COLUMNS": COLUMNS, "SPLITS": SPLITS, "HAS_BIAS": True, "HAS_SOFTCAP": False}


def plain(programs: int) -> torch.Tensor:
    """Partials [programs, rows, n] of a matmul of floats."""
    rng = np.random.default_rng(0)
    x, weight, bias = random(rng, ROWS, COLUMNS), random(rng, N, COLUMNS), random(rng, N)
    out, ones = torch.full((programs, ROWS, N), torch.nan), torch.ones(N)
    matmul[(2, programs)](
        *(x, weight, ones, ones, bias, out, ROWS, COLUMNS, N, 1.0, 0.0),
        **SHAPE,
        TILE_ROWS=32,
        TILE=32,
        TILE_COLUMNS=32,
        BAND=2,
        KIND=FLOAT,
        UPCAST=True,
        FOLDS=True,
    )
    return out


def packed(programs: int) -> torch.Tensor:
    """Partials [programs, rows, n] of a matmul with a 4-bit weight."""
    rng = np.random.default_rng(1)
    x, bias = random(rng, ROWS, COLUMNS), random(rng, N)
    codes = spans(rng.integers(0, 16, (N, COLUMNS), np.uint8), 4)
    scales = torch.from_numpy(rng.uniform(0.01, 0.1, (COLUMNS // 64, N)).astype(np.float16))
    out = torch.full((programs, ROWS, N), torch.nan)
    matmul_nbits[(1, 2, programs)](
        *(x, codes, scales, None, bias, out, ROWS, COLUMNS, N, 1.0, 0.0),
        **SHAPE,
        SPANS=-(-COLUMNS // 128),
        GROUP=64,
        GROUPS=COLUMNS // 64,
        TILE_ROWS=32,
        TILE=32,
        SPANS_AT_ONCE=1,
        BITS=4,
        HAS_ZERO_POINTS=False,
        SCALE_WEIGHTS=True,
        DTYPE=DOT_TYPES[torch.float32],
        FOLDS=True,
    )
    return out


def read(parts: torch.Tensor) -> Float64Array:
    """What the next kernel reads: the same kernel for partials and for their sum, whose stride is 0."""
    out = torch.full((ROWS, N), torch.nan)
    stride = ROWS * N if len(parts) > 1 else 0
    form: dict[str, Any] = {"BLOCK": 64, "PARTS": SPLITS, "KIND": IDENTITY.value, "HAS_SOFTCAP": False}
    map_rows[(ROWS, 1)](parts, None, out, 0, N, stride, N, 1.0, 0.0, COLUMNS=N, **form)
    return numpy64(out)


@pytest.mark.parametrize("compute", [plain, packed])
def test_the_sum_of_one_program_has_the_bits_of_the_readers_sum(compute: Any) -> None:
    np.testing.assert_array_equal(read(compute(1)), read(compute(SPLITS)))


@pytest.mark.parametrize("compute", [plain, packed])
def test_another_order_of_the_partials_has_other_bits(compute: Any) -> None:
    parts = compute(SPLITS)
    assert (read(parts.flip(0)) != read(parts)).any()
