"""Compiled attention kernels: what their sources cannot promise of the machine code."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.data_paths import ROOT

OF_WARPS_THAT_COPY = """
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
OF_CODES = """
import json
from benchmarks.programs.sass import disassemble
from ingot.pipeline.targets.cuda.cubins import compile_kernel
from ingot.pipeline.targets.cuda.kernel_signatures import make_kernel
found = []
strides = ("q_stride", "out_stride", "block_stride", "head_stride", "value_offset", "scale_block_stride",
           "scale_value_offset")
for sm, kind, pool, keys in ((80, 2, "i8", 32), (80, 3, "u8", 32), (90, 2, "i8", 64), (90, 3, "u8", 64)):
    constants = dict(GROUP=4, BLOCK_GROUP=4, DIM=128, BLOCK_DIM=128, WIDTH=128 // (kind - 1), BLOCK_TOKENS=16,
                     TILE=keys, TILE_QUERIES=32, QUERIES=32, KIND=kind, HAS_SOFTCAP=False, HAS_SINKS=False,
                     DTYPE="bf16")
    kernel = make_kernel("ragged_attention", dict(T="bf16", KV=pool), constants, frozenset(strides), 8, 3)
    sass = disassemble(compile_kernel(kernel, sm).code)
    found.append([keys, sass.spilled_bytes, dict(sass.main.counts)])
print(json.dumps(found))
"""


def compiled(program: str) -> Any:
    """The output of a program in a process of its own, which can compile kernels."""
    pytest.importorskip("triton", reason="kernels are compiled by Triton: pip install --group oracle")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_values_are_multiplied_while_the_powers_of_the_next_tile_are_computed_and_nothing_is_spilled() -> None:
    for spilled, *loops in compiled(OF_WARPS_THAT_COPY):
        assert spilled == 0
        assert len(loops) == 2
        for loop in loops:
            waits = [at for at, text in enumerate(loop) if text.startswith("WARPGROUP.DEPBAR")]
            assert [loop[at].split()[-1] for at in waits] == ["0x1", "0x0"]
            between = [text.split(".")[0] for text in loop[waits[0] : waits[1]]]
            assert between.count("MUFU") >= 64
            assert "HGMMA" not in between


def test_codes_of_a_prompts_keys_and_values_become_floats_once_a_program_without_the_unit_of_conversions() -> None:
    for keys, spilled, counts in compiled(OF_CODES):
        assert spilled == 0
        assert not counts.keys() & {"I2F", "I2FP", "F2F"}
        # One for each code of keys and values and for each score, shared by 256 threads, and the softmax's of two rows.
        assert counts["FFMA"] <= (2 * keys * 128 + 128 * keys) / 256 + 8
