"""Matmuls of 4-bit codes that are copied to a ring in shared memory, by the emulator of these copies: equal bits
however far ahead, no load outside of tensors, and planted faults. Random problems are in packed_cases.py."""

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from ingot.kernels import matmul_int4 as kernel_module
from tests.each_case import each_case
from tests.kernels.expert_cases import grouped
from tests.kernels.packed_cases import Packed, PackedMatmul
from tests.kernels.planted_faults import Fault, require_found
from tests.simulators import gluon_emulator
from tests.simulators.triton_interpreter import refuse_loads_outside, use_ordered_dots

TILE, TILE_ROWS = 32, 8


class Problem(PackedMatmul):
    """A weight of several tiles."""

    kernel = "matmul_int4"

    @classmethod
    def random(cls, seed: int, n: int = 48, columns: int = 900, group: int = 64) -> "Problem":
        """Five rows; an even seed is without zero points."""
        rng = np.random.default_rng(seed)
        weight = Packed.of(rng, 4, n, columns, group)
        while (weight.zero_points is None) == bool(seed % 2):
            weight = Packed.of(rng, 4, n, columns, group)
        return cls(torch.from_numpy(rng.standard_normal((5, columns))).to(torch.float16), weight)

    def run(self, module: ModuleType = kernel_module, ahead: int = 3, splits: int = 1, **changed: Any) -> torch.Tensor:
        """The result; `changed` are constants."""
        sizes = {"TILE_ROWS": TILE_ROWS, "TILE": TILE, "WARPS": 2, "FOLDS": False}
        return self.multiplied(module, {**sizes, "AHEAD": ahead, "SPLITS": splits, **changed})


@each_case("group", (32, 64, 128))
@each_case("folds", (False, True))
def test_however_far_ahead_codes_are_loaded_the_bits_are_the_same(
    group: int, folds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_ordered_dots(monkeypatch)
    problem = Problem.random(group // 32, group=group)
    expected = problem.run(ahead=1, splits=2, FOLDS=folds)
    problem.check(expected)
    for ahead in (2, 3, 5, 7):
        assert torch.equal(problem.run(ahead=ahead, splits=2, FOLDS=folds), expected), ahead


@each_case("seed", range(4))
def test_however_far_ahead_experts_codes_are_loaded_the_bits_are_the_same(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_ordered_dots(monkeypatch)
    found = [grouped(np.random.default_rng(seed), "grouped_matmul_int4", ahead)[0] for ahead in (1, 2, 3, 5, 7)]
    assert np.isfinite(found[0]).all()
    assert all(np.array_equal(found[0], one) for one in found[1:])


def test_no_order_in_which_copies_arrive_changes_a_bit() -> None:
    problem = Problem.random(1)
    found = []
    for seed in range(4):
        gluon_emulator.seed(seed)
        found.append(problem.run(ahead=5))
    problem.check(found[0])
    assert all(torch.equal(found[0], one) for one in found[1:])


@each_case("n", (16, 48, 96))
@each_case("ahead", (1, 2, 3))
def test_no_load_leaves_its_tensor(n: int, ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.random(3, n)
    loads = refuse_loads_outside(monkeypatch, problem.tensors)
    for splits in (1, 3):
        problem.check(problem.run(ahead=ahead, splits=splits))
    assert loads


NO_WAIT, NOT_WRITTEN = "without having waited", "never written"
WRITTEN, NO_STAGE = "may still be written", "has no stage"
BETWEEN = """, codes, scales, zero_points, tile, coming,
                           N, SPANS, GROUP, GROUPS, TILE, WORDS, WARPS, HAS_ZERO_POINTS)  # fmt: skip
        async_copy.commit_group()
        loaded = _read_span(ring, """
FAULTS: Mapping[str, Fault] = {
    "a wait is for one group less": Fault("wait_group(AHEAD - 1)", "wait_group(AHEAD)", NO_WAIT),
    "no wait": Fault("        async_copy.wait_group(AHEAD - 1)\n", "", NO_WAIT),
    "copies of a turn are not committed": Fault(
        "        async_copy.commit_group()\n        loaded", "        loaded", NO_WAIT
    ),
    "first copies are not committed": Fault(
        "        async_copy.commit_group()\n    wait_for_inputs", "    wait_for_inputs", NO_WAIT
    ),
    "one span less is copied at first": Fault("tl.static_range(AHEAD):", "tl.static_range(AHEAD - 1):", NO_WAIT),
    "one span more than a part has is copied at first": Fault(
        "first + slot < last", "first + slot <= last", "ends without a wait"
    ),
    "one span more than a part has is copied": Fault("coming < last", "coming <= last", "ends without a wait"),
    "the last span is not copied": Fault("coming < last", "coming < last - 1", NOT_WRITTEN),
    "of the longest part the last first copy is not made": Fault("slot < LONGEST", "slot < LONGEST - 1", NOT_WRITTEN),
    "of the longest part the last copy is not made": Fault("AHEAD < LONGEST", "AHEAD + 1 < LONGEST", NOT_WRITTEN),
    "a copy is to the slot that is read": Fault("(coming - first) %", "(span - first) %", NO_WAIT),
    "a slot is read before its turn": Fault("ring, (span - first) %", "ring, (span - first + 1) %", NO_WAIT),
    "slots are counted from the first part": Fault("ring, (span - first) %", "ring, span %", NO_WAIT),
    "turns have a slot less than copies": Fault("(span - first) % (AHEAD + 1)", "(span - first) % AHEAD", None),
    "a slot less for all": Fault(
        f"(coming - first) % (AHEAD + 1){BETWEEN}(span - first) % (AHEAD + 1)",
        f"(coming - first) % AHEAD{BETWEEN}(span - first) % AHEAD",
        NO_WAIT,
    ),
    "a slot less for codes": Fault("[AHEAD + 1, TILE, 16]", "[AHEAD, TILE, 16]", NO_STAGE),
    "a slot less for scales": Fault("PIECES: tl.constexpr = (AHEAD + 1) *", "PIECES: tl.constexpr = AHEAD *", NO_STAGE),
    "scales of two spans have one place": Fault(
        "at = slot * (4 // WORDS) + piece\n        n =", "at = slot + piece\n        n =", WRITTEN
    ),
    "scales are those of another piece": Fault(
        "at = slot * (4 // WORDS) + piece\n        scale", "at = slot * (4 // WORDS)\n        scale", None
    ),
    "zero points are those of another piece": Fault(
        "zero = ring_zeros.index(at)", "zero = ring_zeros.index(slot * (4 // WORDS))", None
    ),
    "codes are those of the next span": Fault(
        "async_load(ring_codes.index(slot), codes + span * 16)",
        "async_load(ring_codes.index(slot), codes + gl.minimum(span + 1, SPANS - 1) * 16)",
        None,
    ),
    "scales are those of the first tile": Fault(
        "n = first + gl.arange(0, TILE, layout=copied_layout(scales",
        "n = gl.arange(0, TILE, layout=copied_layout(scales",
        None,
    ),
    "scales after the last are copied": Fault("scales + group * N + n, mask=n < N)", "scales + group * N + n)", None),
    "zero points after the last are copied": Fault(
        "zero_points + group * N + n, mask=n < N)", "zero_points + group * N + n)", None
    ),
}


@each_case("name", FAULTS)
def test_a_planted_fault_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.random(5)
    refuse_loads_outside(monkeypatch, problem.tensors)

    def solve(module: ModuleType) -> None:
        for splits in (3, 2, 1):
            problem.check(problem.run(module, splits=splits))

    require_found(FAULTS[name], kernel_module, tmp_path, monkeypatch, solve)


@each_case(
    ("splits", "message"),
    [(1, "the whole program ends without a wait"), (2, "memory is allocated where copies may be")],
)
def test_copies_that_the_last_program_of_a_launch_or_one_of_its_parts_leaves_are_found(
    splits: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Fault(
        "        if slot < LONGEST:  # noqa: SIM102  a branch of the compiler\n"
        "            if first + slot < last:\n"
        "                _copy_span(ring, slot, codes, scales, zero_points, tile, first + slot,\n",
        "        if slot < AHEAD:\n"
        "            if first < last:\n"
        "                _copy_span(ring, slot, codes, scales, zero_points, tile,\n"
        "                           gl.minimum(first + slot, last - 1),\n",
        message,
    )
    problem = Problem.random(7, n=16, columns=128 * splits)

    def solve(module: ModuleType) -> None:
        problem.check(problem.run(module, splits=splits, FOLDS=True))

    solve(kernel_module)
    require_found(fault, kernel_module, tmp_path, monkeypatch, solve)
