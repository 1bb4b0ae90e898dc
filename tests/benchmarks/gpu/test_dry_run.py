"""The GPU benchmark without a GPU: every part on tiny shapes, and its summary."""

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tests.simulators.triton_interpreter import use_interpreter, use_ordered_dots

use_interpreter()

from benchmarks.gpu import attention as gpu_attention  # noqa: E402
from benchmarks.gpu.device import Bench  # noqa: E402
from benchmarks.gpu.dry_run import DryMachine, write_programs  # noqa: E402
from benchmarks.gpu.figures import (  # noqa: E402
    Peaks,
    goals,
    summary,
)
from benchmarks.gpu.programs import described  # noqa: E402
from benchmarks.gpu.run import PARTS, run_part  # noqa: E402

Figure = dict[str, Any]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny ones."""
    return write_programs(tmp_path_factory.mktemp("programs"))


@pytest.fixture(scope="module")
def records(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Figure]:
    """The records of all parts, run in this process."""
    folder = tmp_path_factory.mktemp("gpu")
    peaks = {"bytes_per_second": 1.0, "flops_per_second": 1.0, "to_device": 1.0, "to_host": 1.0}
    found: list[Figure] = []
    with pytest.MonkeyPatch.context() as patch, np.errstate(invalid="ignore"):  # kernels alone run on any device
        use_ordered_dots(patch)
        patch.setattr("builtins.print", lambda text, **_: found.append(json.loads(text)))
        for part in PARTS:
            patch.setenv("INGOT_CUDA_BLOCKING", "1" if part == "check" else "0")
            run_part(part, str(programs), str(folder), str(folder), 60.0, peaks, dry_run=True)
    return found


def of(records: list[Figure], figure: str) -> list[Figure]:
    return [record for record in records if record["figure"] == figure]


def test_every_kernel_of_a_step_is_measured_with_its_share_of_the_roofline(records: list[Figure]) -> None:
    kernels = {record["kernel"].split()[0] for record in of(records, "kernel")}
    assert {"matmul_nbits", "rms_norm", "decode_attention", "ragged_attention", "rotary_kv_write"} <= kernels
    assert all(record["share_of_roofline"] >= 0 for record in of(records, "kernel"))
    assert {record["phase"] for record in of(records, "step")} == {"decode", "prefill"}


def test_launches_on_the_device_equal_the_interpreters(records: list[Figure]) -> None:
    checked = of(records, "check")
    assert {"out", "q_out", "pool", "sums", "tokens"} <= {record["argument"] for record in checked}
    assert [record for record in checked if not record["within"]] == []


def test_batch_invariant_programs_have_equal_bits_in_all_ways_to_compute_a_row(records: list[Figure]) -> None:
    found = of(records, "invariance")
    judged = [record for record in found if "within" in record]
    assert {record["program"] for record in judged} == {"tiny-int4-kv-16-bit-batch-invariant"}
    assert all(record["within"] for record in judged)
    assert {"decoded alone", "in chunks", "as speculation's rows", "decoded with 1 mates"} == {r["way"] for r in found}


def test_the_model_end_to_end_has_the_cpu_engines_logits_and_tokens(records: list[Figure]) -> None:
    (demo,) = of(records, "demo")
    assert demo["within"]
    assert demo["likeliest_equal"] == 1


def test_gap_offload_and_torch_have_their_figures(records: list[Figure]) -> None:
    moved = of(records, "offload")
    assert all(record["bytes_per_second"] > 0 for record in moved if record["way"] in ("save", "restore"))
    blocks_per_step = {record["moving"]: record["blocks_per_step"] for record in moved if record["way"] == "step"}
    assert list(blocks_per_step) == ["no tiers", "nothing", "save", "restore", "save and restore"]
    assert all((count > 0) == (moving not in ("no tiers", "nothing")) for moving, count in blocks_per_step.items())
    assert all(record["steps"] > 1 for record in of(records, "gap"))
    assert {record["phase"] for record in of(records, "torch step")} == {"decode", "prefill"}


def test_goals_are_met_not_met_or_not_measured(records: list[Figure]) -> None:
    reached = {str(goal["goal"]): goal["met"] for goal in goals(records)}
    assert reached["kernels and models beyond their limits"] is True
    assert reached["prefill of 4096: share of the matmul peak"] is None
    text = summary(records, goals(records))
    assert "not measured" in text
    assert "tiny-16-bit-kv-int8 decode-1" in text


def test_attention_is_measured_in_other_tiles_with_the_arguments_of_the_program(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_attention, "compile_kernels", lambda kernels, sm: described(kernels))
    for name, values in {"_TILES": (16, 32), "_WARPS": (4, 4), "_STAGES": (3,), "_QUERIES": (8,)}.items():
        monkeypatch.setattr(gpu_attention, name, values)
    bench = Bench(DryMachine(), programs, tmp_path, tmp_path, 0.0, Peaks(1.0, 1.0, 1.0, 1.0))
    with np.errstate(invalid="ignore"):
        found = list(gpu_attention.variants(bench, programs / "tiny-16-bit-kv-int8.zip"))
    kinds = {(cast(list[str], record["kernels"])[0], record["variant"]) for record in found}
    assert ("decode_attention", "as built") in kinds
    assert ("decode_attention", "16 4 3") in kinds
    assert ("ragged_attention", "32 8 4 3") in kinds
