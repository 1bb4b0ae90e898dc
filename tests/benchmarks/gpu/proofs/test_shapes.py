"""Kernels in their real shapes: what a wrong one looks like, and the ladder of its variants."""

from pathlib import Path

import numpy as np
import pytest

from tests.simulators.triton_interpreter import use_interpreter

use_interpreter()

from benchmarks.gpu.device import Bench  # noqa: E402
from benchmarks.gpu.dry_machine import DryMachine  # noqa: E402
from benchmarks.gpu.figures import Peaks  # noqa: E402
from benchmarks.gpu.programs.dry_run import write_program  # noqa: E402
from benchmarks.gpu.programs.models import DRY_SPECS  # noqa: E402
from benchmarks.gpu.programs.packing import LADDER_FILE, pack_kernels  # noqa: E402
from benchmarks.gpu.programs.write import described  # noqa: E402
from benchmarks.gpu.proofs import ladder, references, shapes  # noqa: E402

from ingot.pipeline.targets.cuda.kernel_signatures import SIGNATURES  # noqa: E402

# By no packed program.
UNUSED = {"carry_tokens", "gather_columns", "low_rank_expand", "low_rank_shrink", "quantize_rows", "rotate_heads"}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tiny program, and the variants of its kernels."""
    folder = tmp_path_factory.mktemp("programs")
    write_program(DRY_SPECS[0], folder)
    kernels = ladder.rung_kernels(folder)
    pack_kernels(kernels, described(kernels), folder / LADDER_FILE)
    return folder


def bench(programs: Path, folder: Path, part: str, *failed: tuple[str, str]) -> Bench:
    machine = DryMachine(part, ["wrong-kernel"])
    return Bench(machine, programs, folder, folder, 0.0, Peaks(1.0, 1.0, 1.0, 1.0), failed)


def test_a_wrong_kernel_is_found_and_the_ladder_names_the_variant_that_is_right(programs: Path, tmp_path: Path) -> None:
    wrong = []
    with np.errstate(all="ignore"):
        for task in shapes.shapes(bench(programs, tmp_path, "shapes")):
            if not all(record["within"] for record in task.run()):
                wrong.append(task.name)
        assert {name.split()[0] for name in wrong} == {"gather_rows"}
        made = bench(programs, tmp_path, "ladder", ("shapes", wrong[0]))
        tried = {task.name.partition(":")[0]: [*task.run()] for task in ladder.ladder(made)}
    right = {name: [record["right"] for record in records] for name, records in tried.items()}
    assert right == {"one stage": [True], "fewer warps": [False]}
    assert not any("within" in record for records in tried.values() for record in records)


def test_nothing_is_tried_where_nothing_failed(programs: Path, tmp_path: Path) -> None:
    assert ladder.ladder(bench(programs, tmp_path, "ladder")) == []


def test_every_kernel_that_programs_use_has_a_reference() -> None:
    assert set(references.REFERENCES) == set(SIGNATURES) - UNUSED
