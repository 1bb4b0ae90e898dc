"""The kernel of warps that copy and warps that compute, by the emulator of their barriers: random problems, equal bits
of every schedule and every chunk of a prompt, and planted faults."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from ingot.kernels import prefill_attention as kernel_module
from tests.kernels.planted_faults import Fault, require_found
from tests.kernels.prefill_cases import TILE_QUERIES, prefill
from tests.kernels.reference import FLOAT
from tests.kernels.test_attention_properties import Problem
from tests.simulators import gluon_emulator


def drawn(seed: int) -> Problem:
    """A problem that the kernel takes, with contexts of several tiles of keys."""
    rng = np.random.default_rng([seed, 2])
    group = int(rng.choice([1, 2, 3, 4, 5, 7, 8, 16]))
    most = 70 if group > 2 else 300  # queries of several programs
    lengths = [int(rng.integers(*[(1, 40), (40, 300), (260, 520)][rng.integers(3)])) for _ in range(rng.integers(1, 4))]
    return Problem(
        rng=rng,
        kv_heads=int(rng.integers(1, 3)),
        group=group,
        dim=int(rng.choice([64, 128])),
        block_tokens=int(rng.choice([8, 16, 32, 64, 128])),
        kind=FLOAT,
        dtype=torch.float16,
        lengths=lengths,
        counts=[int(rng.integers(0, min(length, most) + 1)) for length in lengths],
        window=int(rng.integers(*[(0, 1), (1, 20), (100, 400)][rng.integers(3)])),
        softcap=float(rng.choice([0.0, rng.uniform(1, 30)])),
        has_sinks=bool(rng.integers(2)),
        scale=float(rng.uniform(0.05, 0.4)),
    )


def solve(problem: Problem, module: ModuleType = kernel_module) -> torch.Tensor:
    """Run the kernel with tiles in a random order, and compare with float64."""
    pool, tables, lengths = problem.memory()
    q, sinks = problem.rows(sum(problem.counts)), problem.sinks()
    tiles = [(row, start) for row, count in enumerate(problem.counts) for start in range(0, count, TILE_QUERIES)]
    order = [(int(row), int(start)) for row, start in problem.rng.permutation(np.array([*tiles, (-1, 0)]))]
    numbers = (problem.counts, problem.scale, problem.softcap, problem.window)
    out = prefill(q, pool, tables, lengths, *numbers, sinks, heads=problem.heads, tiles=order, module=module)
    problem.check(out, problem.expected(q, pool, tables, sinks))
    return out


def test_prefill_attention_is_that_of_float64(kernel_case: int) -> None:
    gluon_emulator.seed(kernel_case)
    solve(drawn(kernel_case))


def test_no_schedule_of_warps_and_copies_changes_a_bit() -> None:
    found = []
    for seed in range(4):
        gluon_emulator.seed(seed)
        found.append(solve(drawn(5)).nan_to_num(9.0))
    assert all(torch.equal(found[0], one) for one in found[1:])


@pytest.mark.parametrize(("window", "group"), [(0, 4), (150, 4), (0, 1), (150, 2)])
def test_a_row_has_the_same_bits_in_every_chunk_of_its_prompt(window: int, group: int) -> None:
    rng, length = np.random.default_rng(4), 333
    problem = Problem(rng, 1, group, 64, 16, FLOAT, torch.float16, [length], [length], window, 0.0, True, 0.2)
    pool, tables, _ = problem.memory()
    q, sinks = problem.rows(length), problem.sinks()

    def rows(begin: int, end: int) -> torch.Tensor:
        return prefill(q[begin:end].contiguous(), pool, tables, torch.tensor([end], dtype=torch.int32), [end - begin],
                       problem.scale, window=window, sinks=sinks, heads=group)  # fmt: skip

    whole = rows(0, length).nan_to_num(9.0)
    for begin, end in ((0, 100), (100, 101), (101, 140), (127, 160), (255, 257), (300, 333)):
        assert torch.equal(whole[begin:end], rows(begin, end).nan_to_num(9.0)), (begin, end)


WAIT, ARRIVE = "mbarrier.wait", "mbarrier.arrive"
FAULTS = {
    "first keys are not waited for": Fault(f"        {WAIT}(key_full.index(0), 0)\n", "", "never written"),
    "keys are not waited for": Fault(
        f"            {WAIT}(key_full.index(after), after_phase, pred=tile + TILE < end)\n", "", "without having waited"
    ),
    "values are not waited for": Fault(
        f"            {WAIT}(value_full.index(before), before_phase)\n", "", "without having waited"
    ),
    "last values are not waited for": Fault(
        f"        {WAIT}(value_full.index(before), before_phase)\n        fence",
        "        fence",
        "without having waited",
    ),
    "no fence": Fault("            fence_async_shared()\n", "            pass\n", "without a fence"),
    "values are given back too early": Fault(
        "            found, coming = warpgroup_mma_wait(0, deps=[found, coming])\n"
        f"            {ARRIVE}(value_empty.index(before))\n",
        f"            {ARRIVE}(value_empty.index(before))\n"
        "            found, coming = warpgroup_mma_wait(0, deps=[found, coming])\n",
        "may still be read",
    ),
    "keys are copied too early": Fault(f"        {WAIT}(key_empty.index(stage), phase)\n", "", "may still be"),
    "values are copied too early": Fault(f"        {WAIT}(value_empty.index(stage), phase)\n", "", "may still be"),
    "the first copy waits": Fault("    stage, phase = 0, 1\n", "    stage, phase = 0, 0\n", "wait for ever"),
    "values are never given back": Fault(f"            {ARRIVE}(value_empty.index(before))\n", "", "wait for ever"),
    "both groups wait first": Fault("0, 0, 1 - part\n", "0, 0, 0\n", "wait for ever"),
    "the turn is kept": Fault(f"            {ARRIVE}(turns.index(1 - part))\n", "", "wait for ever"),
    "one group gives keys back for both": Fault(
        "mbarrier.init(key_empty.index(stage), GROUPS)", "mbarrier.init(key_empty.index(stage), 1)", ""
    ),
    "the wait leaves the scores unfinished": Fault(
        "warpgroup_mma_wait(1, deps=[scores])", "warpgroup_mma_wait(2, deps=[scores])", "another multiplication"
    ),
    "values of another stage": Fault(
        "values.index(before), found, is_async=True)\n            mb",
        "values.index(stage), found, is_async=True)\n            mb",
        "without having waited",
    ),
    "phases do not change": Fault("gl.where(is_last, phase ^ 1, phase)", "phase", ""),
    "values after the end are copied": Fault("if left >= TILE:", "if left > 0:", None),
    "a window's first tiles are not masked": Fault("if (tile < clear) | (tile >= whole)", "if tile >= whole", None),
    "last tiles are not masked": Fault("(position + 1) // TILE * TILE", "(position + 999) // TILE * TILE", None),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(np.random.default_rng(6), 1, 4, 128, 32, FLOAT, torch.float16, [450], [40], 300, 0.0, False, 0.2)
    require_found(FAULTS[name], kernel_module, tmp_path, monkeypatch, lambda module: solve(problem, module))
