"""The GPU benchmark without a GPU: every part on tiny shapes, and its summary."""

from importlib import import_module
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tests.simulators.triton_interpreter import use_interpreter, use_ordered_dots

use_interpreter()

from benchmarks.gpu.device import Bench  # noqa: E402
from benchmarks.gpu.dry_machine import DryMachine  # noqa: E402
from benchmarks.gpu.figures import (  # noqa: E402
    Peaks,
    goals,
    summary,
)
from benchmarks.gpu.journal import Journal  # noqa: E402
from benchmarks.gpu.parts import PARTS  # noqa: E402
from benchmarks.gpu.programs.dry_run import write_programs  # noqa: E402
from benchmarks.gpu.programs.write import described  # noqa: E402
from benchmarks.gpu.proofs.latent_references import LATENTS  # noqa: E402
from benchmarks.gpu.proofs.recurrence_references import RECURRENCES  # noqa: E402
from benchmarks.gpu.run import wrong_count  # noqa: E402
from benchmarks.gpu.times import attention as gpu_attention  # noqa: E402
from benchmarks.gpu.worker import run_tasks  # noqa: E402

Figure = dict[str, Any]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny ones."""
    return write_programs(tmp_path_factory.mktemp("programs"))


@pytest.fixture(scope="module")
def journal(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Journal:
    """The events of all parts, run in this process."""
    folder = tmp_path_factory.mktemp("gpu")
    made = Journal(folder / "journal.jsonl")
    with pytest.MonkeyPatch.context() as patch, np.errstate(invalid="ignore"):  # kernels alone run on any device
        use_ordered_dots(patch)
        for name, part in PARTS.items():
            patch.setenv("INGOT_CUDA_BLOCKING", part.environment.get("INGOT_CUDA_BLOCKING", "0"))
            bench = Bench(DryMachine(), programs, folder, folder, 60.0, Peaks(1.0, 1.0, 1.0, 1.0))
            module, _, function = part.function.partition(":")
            given: object = bench if part.needs_device else {"failed": []}
            tasks = getattr(import_module(module), function)(given)
            run_tasks(tasks, [], None, bench, lambda name=name, **event: made.write(name, event))
    return made


@pytest.fixture(scope="module")
def records(journal: Journal) -> list[Figure]:
    """The records of all parts."""
    return journal.records


def test_every_task_of_every_part_is_done(journal: Journal) -> None:
    assert {name: log.errors for name, log in journal.parts.items() if log.errors} == {}
    assert {name for name, log in journal.parts.items() if log.status != "done"} == set()


def test_every_kernel_of_the_programs_is_right_in_its_own_shape_and_tile(records: list[Figure]) -> None:
    found = of(records, "shape")
    assert all(record["within"] for record in found)
    kernels = {record["kernel"] for record in found}
    assert {
        "matmul",
        "matmul_int4",
        "matmul_nbits",
        "decode_attention",
        "ragged_attention",
        "rotary_kv_write",
    } <= kernels
    assert {"fixed_split_attention", "gather_quantized_rows", "draw"} <= kernels
    assert {"route_rows", "sort_by_expert", "combine_experts", "grouped_matmul", "grouped_matmul_int4"} <= kernels
    assert {*RECURRENCES, *LATENTS} <= kernels


def test_every_packed_kernel_loads_and_a_launch_its_capture_and_replay_are_exact(records: list[Figure]) -> None:
    assert [(record["way"], record["wrong"]) for record in of(records, "launch")] == [
        ("launch", 0),
        ("capture", 0),
        ("replay", 0),
    ]


def of(records: list[Figure], figure: str) -> list[Figure]:
    return [record for record in records if record["figure"] == figure]


def test_every_kernel_of_a_step_is_measured_with_its_share_of_the_roofline(records: list[Figure]) -> None:
    kernels = {record["kernel"].split()[0] for record in of(records, "kernel")}
    assert {
        "matmul_int4",
        "matmul_nbits",
        "rms_norm",
        "decode_attention",
        "ragged_attention",
        "rotary_kv_write",
    } <= kernels
    assert all(record["share_of_roofline"] >= 0 for record in of(records, "kernel"))
    assert {record["phase"] for record in of(records, "step")} == {"decode", "prefill"}


def test_launches_on_the_device_equal_the_interpreters(records: list[Figure]) -> None:
    checked = of(records, "check")
    assert {"out", "q_out", "pool", "sums", "tokens"} <= {record["argument"] for record in checked}
    assert [record for record in checked if not record["within"]] == []


def test_batch_invariant_programs_have_equal_bits_in_all_ways_to_compute_a_row(records: list[Figure]) -> None:
    found = of(records, "invariance")
    judged = [record for record in found if "within" in record]
    assert all(record["within"] for record in judged)
    ways = {"decoded alone", "in chunks", "as speculation's rows", "decoded with 1 mates"}
    between = "decoded with 1 mates against alone"
    assert {record["way"] for record in judged if "invariant" in record["program"]} == ways | {between}
    assert {record["way"] for record in judged if "invariant" not in record["program"]} == {between}


def test_the_model_end_to_end_has_the_cpu_engines_logits_and_tokens(records: list[Figure]) -> None:
    (demo,) = of(records, "demo")
    assert demo["within"]
    assert demo["likeliest_equal"] == 1


def test_features_of_the_runtime_are_verified_on_an_engine_loaded_from_the_artifact(records: list[Figure]) -> None:
    (found,) = of(records, "verify")
    assert found["within"], found["failures"]
    assert found["cells"] == {"OK": 1}


def test_gap_offload_and_torch_have_their_figures(records: list[Figure]) -> None:
    moved = of(records, "offload")
    assert all(record["bytes_per_second"] > 0 for record in moved if record["way"] in ("save", "restore"))
    blocks_per_step = {record["moving"]: record["blocks_per_step"] for record in moved if record["way"] == "step"}
    assert list(blocks_per_step) == ["no tiers", "nothing", "save", "restore", "save and restore"]
    assert all((count > 0) == (moving not in ("no tiers", "nothing")) for moving, count in blocks_per_step.items())
    gaps = of(records, "gap")
    assert all(record["steps"] > 1 for record in gaps)
    assert {record["rows"] for record in gaps} == {2}
    assert {record["rows"] for record in of(records, "gap of few rows")} == {1}
    assert {record["phase"] for record in of(records, "torch step")} == {"decode", "prefill"}


def test_other_steps_are_those_of_longer_contexts_several_prompts_and_a_filled_pool(records: list[Figure]) -> None:
    found = of(records, "other step")
    prompts, mixed = ([one for one in found if one["kind"] == kind] for kind in ("two prompts", "mixed"))
    assert (2, 4) in {(one["sequences"], one["rows"]) for one in prompts}
    assert all(one["sequences"] > 1 and one["rows"] > one["sequences"] for one in mixed)
    filled = [one for one in found if one["kind"] == "filled pool"]
    assert {one["bucket"] for one in filled} == {"decode-1", "decode-2"}
    assert len({one["pool_bytes"] for one in filled}) == 1
    assert {(one["sampler"], one["rows"]) for one in of(records, "sampler")} == {
        ("greedy", 1), ("greedy", 2), ("draw", 1), ("draw", 2)
    }  # fmt: skip


def test_the_slow_part_is_read_over_context_and_stages_by_layers(records: list[Figure]) -> None:
    found = of(records, "slow part")
    curve, stages = ([one for one in found if one["way"] == way] for way in ("curve", "stage"))
    assert [one["bytes_per_second"] > 0 for one in found if one["way"] == "read"] == [True]
    assert [one["slow_bytes"] > 0 for one in curve] == [one["context"] > one["fast_tokens"] for one in curve]
    assert any(one["slow_bytes"] for one in curve)
    layers = [one["gpu_layers"] for one in stages]
    assert layers == sorted(layers, reverse=True)
    assert layers[-1] == 0 < layers[0]
    predicted = [one["predicted_seconds"] / stages[0]["predicted_seconds"] for one in stages]
    assert predicted[0] == 1 > predicted[-1] > 0


def test_goals_are_met_not_met_or_not_measured(journal: Journal, records: list[Figure]) -> None:
    wrong = wrong_count([log for name, log in journal.parts.items() if PARTS[name].is_proof])
    reached = {str(goal["goal"]): goal["met"] for goal in goals(records, wrong)}
    assert reached["kernels and models that are wrong or failed"] is True
    assert reached["prefill of 4096: share of the matmul peak"] is None
    text = summary(records, goals(records, wrong), journal.parts)
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
