"""Cubins are made without a card, for every SM, from signatures that are those of the kernels."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ingot.errors import BuildError, UsageError
from ingot.pipeline.targets.cuda.cubins import compile_kernel
from ingot.pipeline.targets.cuda.kernel_signatures import CATALOG, make_kernel
from ingot.pipeline.targets.table import SMS
from tests.data_paths import ROOT

SCRIPT = Path(__file__).with_name("compile_all.py")


@pytest.mark.parametrize("kernel", CATALOG)
def test_the_catalogue_lists_the_functions_arguments_in_order(kernel: str) -> None:
    module, _, name = CATALOG[kernel].function.partition(".")
    tree = ast.parse((ROOT / "kernels" / f"{module}.py").read_text(encoding="utf-8"))
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    assert list(CATALOG[kernel].arguments) == [arg.arg for arg in function.args.args if arg.annotation is None]


@pytest.mark.parametrize("sm", SMS)
def test_every_kernel_compiles_for_every_sm_that_can_run_it(sm: int) -> None:
    pytest.importorskip("triton", reason="kernels are compiled by Triton: pip install --group oracle")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(sm)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {row["kernel"] for row in rows} == set(CATALOG)
    for row in rows:
        if row["float8"] and sm < 89:
            assert "8-bit floats need SM 89 or newer" in row["error"]
        else:
            assert row["error"] is None
            assert row["code_starts_with_elf"]
            assert row["shared_bytes"] <= 99 * 1024  # what the smallest of these cards gives a block


def test_an_unknown_sm_kernel_or_missing_type_is_refused() -> None:
    request = make_kernel("gather_rows", {"T": "fp16"}, {})
    with pytest.raises(UsageError, match="no cubins are made for SM 75; allowed: 80, 86, 89, 90, 120"):
        compile_kernel(request, 75)
    with pytest.raises(UsageError, match=r"no kernel is named 'rms_nrm'.*Did you mean 'rms_norm'"):
        make_kernel("rms_nrm", {}, {})
    with pytest.raises(UsageError, match="gather_rows: no type is given for T"):
        make_kernel("gather_rows", {}, {})
    with pytest.raises(BuildError, match="rotary_kv_write: 8-bit floats need SM 89 or newer, this is SM 80"):
        compile_kernel(make_kernel("rotary_kv_write", {"T": "fp16", "X": "fp16", "KV": "fp8e4nv"}, {}), 80)
