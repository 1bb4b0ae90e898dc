"""The compiled kernel of warps that copy and warps that compute: what its source cannot promise of the machine code."""

import json
import os
import subprocess
import sys

import pytest

from tests.data_paths import ROOT

COMPILED = """
import json
from benchmarks.programs.sass import disassemble
from ingot.pipeline.targets.cuda.cubins import compile_kernel
from ingot.pipeline.targets.cuda.kernel_signatures import make_kernel
found = []
for dim, group in ((128, 4), (64, 8), (128, 1), (64, 2)):
    constants = dict(GROUP=group, BLOCK_GROUP=group, DIM=dim, BLOCK_DIM=dim, WIDTH=dim, BLOCK_TOKENS=16, TILE=128,
                     TILE_QUERIES=32, QUERIES=128 // group, KIND=0, HAS_SOFTCAP=False, HAS_SINKS=False, DTYPE="bf16")
    strides = frozenset({"q_stride", "out_stride", "block_stride", "head_stride", "value_offset"})
    kernel = make_kernel("prefill_attention", dict(T="bf16", KV="bf16"), constants, strides, 12)
    sass = disassemble(compile_kernel(kernel, 90).code)
    turn = 2 * 64 * 128 * dim // 4
    loops = [loop for loop in sass.loops if loop.multiplications == turn and loop.shortest]
    found.append([sass.spilled_bytes, *sorted((loop.instructions for loop in loops), key=len)[:2]])
print(json.dumps(found))
"""


def test_values_are_multiplied_while_the_powers_of_the_next_tile_are_computed_and_nothing_is_spilled() -> None:
    pytest.importorskip("triton", reason="kernels are compiled by Triton: pip install --group oracle")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILED]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for spilled, *loops in json.loads(done.stdout):
        assert spilled == 0
        assert len(loops) == 2
        for loop in loops:
            waits = [at for at, text in enumerate(loop) if text.startswith("WARPGROUP.DEPBAR")]
            assert [loop[at].split()[-1] for at in waits] == ["0x1", "0x0"]
            between = [text.split(".")[0] for text in loop[waits[0] : waits[1]]]
            assert between.count("MUFU") >= 64
            assert "HGMMA" not in between
