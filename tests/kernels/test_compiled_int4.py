"""The compiled matmul of 4-bit weights, run instruction by instruction: what layouts and inline PTX make of its source.

The interpreter runs the source without layouts. Here the compiler's PTX for SM 80 reads the real packed codes, 128 bits
at a time, and its multiplications get the fragments that the PTX ISA defines.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest

from ingot.artifact.programs.launch_program import Constant, Kernel
from ingot.kernels.gated_activation import IDENTITY
from ingot.pipeline.targets.cuda.kernel_signatures import make_kernel
from tests.data_paths import ROOT
from tests.kernels.packed_cases import halves
from tests.kernels.row_cases import spans
from tests.simulators.ptx import Memory, run_grid

COMPILED = """
import json, sys
from ingot.artifact.programs.launch_program import Kernel
from ingot.pipeline.targets.cuda.cubins import compile_by_triton
for line in sys.stdin:
    print(json.dumps(compile_by_triton(Kernel.model_validate_json(line), 80).asm["ptx"]))
"""
TYPES = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}


@dataclass(frozen=True)
class Form:
    """A matmul and its tile; all have one odd size at least."""

    dtype: str
    rows: int
    n: int
    columns: int
    group: int
    splits: int
    tile_rows: int
    tile: int
    warps: int
    ahead: int
    symmetric: bool
    is_gated: bool = False

    @property
    def kernel(self) -> Kernel:
        """The kernel to compile: logits and partials are float32, other results have the activations' type."""
        constants: dict[str, Constant] = {
            "N": self.n,
            "COLUMNS": self.columns,
            "SPANS": -(-self.columns // 128),
            "GROUP": self.group,
            "GROUPS": -(-self.columns // self.group),
            "SPLITS": self.splits,
            "TILE_ROWS": self.tile_rows,
            "TILE": self.tile,
            "AHEAD": self.ahead,
            "WARPS": self.warps,
            "HAS_ZERO_POINTS": not self.symmetric,
            "HAS_BIAS": True,
            "HAS_SOFTCAP": False,
            "DTYPE": self.dtype,
            "FOLDS": self.splits > 1,
            **({"GATE": IDENTITY.value} if self.is_gated else {}),
        }
        types = {"T": self.dtype, "S": "fp16", "OUT": "fp32"}
        aligned = frozenset({"x_stride"} if self.columns % 16 == 0 else ())
        return make_kernel("matmul_int4", types, constants, aligned, num_warps=self.warps)


FORMS = [
    Form("bf16", 5, 100, 256, 128, 1, 8, 64, 4, 2, symmetric=False),
    Form("fp16", 19, 40, 384, 64, 3, 16, 32, 2, 1, symmetric=False),
    Form("bf16", 9, 33, 300, 32, 1, 8, 64, 2, 2, symmetric=True),
    Form("bf16", 13, 80, 256, 64, 1, 16, 64, 2, 2, symmetric=False, is_gated=True),
    Form("bf16", 3, 40, 900, 128, 1, 8, 64, 4, 2, symmetric=False),
]


@pytest.fixture(scope="module")
def compiled() -> dict[Form, str]:
    """PTX of every form, compiled where Triton does not interpret."""
    pytest.importorskip("triton", reason="kernels are compiled by Triton: pip install --group oracle")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    lines = "".join(f"{form.kernel.model_dump_json()}\n" for form in FORMS)
    command = [sys.executable, "-c", COMPILED]
    done = subprocess.run(command, cwd=ROOT, env=environment, input=lines, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(zip(FORMS, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_instructions_compute_the_matmul(form: Form, compiled: dict[Form, str]) -> None:
    rng, groups, dtype = np.random.default_rng(form.rows), -(-form.columns // form.group), TYPES[form.dtype]
    codes = rng.integers(0, 16, (form.n, form.columns), np.uint8)
    zeros = (
        np.full((form.n, groups), 8, np.uint8) if form.symmetric else rng.integers(0, 16, (form.n, groups), np.uint8)
    )
    scales = rng.uniform(0.01, 0.1, (form.n, groups)).astype(np.float16)
    x = rng.standard_normal((form.rows, form.columns)).astype(dtype)
    width = form.n // 2 if form.is_gated else form.n
    bias, out = rng.standard_normal(form.n).astype(dtype), np.full((form.splits, form.rows, width), np.nan, np.float32)
    memory = Memory()
    operands = (x, spans(codes, 4).numpy(), scales.T.copy(), zeros.T.copy(), bias, out)
    addresses = [memory.add(array) for array in operands]
    numbers: list[int | np.float32] = [form.rows, form.columns, width, np.float32(1.0), np.float32(0.0), 0, 0]
    grid = (-(-form.rows // form.tile_rows), -(-form.n // form.tile), form.splits)
    run_grid(compiled[form], memory, [*addresses, *numbers], grid, 32 * form.warps)
    of = np.arange(form.columns) // form.group
    weight = (codes.astype(np.float64) - zeros[:, of]) * scales.astype(np.float64)[:, of]
    expected = x.astype(np.float64) @ weight.T + bias.astype(np.float64)
    magnitude = np.abs(x.astype(np.float64)) @ np.abs(weight.T)
    if form.is_gated:
        (gate, up), terms = halves(expected), halves(magnitude)
        expected, magnitude = gate * up, terms[0] * np.abs(up) + np.abs(gate) * terms[1]
    assert (np.abs(out.astype(np.float64).sum(0) - expected) / magnitude).max() <= 1e-6
