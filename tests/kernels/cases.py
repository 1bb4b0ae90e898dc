"""One kernel over one shape in one precision, and its largest allowed error against numpy in float64.

What the tests assert and what benchmarks/programs/kernel_errors.py writes down are the same cases.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import triton.language as tl

from tests.kernels.reference import Float64Array

DOT_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16}
NAMES = {torch.float32: "float32", torch.float16: "float16"}
HALF_STEP = 2.0**-11  # of float16: the error of storing a result, relative to its largest value


@dataclass(frozen=True)
class Case:
    """`run` returns the kernel's and the float64 result; `limit` bounds their difference over the largest value."""

    kernel: str
    shape: str
    precision: str
    limit: float
    run: Callable[[], tuple[Float64Array, Float64Array]]

    def __str__(self) -> str:
        return f"{self.kernel}-{self.shape}-{self.precision}".replace(" ", "_")

    def errors(self) -> tuple[float, float]:
        """The largest absolute error, and the same over the largest expected magnitude."""
        found, wanted = self.run()
        assert found.shape == wanted.shape
        # A random problem may have no row with an adapter.
        absolute, largest = (float(np.abs(values).max(initial=0.0)) for values in (found - wanted, wanted))
        return absolute, absolute / max(largest, np.finfo(np.float64).tiny)


def power_of_two(number: int, least: int = 1) -> int:
    """The smallest power of two not below `number` and `least`."""
    return max(least, 1 << (number - 1).bit_length())


def random(rng: np.random.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Make normally distributed numbers."""
    return torch.from_numpy(rng.standard_normal(shape)).to(dtype)
