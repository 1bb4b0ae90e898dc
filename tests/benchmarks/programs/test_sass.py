"""Disassembled kernels: loops, multiplications, loads, of listings and of compiled kernels."""

import json
import os
import subprocess
import sys

import pytest
from benchmarks.programs.sass import Sass, parse

LISTING = """
        /*0000*/                   S2R R0, SR_TID.X ;
.L_x_0:
        /*0010*/                   LDG.E.U8.CONSTANT R4, [R2.64] ;
.L_x_1:
        /*0020*/              @!P0 LDG.E.128.CONSTANT R4, [R2.64] ;
        /*0030*/                   LDGSTS.E.BYPASS.128 [R9], [R2.64] ;
        /*0040*/                   LDS.U.64 R8, [R9] ;
        /*0048*/                   DEPBAR.LE SB0, 0x2 ;
        /*0050*/                   LDSM.16.M88.4 R8, [R9] ;
        /*0060*/                   HMMA.16816.F32.BF16 R8, R4, R2, R8 ;
        /*0070*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0080*/              @!P1 BRA `(.L_x_1) ;
        /*0090*/               @P2 BRA `(.L_x_0) ;
        /*00a0*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*00b0*/                   EXIT ;
"""
COUNTED = """
import json
from benchmarks.programs.sass import disassemble
from ingot.pipeline.targets.cuda.cubins import compile_kernel
from ingot.pipeline.targets.cuda.kernel_signatures import make_kernel
constants = dict(N=64, COLUMNS=8192, SPLITS=1, TILE_ROWS=32, TILE=32, TILE_COLUMNS=32, BAND=4, KIND=0, HAS_BIAS=False,
                 HAS_SOFTCAP=False, UPCAST=False, FOLDS=False)
kernel = make_kernel("matmul", dict(T="bf16", OUT="bf16", C="bf16", W="bf16"), constants, num_stages=1)
sass = disassemble(compile_kernel(kernel, 80).code)
print(json.dumps([sass.main.multiplications, sass.registers, len(sass.main), sass.outside, dict(sass.main.loads)]))
"""


def test_loops_are_found_and_the_innermost_with_multiplications_is_the_main_one() -> None:
    instructions, loops = parse(LISTING.splitlines())
    sass = Sass(instructions, loops, 32, 0)
    assert [len(loop) for loop in sass.loops] == [8, 10]
    assert len(sass.main) == 8
    assert sass.outside == len(instructions) - 8
    assert sass.main.multiplications == 16 * 8 * 16
    assert sass.main.barriers == 1
    assert sass.main.in_flight == 2
    assert sass.main.loads == {"LDG.128": 1, "LDGSTS.128": 1, "LDS.64": 1, "LDSM.x4": 1}
    assert sass.loops[1].loads["LDG.8"] == 1


def test_the_shortest_way_through_a_loop_takes_branches_over_what_some_turns_need() -> None:
    lines = [".L_x_0:", "MOV R0, R1", "@P0 BRA `(.L_x_2)", *["IADD R0, R0, R1"] * 5, "BRA P1, `(.L_x_2)", "MOV R2, R3",
             ".L_x_2:", "BRA `(.L_x_3)", "NOP", ".L_x_3:", "@P1 BRA `(.L_x_0)"]  # fmt: skip
    listing = [line if line[0] == "." else f" /*{16 * number:04x}*/ {line} ;" for number, line in enumerate(lines)]
    (loop,) = parse(listing)[1]
    assert (len(loop), loop.shortest) == (12, 4)


def test_an_instruction_of_four_warps_is_a_quarter_for_each() -> None:
    instructions, _ = parse(LISTING.splitlines())
    assert Sass(instructions[-2:], (), 0, 0).main.multiplications == 64 * 128 * 16 // 4


def test_a_compiled_matmul_multiplies_as_much_in_a_turn_as_its_tile_has() -> None:
    pytest.importorskip("triton", reason="kernels are compiled by Triton: pip install --group oracle")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COUNTED]
    made = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    multiplications, registers, loop, outside, loads = json.loads(made.stdout)
    assert multiplications % (32 * 32 * 32 // 4) == 0
    assert 16 < registers < 256
    assert loop > 16
    assert outside > 16
    assert "LDG.128" in loads
