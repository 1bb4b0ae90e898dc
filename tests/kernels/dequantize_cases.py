"""Dequantized weights of 4 and 8 bits, whole and in slices: columns of partial spans, groups of half a span."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from ingot.kernels.matmul_nbits import dequantize_nbits
from tests.kernels.cases import HALF_STEP, NAMES, Case
from tests.kernels.reference import Float64Array, numpy64
from tests.kernels.row_cases import spans

SHAPES = [  # bits, n, columns, group, symmetric, first, count
    (4, 20, 172, 32, False, 0, 20),
    (4, 20, 128, 128, True, 9, 11),
    (8, 9, 100, 64, False, 2, 5),
]
LIMITS = {torch.float32: 1e-6, torch.float16: HALF_STEP}


def _dequantized(
    bits: int, n: int, columns: int, group: int, symmetric: bool, first: int, count: int, dtype: torch.dtype
) -> tuple[Float64Array, Float64Array]:
    rng, groups = np.random.default_rng(n), -(-columns // group)
    codes = rng.integers(0, 1 << bits, (n, columns), np.uint8)
    zeros = (
        rng.integers(0, 1 << bits, (n, groups), np.uint8) if not symmetric else np.full((n, groups), 1 << (bits - 1))
    )
    scales = rng.uniform(0.01, 0.1, (n, groups)).astype(np.float16)
    group_of = np.arange(columns) // group
    wanted = (codes.astype(np.float64) - zeros[:, group_of]) * scales.astype(np.float64)[:, group_of]
    out = torch.full((count, columns), torch.nan, dtype=dtype)
    stored = None if symmetric else torch.from_numpy(zeros.T.copy())
    dequantize_nbits[(-(-count // 8), -(-columns * bits // 512))](
        *(spans(codes, bits), torch.from_numpy(scales.T.copy()), stored, out, first, count),
        N=n,
        SPANS=-(-columns * bits // 512),
        GROUP=group,
        GROUPS=groups,
        COLUMNS=columns,
        TILE=8,
        BITS=bits,
        HAS_ZERO_POINTS=not symmetric,
    )
    return numpy64(out), wanted[first : first + count]


def cases() -> Iterator[Case]:
    """Every shape in both precisions."""
    for shape in SHAPES:
        bits, n, columns, group, *_ = shape
        for dtype, limit in LIMITS.items():
            name = f"{n} x {columns} {bits} bits group {group}"
            yield Case("dequantize_nbits", name, NAMES[dtype], limit, partial(_dequantized, *shape, dtype))
