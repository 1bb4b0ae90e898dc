"""One kernel over one shape in one precision, and how far it may be from numpy in float64.

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
HALF_STEP = 2.0**-11  # of float16: what storing a result costs, relative to its largest


@dataclass(frozen=True)
class Case:
    """`run` gives what the kernel found and what float64 says; `limit` bounds their distance over the largest value."""

    kernel: str
    shape: str
    precision: str
    limit: float
    run: Callable[[], tuple[Float64Array, Float64Array]]

    def __str__(self) -> str:
        return f"{self.kernel}-{self.shape}-{self.precision}".replace(" ", "_")

    def errors(self) -> tuple[float, float]:
        """The largest absolute error, and over the largest magnitude of what is expected."""
        found, wanted = self.run()
        assert found.shape == wanted.shape
        absolute = float(np.abs(found - wanted).max())
        return absolute, absolute / max(float(np.abs(wanted).max()), np.finfo(np.float64).tiny)


def power_of_two(number: int, least: int = 1) -> int:
    """The smallest that is not below either."""
    return max(least, 1 << (number - 1).bit_length())


def random(rng: np.random.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers."""
    return torch.from_numpy(rng.standard_normal(shape)).to(dtype)
