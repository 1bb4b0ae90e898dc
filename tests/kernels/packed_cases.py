"""Random matmuls with packed weights, dequantized weights and gathered rows, against numpy in float64.

    python -m tests.kernels.packed_cases --count 200     # of each kernel; prints the largest error of each

What a kernel must not use is poisoned: columns of x between rows, codes after the last column, results that no program
stores. Sizes are odd on purpose: of groups, columns, tiles that reach over the last row or weight.
"""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray

from ingot.kernels import matmul_int4, matmul_int4_wide
from ingot.kernels.gated_activation import SILU
from ingot.kernels.gather import gather_quantized_rows
from ingot.kernels.matmul_nbits import dequantize_nbits, matmul_nbits
from tests.kernels.cases import HALF_STEP
from tests.kernels.reference import Float64Array, numpy64
from tests.kernels.row_cases import spans
from tests.simulators import gluon_emulator

gluon_emulator.install(matmul_int4)
gluon_emulator.install(matmul_int4_wide)

LIMITS = {
    "matmul_int4": 1e-6,
    "matmul_int4_wide": 1e-6,
    "matmul_nbits": HALF_STEP * 1.01,
    "dequantize_nbits": HALF_STEP * 1.01,
    "gather_quantized_rows": 1e-6,
}
Outcome = tuple[Float64Array, Float64Array, Float64Array]  # found, expected, and the sum of magnitudes of its terms
GROUPS = (32, 64, 96, 128, 160, 192, 256, 384)


@dataclass(frozen=True)
class Packed:
    """A random packed weight [n, columns] as the kernels' arguments, and its values."""

    bits: int
    group: int
    codes: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor | None
    values: Float64Array

    @classmethod
    def random(
        cls,
        rng: np.random.Generator,
        bits: int,
        multiple: int = 1,
        most: int = 100,
        sizes: Sequence[int] = GROUPS,
    ) -> "Packed":
        """Fewer than `most` weights of up to 520 columns, some without zero points, with float16 or float32 scales.

        sizes    of groups
        """
        n, columns, group = int(rng.integers(1, most)), int(rng.integers(1, 520)), int(rng.choice(sizes))
        n = -(-n // multiple) * multiple
        if rng.integers(2):
            columns = -(-columns // 32) * 32
        return cls.of(rng, bits, n, columns, group)

    @classmethod
    def of(cls, rng: np.random.Generator, bits: int, n: int, columns: int, group: int) -> "Packed":
        """A weight of this form."""
        groups, of = -(-columns // group), np.arange(columns) // group
        codes = rng.integers(0, 1 << bits, (n, columns), np.uint8)
        zeros = rng.integers(0, 1 << bits, (n, groups), np.uint8)
        is_symmetric = bool(rng.integers(2))
        if is_symmetric:
            zeros[:] = 1 << (bits - 1)
        scales = rng.uniform(-0.1, 0.1, (n, groups)).astype(np.float16 if rng.integers(2) else np.float32)
        values = (codes.astype(np.float64) - zeros[:, of]) * scales.astype(np.float64)[:, of]
        stored = None if is_symmetric else torch.from_numpy(zeros.T.copy())
        return cls(bits, group, spans(codes, bits), torch.from_numpy(scales.T.copy()), stored, values)

    @property
    def constants(self) -> dict[str, int | bool]:
        """Constants of the kernels that read it."""
        n, columns = self.values.shape
        return {
            "N": n,
            "COLUMNS": columns,
            "SPANS": self.codes.shape[1] // 64,
            "GROUP": self.group,
            "GROUPS": self.scales.shape[0],
            "HAS_ZERO_POINTS": self.zero_points is not None,
        }


@dataclass(frozen=True)
class PackedMatmul:
    """Rows in float16 times a weight of 4 bits, by a kernel of that name.

    x    [rows, columns]
    """

    kernel: ClassVar[str]
    x: torch.Tensor
    weight: Packed

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The operands: memory that the kernel may load."""
        zero_points = self.weight.zero_points
        return [self.x, self.weight.codes, self.weight.scales, *([] if zero_points is None else [zero_points])]

    def multiplied(self, module: ModuleType, constants: Mapping[str, Any], rows: slice = slice(None)) -> torch.Tensor:
        """Multiply some rows by a module's kernel, and add the partials in order."""
        x, (n, columns) = self.x[rows], self.weight.values.shape
        programs = 1 if constants["FOLDS"] else int(constants["SPLITS"])
        out = torch.full((programs, len(x), n), torch.nan)
        grid = (-(-len(x) // constants["TILE_ROWS"]), -(-n // constants["TILE"]), programs)
        getattr(module, self.kernel)[grid](
            *(x, self.weight.codes, self.weight.scales, self.weight.zero_points, None, out),
            *(len(x), columns, n, 1.0, 0.0),
            **self.weight.constants,
            **constants,
            HAS_BIAS=False,
            HAS_SOFTCAP=False,
            DTYPE=tl.float16,
        )
        return out.sum(0) if programs > 1 else out[0]

    def check(self, found: torch.Tensor) -> None:
        """Compare a result of all rows with float64."""
        magnitude = np.abs(numpy64(self.x)) @ np.abs(self.weight.values.T)
        errors = np.abs(numpy64(found) - numpy64(self.x) @ self.weight.values.T) / magnitude
        assert errors.max() <= LIMITS[self.kernel]


def rows_of(rng: np.random.Generator, columns: int, most: int = 40) -> torch.Tensor:
    """Fewer than `most` rows of float16 with a stride of their own; what is between them is NaN."""
    rows, stride = int(rng.integers(1, most)), columns + int(rng.integers(0, 30))
    stored = torch.full((rows, stride), torch.nan, dtype=torch.float16)
    stored[:, :columns] = torch.from_numpy(rng.standard_normal((rows, columns)))
    return stored[:, :columns]


def matmul(rng: np.random.Generator, kernel: str, bits: int) -> Outcome:
    """Split or not, folded or not, with and without bias and softcap; the partials are added as their reader does.

    A third compute a gated activation. More spans than two are loaded ahead where n is a multiple of 16.
    """
    is_gated, is_wide, is_direct = not rng.integers(3), kernel == "matmul_int4_wide", kernel == "matmul_int4"
    multiple = 16 if is_gated or (is_direct and rng.integers(2)) else 1
    weight = Packed.random(rng, bits, multiple, *((600, (128, 256, 384)) if is_wide else ()))
    n, columns = weight.values.shape
    x, bias = rows_of(rng, columns, 150 if is_wide else 40), torch.from_numpy(rng.standard_normal(n)).to(torch.float16)
    has_bias, folds = bool(rng.integers(2)), bool(rng.integers(2))
    splits = 1 if is_gated else int(rng.integers(1, weight.codes.shape[1] // 64 + 1))
    alpha, softcap = (1.0, 0.0) if splits > 1 else (0.5, 0.0 if is_gated else float(rng.choice([0.0, 8.0])))
    programs = 1 if folds and rng.integers(2) else splits
    tile_rows, tile = int(rng.choice([8, 16, 32] if is_direct else [16, 32])), int(rng.choice([32, 64]))
    own: dict[str, object] = {"AHEAD": int(rng.integers(1, 3 if n % 16 else 6)), "WARPS": 2}
    if is_wide:
        tile_rows, tile, own = int(rng.choice([16, 32, 64])), 256, {"STAGES": int(rng.integers(1, 6))}
    elif not is_direct:
        own = {"BITS": bits, "SPANS_AT_ONCE": 1, "SCALE_WEIGHTS": bool(rng.integers(2))}
    width = n // 2 if is_gated else n
    out = torch.full((programs, len(x), width), torch.nan)
    function = matmul_int4.matmul_int4 if is_direct else matmul_nbits
    function = matmul_int4_wide.matmul_int4_wide if is_wide else function
    function[(-(-len(x) // tile_rows), -(-n // tile), programs)](
        *(x, weight.codes, weight.scales, weight.zero_points, bias, out),
        *(len(x), x.stride(0), width, alpha, softcap),
        **{**weight.constants, **own},
        SPLITS=splits,
        TILE_ROWS=tile_rows,
        TILE=tile,
        HAS_BIAS=has_bias,
        HAS_SOFTCAP=softcap > 0,
        DTYPE=tl.float16,
        FOLDS=folds,
        **({"GATE": SILU.value} if is_gated else {}),
    )
    added = numpy64(bias) if has_bias else np.zeros(n)
    expected = numpy64(x) @ weight.values.T * alpha + added
    magnitude = np.abs(numpy64(x)) @ np.abs(weight.values.T) * alpha + np.abs(added) + softcap
    found = numpy64(out.sum(0))
    if not is_gated:
        return found, softcap * np.tanh(expected / softcap) if softcap else expected, magnitude
    gate, up = halves(expected)
    terms = halves(magnitude)  # a SiLU's slope is at most 1.1
    return found, silu(gate) * up, 1.1 * terms[0] * np.abs(up) + np.abs(gate) * terms[1]


def halves(interleaved: Float64Array) -> tuple[Float64Array, Float64Array]:
    """Gates and ups [rows, n / 2], of which 8 follow each other in turn."""
    both = interleaved.reshape(len(interleaved), -1, 2, 8)
    return both[:, :, 0].reshape(len(interleaved), -1), both[:, :, 1].reshape(len(interleaved), -1)


def silu(x: Float64Array) -> Float64Array:
    """x * sigmoid(x)."""
    return x / (1.0 + np.exp(-x))


def dequantized(rng: np.random.Generator, bits: int) -> Outcome:
    """A slice of a weight in float16."""
    weight = Packed.random(rng, bits)
    n, columns = weight.values.shape
    first = int(rng.integers(n))
    out = torch.full((n - first, columns), torch.nan, dtype=torch.float16)
    dequantize_nbits[(-(-(n - first) // 32), weight.codes.shape[1] // 64)](
        *(weight.codes, weight.scales, weight.zero_points, out, first, n - first),
        **weight.constants,
        TILE=32,
        BITS=bits,
    )
    return numpy64(out), weight.values[first:], np.abs(weight.values[first:])


def gathered(rng: np.random.Generator, bits: int) -> Outcome:
    """Rows of a table, some of them padding."""
    weight = Packed.random(rng, bits)
    n, columns = weight.values.shape
    indices = rng.integers(-1, n, 5)
    out = torch.full((5, columns), torch.nan)
    constants = {key: value for key, value in weight.constants.items() if key not in ("N", "GROUPS")}
    gather_quantized_rows[(5, -(-columns // 64))](
        *(torch.from_numpy(indices), None, None),
        *(weight.codes, weight.scales, weight.zero_points, out, columns, 2.0),
        **constants,
        TABLE_ROWS=n,
        BLOCK=64,
        BITS=bits,
    )
    expected = np.where(indices[:, None] >= 0, 2 * weight.values[indices], 0.0)
    return numpy64(out), expected, np.abs(expected)


RUNS: Mapping[str, Callable[[np.random.Generator, int], Outcome]] = {
    "matmul_int4": lambda rng, bits: matmul(rng, "matmul_int4", 4),
    "matmul_int4_wide": lambda rng, bits: matmul(rng, "matmul_int4_wide", 4),
    "matmul_nbits": lambda rng, bits: matmul(rng, "matmul_nbits", bits),
    "dequantize_nbits": dequantized,
    "gather_quantized_rows": gathered,
}


_SMALL = 2.0**-13  # float16 has fewer bits below


def error(kernel: str, seed: int) -> float:
    """The largest error of one random case over its terms' magnitudes; infinite where something is not finite."""
    gluon_emulator.seed(seed)
    rng = np.random.default_rng([seed, *kernel.encode()])
    found, expected, magnitude = RUNS[kernel](rng, 4 if seed % 3 else 8)
    assert found.shape == expected.shape
    errors: NDArray[np.float64] = np.abs(found - expected) / np.maximum(magnitude, _SMALL)
    return float(errors.max()) if np.isfinite(found).all() else float("inf")


def main() -> None:
    """Run all kernels over `count` random cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    count = parser.parse_args().count
    for kernel, limit in LIMITS.items():
        errors = [error(kernel, seed) for seed in range(count)]
        worst = int(np.argmax(errors))
        print(f"{kernel}: {count} cases, largest error {errors[worst]:.2e} of {limit:.2e} (seed {worst})")
        assert errors[worst] <= limit


if __name__ == "__main__":
    main()
