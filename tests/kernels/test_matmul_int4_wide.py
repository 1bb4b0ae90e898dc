"""The matmul of warps that copy rows and warps that multiply, by the emulator of their barriers: random problems, equal
bits of every schedule, tile and batch, planted faults, and the order of its machine code."""

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from ingot.kernels import matmul_int4_wide as kernel_module
from tests.each_case import each_case
from tests.kernels.packed_cases import LIMITS, Packed, PackedMatmul, error
from tests.kernels.planted_faults import Fault, require_found
from tests.kernels.test_compiled_attention import compiled
from tests.simulators import gluon_emulator
from tests.simulators.triton_interpreter import refuse_loads_outside, use_ordered_dots

MACHINE_CODE = """
import json
from benchmarks.programs.instructions import loops_of_roles
from benchmarks.programs.sass import disassemble
from ingot.pipeline.targets.cuda.cubins import compile_kernel
from ingot.pipeline.targets.cuda.kernel_signatures import make_kernel
found = []
for rows, splits, gate in ((16, 1, -1), (32, 1, -1), (64, 1, -1), (64, 1, 0), (64, 8, -1)):
    constants = dict(N=4096, COLUMNS=4096, SPANS=32, GROUP=128, GROUPS=32, SPLITS=splits, TILE_ROWS=rows, TILE=256,
                     STAGES=4, HAS_ZERO_POINTS=True, HAS_BIAS=False, HAS_SOFTCAP=False, DTYPE="bf16",
                     FOLDS=splits > 1, GATE=gate)
    types = dict(T="bf16", S="fp16", OUT="fp32")
    kernel = make_kernel("matmul_int4_wide", types, constants, frozenset({"x_stride", "out_stride"}), 12)
    sass = disassemble(compile_kernel(kernel, 90).code)
    found.append([loop.instructions for loop in loops_of_roles(sass, 128 * 128 * rows // 4, "STS")[:2]])
print(json.dumps(found))
"""


class Problem(PackedMatmul):
    """A weight of several tiles."""

    kernel = "matmul_int4_wide"

    @classmethod
    def random(cls, rng: np.random.Generator, rows: int, n: int = 300, columns: int = 1000) -> "Problem":
        weight = Packed.of(rng, 4, n, columns, 128)
        return cls(torch.from_numpy(rng.standard_normal((rows, columns))).to(torch.float16), weight)

    def run(self, module: ModuleType = kernel_module, *, rows: slice = slice(None), **changed: Any) -> torch.Tensor:
        """The rows' result; `changed` are constants."""
        sizes = {"TILE_ROWS": 32, "TILE": 256, "STAGES": 3, "SPLITS": 1, "FOLDS": False}
        return self.multiplied(module, {**sizes, **changed}, rows)


def test_a_random_problem_is_that_of_float64(kernel_case: int) -> None:
    assert error("matmul_int4_wide", 1000 + kernel_case) <= LIMITS["matmul_int4_wide"]


def test_no_schedule_of_warps_changes_a_bit() -> None:
    problem = Problem.random(np.random.default_rng(1), 40)
    found = []
    for seed in range(4):
        gluon_emulator.seed(seed)
        found.append(problem.run())
    problem.check(found[0])
    assert all(torch.equal(found[0], one) for one in found[1:])


def test_a_row_has_the_same_bits_alone_in_any_tile_and_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    use_ordered_dots(monkeypatch)
    problem = Problem.random(np.random.default_rng(2), 70)
    together = problem.run(TILE_ROWS=64)
    for tile_rows, stages in ((16, 2), (32, 1), (64, 5)):
        assert torch.equal(problem.run(TILE_ROWS=tile_rows, STAGES=stages), together)
        assert torch.equal(problem.run(rows=slice(69, 70), TILE_ROWS=tile_rows)[0], together[69])


@each_case("splits", (2, 3, 8))
def test_partials_that_a_program_adds_itself_are_those_that_their_reader_adds(
    splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_ordered_dots(monkeypatch)
    problem = Problem.random(np.random.default_rng(3), 20)
    folded, parts = problem.run(SPLITS=splits, FOLDS=True), problem.run(SPLITS=splits)
    problem.check(folded)
    if splits == 2:
        assert torch.equal(folded, parts)
    else:
        torch.testing.assert_close(folded, parts, rtol=1e-5, atol=1e-5)


@each_case("n", (64, 300, 320))
def test_no_load_leaves_its_tensor(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.random(np.random.default_rng(4), 20, n)
    loads = refuse_loads_outside(monkeypatch, problem.tensors)
    problem.check(problem.run())
    assert loads


WAIT, ARRIVE = "mbarrier.wait", "mbarrier.arrive"
FAULTS: Mapping[str, Fault] = {
    "rows are not waited for": Fault(f"        {WAIT}(full.index(stage), phase)\n", "", ""),
    "rows are copied too early": Fault(f"        {WAIT}(empty.index(stage), phase ^ 1)\n", "", "may still be"),
    "the first copy waits": Fault("empty.index(stage), phase ^ 1", "empty.index(stage), phase", "wait for ever"),
    "no fence": Fault("        fence_async_shared()\n", "", "without a fence"),
    "a stage is given back before its second half": Fault(
        "        other_total, other_new = _with_half(",
        f"        {ARRIVE}(empty.index(stage))\n        other_total, other_new = _with_half(",
        "",
    ),
    "a stage is never given back": Fault(f"        {ARRIVE}(empty.index(stage))\n", "", "wait for ever"),
    "rows never arrive": Fault(f"        {ARRIVE}(full.index(stage))\n", "", "wait for ever"),
    "one group gives rows back for both": Fault(
        "mbarrier.init(empty.index(stage), GROUPS_THAT_MULTIPLY)", "mbarrier.init(empty.index(stage), 1)", ""
    ),
    "the turn is kept": Fault(f"    {ARRIVE}(turns.index(1 - side))\n", "", "wait for ever"),
    "both groups wait first": Fault("turns, side, 1 - side,", "turns, side, 0,", "wait for ever"),
    "the ring's phase does not change": Fault("turn // STAGES & 1", "0", ""),
    "sums are used before they are there": Fault(
        "    sums, weight = warpgroup_mma_wait(0, deps=[sums, weight])\n", "", "before a wait"
    ),
    "columns are in their own order": Fault("(0, 1, 3, 4, 2, 5)", "(0, 1, 2, 3, 4, 5)", None),
    "columns after the last are not zeros": Fault("if COLUMNS % 128:", "if COLUMNS < 0:", None),
    "a span is multiplied twice": Fault(
        "coming = gl.minimum(span + 2, end)", "coming = gl.minimum(span + 1, end)", None
    ),
    "scales are those of the next span": Fault(
        "    return total + sums * scale.to(gl.float32)[:, None], new\n",
        "    return total + sums * new[1][0][0].to(gl.float32)[:, None], new\n",
        None,
    ),
    "weights after the last are stored": Fault(
        "first, split, alpha, softcap, ring)", "first + 16, split, alpha, softcap, ring)", None
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.random(np.random.default_rng(6), 40)
    require_found(FAULTS[name], kernel_module, tmp_path, monkeypatch, lambda module: problem.check(problem.run(module)))


def test_a_group_gives_up_its_turn_while_it_multiplies_and_spills_nothing_in_its_loop() -> None:
    for loops in compiled(MACHINE_CODE):
        assert len(loops) == 2
        for loop in loops:
            names = [text.split()[0] for text in loop]
            kinds = [next((kind for kind in ("HGMMA", "SYNCS.ARRIVE", "WARPGROUP.DEPBAR") if name.startswith(kind)), "")
                     for name in names]  # fmt: skip
            assert not {"STL", "LDL"} & {name.split(".")[0] for name in names}
            order = [kind for kind in kinds if kind]
            half = [*["HGMMA"] * 8, "SYNCS.ARRIVE", "WARPGROUP.DEPBAR"]
            assert order == [*half, *half, "SYNCS.ARRIVE"]
