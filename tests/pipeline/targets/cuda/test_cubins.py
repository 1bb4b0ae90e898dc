"""Cubins, compiled without a GPU for every SM."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ingot.errors import BuildError, UsageError
from ingot.pipeline.targets.cuda.cubins import compile_kernel
from ingot.pipeline.targets.cuda.kernel_signatures import SIGNATURES, make_kernel
from ingot.pipeline.targets.table import SMS
from tests.data_paths import ROOT

SCRIPT = Path(__file__).with_name("compile_all.py")


@pytest.mark.parametrize("sm", SMS)
def test_every_kernel_compiles_for_every_sm_that_can_run_it(sm: int) -> None:
    pytest.importorskip("triton", reason="kernels are compiled by Triton: pip install --group oracle")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(sm)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {row["kernel"] for row in rows} == set(SIGNATURES)
    for row in rows:
        if row["float8"] and sm < 89:
            assert "8-bit floats need SM 89 or newer" in row["error"]
        else:
            assert row["error"] is None
            assert row["code_starts_with_elf"]
            assert row["shared_bytes"] <= 99 * 1024  # the limit per block on the smallest of these SMs


def test_an_unknown_sm_and_types_that_it_lacks_are_refused() -> None:
    request = make_kernel("gather_rows", {"T": "fp16"}, {})
    with pytest.raises(UsageError, match="kernels cannot be compiled for SM 75; allowed: 80, 86, 89, 90, 120"):
        compile_kernel(request, 75)
    with pytest.raises(BuildError, match="rotary_kv_write: 8-bit floats need SM 89 or newer, this is SM 80"):
        compile_kernel(make_kernel("rotary_kv_write", {"T": "fp16", "X": "fp16", "KV": "fp8e4nv"}, {}), 80)
