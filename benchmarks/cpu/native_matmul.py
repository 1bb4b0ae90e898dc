"""Speed of the native engine's matmul kernels: one thread, each form and instruction set, 1 to 512 rows.

GB/s are of the packed weights, GOPS 2 n k rows operations; best of all calls, rounds interleaved: a busy machine makes
a call slower, never faster. Matrices of 128 MiB are read in turn, which no cache holds, as in a step of a model.
Weights are arbitrary bytes; only speed is measured.

    python -m benchmarks.cpu.native_matmul --sets avx512-vnni,avx2 --forms int4,int8,float16
"""

import json
import time
from ctypes import POINTER
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, get_args

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.device import device_facts
from ingot.artifact.programs.operation_row import LANES, Form, Matrix
from ingot.runtime.cpu.native.kernels import Kernels, RoundedRows, aligned, find_kernels
from ingot.runtime.cpu.native.program import instruction_sets
from ingot.runtime.cpu.native.structures import LinearOperation, MatrixAt, ViewAt
from ingot.sizes import round_up

FORMS: tuple[Form, ...] = get_args(Form)
UNCACHED_BYTES = 128 << 20
_ROUND_BLOCK = 1  # launch.h's enum rounding


@cache
def weights(num_bytes: int) -> NDArray[np.uint8]:
    """Bytes that are small normal numbers in every form and as scales; cases share them."""
    memory = aligned((num_bytes,), np.uint8)
    memory[:] = 0x3C
    return memory


@dataclass
class Case:
    """Matrices of one form, multiplied in turn with the same rows."""

    kernels: Kernels
    matrix: Matrix
    num_rows: int
    best_seconds: float = float("inf")
    _linears: list[LinearOperation] = field(init=False, repr=False)
    _held: tuple[Any, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        m, size = self.matrix, self.weight_bytes
        copies = max(1, UNCACHED_BYTES // size)
        tiles, output = weights(max(size, UNCACHED_BYTES)), aligned((self.num_rows, round_up(m.n, LANES)), np.float32)
        matrices = [
            MatrixAt(
                tiles.ctypes.data + i * size, m.tile_bytes, m.codes_offset, m.n, m.k, m.padded_k, FORMS.index(m.form),
                m.block, m.scale_blocks, m.scale_bytes, m.has_zeros,
            )
            for i in range(copies)
        ]  # fmt: skip
        out = ViewAt(output.ctypes.data, output.shape[1])
        rounding = _ROUND_BLOCK if m.is_integer else 0
        self._linears = [
            LinearOperation(matrix=POINTER(MatrixAt)(at), output=out, rounding=rounding, alpha=1.0) for at in matrices
        ]
        x = np.random.default_rng(0).standard_normal((self.num_rows, m.k), dtype=np.float32)
        self._rows = RoundedRows(self.kernels, self._linears[0], x)
        self._held = (tiles, output, matrices)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed matrix."""
        return self.matrix.num_bytes

    def run(self, seconds: float) -> None:
        """Multiply for some time, at least once, and keep the best time of a matmul."""
        end = time.perf_counter() + seconds
        while True:
            begin = time.perf_counter()
            for linear in self._linears:
                self._rows.multiply(self.kernels, linear, 0, self.matrix.num_tiles)
            now = time.perf_counter()
            self.best_seconds = min(self.best_seconds, (now - begin) / len(self._linears))
            if now > end:
                return

    @property
    def record(self) -> dict[str, object]:
        """Figures."""
        operations = 2 * self.matrix.n * self.matrix.k * self.num_rows
        return {
            "set": self.kernels.name.decode(),
            "form": self.matrix.form,
            "rows": self.num_rows,
            "gigabytes_per_second": round(self.weight_bytes / self.best_seconds / 1e9, 2),
            "gigaoperations_per_second": round(operations / self.best_seconds / 1e9, 1),
        }


def matrix_of(form: Form, n: int, k: int, block: int, zeros: bool) -> Matrix:
    """A matrix with float16 scales per block if it has codes."""
    if form.startswith("int"):
        return Matrix(n=n, k=k, form=form, block=block, scale_bytes=2, has_zeros=zeros)
    return Matrix(n=n, k=k, form=form, per_row=form == "float8", scale_bytes=4 if form == "float8" else 0)


def _print_table(cases: list[Case]) -> None:
    by_line: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        by_line.setdefault((case.kernels.name.decode(), case.matrix.form), []).append(case)
    for (name, form), line in by_line.items():
        figures = (
            f"{c.num_rows}: {c.record['gigabytes_per_second']} GB/s, {c.record['gigaoperations_per_second']} GOPS"
            for c in line
        )
        click.echo(f"{name:12} {form:9} {'   '.join(figures)}")


@click.command(help=__doc__.partition("\n")[0])
@click.option("--sets", default="", help="Instruction sets, comma-separated; all of this CPU by default.")
@click.option("--forms", default=",".join(FORMS), show_default=True)
@click.option("--rows", default="1,8,512", show_default=True)
@click.option("-n", "columns", default=2048, show_default=True, help="Output columns.")
@click.option("-k", default=2048, show_default=True, help="Input columns.")
@click.option("--block", default=32, show_default=True, help="Columns that share a scale.")
@click.option("--zeros", is_flag=True, help="Zero points per block.")
@click.option("--seconds", default=0.1, show_default=True, help="Of a case in a round.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="JSON file of the figures.")
def main(
    sets: str, forms: str, rows: str, columns: int, k: int, block: int, zeros: bool, seconds: float, rounds: int,
    output: Path | None,
) -> None:  # fmt: skip
    """Time all cases."""
    names = sets.split(",") if sets else instruction_sets()
    cases = [
        Case(find_kernels(name), matrix_of(form, columns, k, block, zeros), int(count))
        for name in names
        for form in FORMS
        if form in forms.split(",")
        for count in rows.split(",")
    ]
    for _ in range(rounds):
        for case in cases:
            case.run(seconds)
    _print_table(cases)
    if output is not None:
        facts = {"device": device_facts(), "n": columns, "k": k, "block": block, "zeros": zeros}
        output.write_text(json.dumps(facts | {"results": [case.record for case in cases]}, indent=2) + "\n")


if __name__ == "__main__":
    main()
