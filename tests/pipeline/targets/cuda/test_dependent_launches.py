"""Kernels of dependent launches wait before they read or write what another launch writes."""

import json
import os
import subprocess
import sys

import pytest

from ingot.pipeline.targets.cuda.kernel_signatures import SIGNATURES
from ingot.pipeline.targets.cuda.lowering import lower_to_launches
from ingot.pipeline.targets.cuda.program_builder import Bucket
from tests.data_paths import ROOT
from tests.simulators.launch_programs import CHECKPOINTS, CONTEXT, fused, imported

_OF_INT4 = {"codes", "scales", "zero_points", "bias"}  # no launch writes them
OF_WEIGHTS = {"matmul_int4": _OF_INT4, "matmul_int4_wide": _OF_INT4}


def test_every_kernel_waits_before_it_reaches_memory_other_than_weights() -> None:
    pytest.importorskip("triton", reason="kernels are compiled by Triton: pip install --group oracle")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.pipeline.targets.cuda.compiled_waits"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {name for name, *_ in found} == SIGNATURES.keys()
    assert {name for name, _, waits, _ in found if not waits} == set()
    early: dict[str, set[str]] = {}
    for name, _, _, reached in found:
        if reached:
            early.setdefault(name, set()).update(reached)
    assert early == OF_WEIGHTS
    assert {name for name, has_ring, _, reached in found if has_ring and reached} == {"matmul_int4"}


def test_all_kernels_of_a_program_wait_or_none() -> None:
    model = fused(imported(CHECKPOINTS / "llama"))
    buckets = (Bucket.decode(4, CONTEXT), Bucket.ragged(8, CONTEXT, 4))
    for dependent in (False, True):
        shared = lower_to_launches(model, buckets, dependent=dependent).shared
        assert {kernel.is_dependent for kernel in shared.kernels.values()} == {dependent}
