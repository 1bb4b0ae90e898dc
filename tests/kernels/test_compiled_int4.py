"""The compiled matmul of 4-bit weights, run instruction by instruction: what layouts and inline PTX make of its source.

The interpreter runs the source without layouts. Here the compiler's PTX for SM 80 reads the real packed codes, 128 bits
at a time, and its multiplications get the fragments that the PTX ISA defines. Where codes are copied to shared memory,
the barriers are the compiler's: the simulator finds out whether they are enough.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
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
    compiled = compile_by_triton(Kernel.model_validate_json(line), 80)
    print(json.dumps({"ptx": compiled.asm["ptx"], "shared_bytes": compiled.metadata.shared}))
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
    is_folded: bool = False
    """Whether one program sums all splits, which otherwise have one each."""

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


@dataclass(frozen=True)
class Compiled:
    """A form's instructions, and the size of a block's shared memory."""

    ptx: str
    shared_bytes: int


FORMS = [
    Form("bf16", 5, 100, 256, 128, 1, 8, 64, 4, 2, symmetric=False),
    Form("fp16", 19, 40, 384, 64, 3, 16, 32, 2, 1, symmetric=False),
    Form("bf16", 9, 33, 300, 32, 1, 8, 64, 2, 2, symmetric=True),
    Form("bf16", 13, 80, 256, 64, 1, 16, 64, 2, 2, symmetric=False, is_gated=True),
    Form("bf16", 3, 40, 900, 128, 1, 8, 64, 4, 2, symmetric=False),
    # Copied to shared memory: AHEAD is more than 2.
    Form("bf16", 5, 112, 1024, 128, 1, 8, 64, 4, 3, symmetric=False),
    Form("bf16", 9, 48, 1500, 32, 1, 8, 64, 2, 7, symmetric=False),
    Form("bf16", 9, 80, 700, 32, 1, 8, 32, 2, 3, symmetric=True),
    Form("fp16", 11, 48, 900, 64, 3, 16, 32, 2, 4, symmetric=False),
    Form("fp16", 11, 48, 1920, 64, 3, 16, 32, 2, 3, symmetric=False, is_folded=True),
    Form("bf16", 4, 80, 900, 128, 2, 8, 64, 4, 4, symmetric=True, is_folded=True),
    Form("bf16", 13, 80, 1536, 32, 2, 16, 64, 2, 4, symmetric=False, is_gated=True, is_folded=True),
    Form("fp16", 3, 96, 256, 128, 1, 8, 64, 2, 7, symmetric=False, is_gated=True),
]


@pytest.fixture(scope="module")
def compiled() -> dict[Form, Compiled]:
    """PTX of every form, compiled where Triton does not interpret."""
    pytest.importorskip("triton", reason="kernels are compiled by Triton: pip install --group oracle")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    lines = "".join(f"{form.kernel.model_dump_json()}\n" for form in FORMS)
    command = [sys.executable, "-c", COMPILED]
    done = subprocess.run(command, cwd=ROOT, env=environment, input=lines, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = [Compiled(**json.loads(line)) for line in done.stdout.splitlines()]
    return dict(zip(FORMS, results, strict=True))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_instructions_compute_the_matmul(form: Form, compiled: dict[Form, Compiled]) -> None:
    assert (compiled[form].shared_bytes > 0) == (form.ahead > 2)
    require_matmul(form, compiled[form].ptx, compiled[form].shared_bytes)


def require_matmul(form: Form, ptx: str, shared_bytes: int) -> None:
    """Run the form's instructions, and compare the result with float64."""
    rng, groups, dtype = np.random.default_rng(form.rows), -(-form.columns // form.group), TYPES[form.dtype]
    codes = rng.integers(0, 16, (form.n, form.columns), np.uint8)
    zeros = (
        np.full((form.n, groups), 8, np.uint8) if form.symmetric else rng.integers(0, 16, (form.n, groups), np.uint8)
    )
    scales = rng.uniform(0.01, 0.1, (form.n, groups)).astype(np.float16)
    x = rng.standard_normal((form.rows, form.columns)).astype(dtype)
    width = form.n // 2 if form.is_gated else form.n
    programs = 1 if form.is_folded else form.splits
    bias, out = rng.standard_normal(form.n).astype(dtype), np.full((programs, form.rows, width), np.nan, np.float32)
    memory = Memory()
    operands = (x, spans(codes, 4).numpy(), scales.T.copy(), zeros.T.copy(), bias, out)
    addresses = [memory.add(array) for array in operands]
    numbers: list[int | np.float32] = [form.rows, form.columns, width, np.float32(1.0), np.float32(0.0), 0, 0]
    grid = (-(-form.rows // form.tile_rows), -(-form.n // form.tile), programs)
    run_grid(ptx, memory, [*addresses, *numbers], grid, 32 * form.warps, shared_bytes)
    of = np.arange(form.columns) // form.group
    weight = (codes.astype(np.float64) - zeros[:, of]) * scales.astype(np.float64)[:, of]
    expected = x.astype(np.float64) @ weight.T + bias.astype(np.float64)
    magnitude = np.abs(x.astype(np.float64)) @ np.abs(weight.T)
    if form.is_gated:
        (gate, up), terms = halves(expected), halves(magnitude)
        expected, magnitude = gate * up, terms[0] * np.abs(up) + np.abs(gate) * terms[1]
    assert (np.abs(out.astype(np.float64).sum(0) - expected) / magnitude).max() <= 1e-6, "results differ from float64"


@dataclass(frozen=True)
class Fault:
    """A change of the instructions, and its error in the forms where it matters."""

    name: str
    old: str
    new: str | Callable[[re.Match[str]], str]
    message: str
    is_joint: bool = False
    """Whether all places are changed at once, of which otherwise each is a fault."""
    matters: Callable[[Form], bool] = lambda form: True

    def __str__(self) -> str:
        return self.name

    def planted(self, ptx: str) -> list[str]:
        """The instructions with the fault, at each place where it can be."""
        change, places = self.new, [found.start() for found in re.finditer(self.old, ptx)]
        if self.is_joint:
            return [re.sub(self.old, change, ptx)]
        return [ptx[:place] + re.sub(self.old, change, ptx[place:], count=1) for place in places]


RINGS = [form for form in FORMS if form.ahead > 2]
FAULTS = [
    Fault("waits for too few", r"wait_group\s+(\d+)", lambda found: f"wait_group {int(found[1]) + 1}",
          "copy no wait has completed"),
    Fault("group without end", r"cp\.async\.commit_group;", "", "copy no wait has completed"),
    Fault("no barrier", r"bar\.sync\s+0;", "", "read without a barrier after another thread's write", is_joint=True),
    # In a ring that is not used again, the barrier between the group's end and the reads is enough.
    Fault("no barrier after the wait", r"(wait_group\s+\d+;\s+)bar\.sync\s+0;", r"\1",
          "copy without a barrier after another thread's read",
          matters=lambda form: form.columns // 128 // form.splits > form.ahead + 1),
    # The barriers before the copies that come before the loop, which the compiler inserts for the next split.
    Fault("no barrier between splits", r"bar\.sync\s+0;(?=(?:(?!\bbra\b|ldmatrix)[\s\S])*?cp\.async\.cg)", "",
          "copy without a barrier after another thread's read", is_joint=True, matters=lambda form: form.is_folded),
    Fault("every thread copies", r"@%p\d+ cp\.async", "cp.async", "two threads copy to one place", is_joint=True),
    Fault("copies rows after the last", r"selp\.b32(\s+%r\d+), 16, 0, %p\d+;", r"mov.b32 \1, 16;", "outside a buffer"),
    Fault("copies no row", r"selp\.b32(\s+%r\d+), 16, 0, %p\d+;", r"mov.b32 \1, 0;", "differ from float64"),
    Fault("not transposed", r"\.trans\.shared", ".shared", "differ from float64", is_joint=True),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "form"), [(fault, form) for fault in FAULTS for form in RINGS if fault.matters(form)], ids=str
)
def test_a_fault_in_the_instructions_is_found(fault: Fault, form: Form, compiled: dict[Form, Compiled]) -> None:
    planted = fault.planted(compiled[form].ptx)
    assert planted
    assert compiled[form].ptx not in planted
    for ptx in planted:
        with pytest.raises(AssertionError, match=fault.message):
            require_matmul(form, ptx, compiled[form].shared_bytes)
