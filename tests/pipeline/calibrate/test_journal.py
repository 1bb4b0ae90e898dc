"""An interrupted calibration resumes at the stage where it stopped, and ends in the same bits."""

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from ingot.passes.base import Pass
from ingot.passes.calibration import calibrate_with
from ingot.passes.manager import PassManager
from ingot.passes.printing import model_to_text
from ingot.passes.pruning.prune_structure import PruneStructure
from ingot.passes.pruning.prune_weights import PruneWeights
from ingot.passes.quantization.awq import Awq
from ingot.passes.quantization.gptq import Gptq
from ingot.passes.quantization.mixed_precision import MixedPrecision
from ingot.passes.quantization.smooth_quant import SmoothQuant
from ingot.pipeline.calibrate import CalibrationEngine
from ingot.pipeline.calibrate.activations import Activations, Snapshots
from ingot.pipeline.calibrate.journal import STALE_DAYS, BuildJournal, RunJournal, code_digest
from ingot.pipeline.calibrate.steps import StepRunner
from tests.passes.calibration_data import calibration_data
from tests.passes.tiny_decoder import TinyDecoder

STAGES = 5  # q k v, o, gate and up, down of one layer, and the head
CHAINS: dict[str, tuple[Pass, ...]] = {
    "gptq": (Gptq(refine=1),),
    "awq": (Awq(steps=2),),
    "awq+gptq": (Awq(steps=2), Gptq(refine=0)),
    "mixed-precision": (MixedPrecision(budget_bits=5.0, lm_head=True, rounding="gptq", tokens=256),),
    "smooth-quant": (SmoothQuant(alpha="auto", steps=2, activations="static", outliers=2),),
    "prune-structure": (PruneStructure(ffn=0.5, kv_groups=1),),
    "prune-weights": (PruneWeights(),),
}
NEVER = 1e9


class Killed(BaseException):
    """Not caught by any handler."""


def journal(root: Path, **options: Any) -> BuildJournal:
    opened = BuildJournal.open(root, "checkpoint", calibration_data(), {"tool": "1"}, options.pop("resume", True))
    return replace(opened, **{"snapshot_seconds": 0.0, **options})


def built(passes: Sequence[Pass], kept: BuildJournal | None, sequences: int = 40, layers: int = 1) -> ir.Model:
    model = TinyDecoder(tied=False, layers=layers).model
    data = calibration_data(sequences)
    with calibrate_with(CalibrationEngine(data, journal=kept)):
        PassManager(passes).run(model)
    return model


def bits(model: ir.Model) -> dict[str, object]:
    """All weights, the graph and the metadata of the model."""
    values = {name: value.const_value for name, value in model.graph.initializers.items()}
    tensors: dict[str, object] = {name: tensor.tobytes() for name, tensor in values.items() if tensor is not None}
    return {**tensors, "": model_to_text(model), **model.metadata_props}


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Warnings about records; an earlier command line may have enabled other loggers."""
    return [one.getMessage() for one in caplog.records if one.name == "ingot.pipeline" and one.levelname == "WARNING"]


def noted(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Notes to the user about resuming."""
    return [message for message in caplog.messages if "stage" in message]


@pytest.fixture
def kill_at(monkeypatch: pytest.MonkeyPatch) -> Any:
    """kill_at(passes, journal, stage, written): interrupt a build at the end of this stage, counted over all passes."""

    def kill(passes: Sequence[Pass], kept: BuildJournal, stage: int, written: bool, layers: int = 1) -> None:
        save, calls = RunJournal.save, 0

        def cut_off(self: RunJournal, number: int, arrays: Any) -> None:
            nonlocal calls
            calls += 1
            if calls < stage or written:
                save(self, number, arrays)
            if calls == stage:
                raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(RunJournal, "save", cut_off)
            with pytest.raises(Killed):
                built(passes, kept, layers=layers)

    return kill


@pytest.fixture
def steps_run(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the steps that run, in order."""
    seen: list[int] = []
    run = StepRunner._run

    def counted(self: StepRunner, number: int) -> None:
        seen.append(number)
        run(self, number)

    monkeypatch.setattr(StepRunner, "_run", counted)
    return seen


@pytest.mark.parametrize("name", CHAINS)
def test_a_build_interrupted_at_any_stage_ends_in_the_same_bits(name: str, tmp_path: Path, kill_at: Any) -> None:
    """With and without snapshots, before and after the stage's record is on disk."""
    passes = CHAINS[name]
    whole = bits(built(passes, None))
    for stage in range(1, STAGES * len(passes) + 1):
        seconds, written = (0.0, NEVER)[stage % 2], stage % 4 < 2
        kill_at(passes, journal(tmp_path / str(stage), snapshot_seconds=seconds), stage, written)
        assert bits(built(passes, journal(tmp_path / str(stage), snapshot_seconds=seconds))) == whole, stage


@pytest.mark.parametrize("stage", range(1, 2 + STAGES + 1))
def test_dropping_layers_interrupted_in_either_run_ends_in_the_same_bits(
    stage: int, tmp_path: Path, kill_at: Any
) -> None:
    """The first run measures the influence of two layers, the second one prunes the layer that is left."""
    passes = [PruneStructure(layers=1, ffn=0.5)]
    kill_at(passes, journal(tmp_path), stage, written=True, layers=2)
    assert bits(built(passes, journal(tmp_path), layers=2)) == bits(built(passes, None, layers=2))


def test_a_resumed_build_repeats_no_step_and_reports_its_stage(
    tmp_path: Path, kill_at: Any, steps_run: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    kill_at(CHAINS["gptq"], journal(tmp_path), 3, written=True)
    assert steps_run == [0, 1, 2]
    steps_run.clear()
    with caplog.at_level(logging.INFO, "ingot.notes"):
        built(CHAINS["gptq"], journal(tmp_path))
    assert noted(caplog) == ["gptq: resumed at stage 4 of 5"]
    assert steps_run == [3, 4]


def test_a_build_interrupted_after_its_passes_runs_no_step(
    tmp_path: Path, steps_run: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    built(CHAINS["awq+gptq"], journal(tmp_path))
    steps_run.clear()
    with caplog.at_level(logging.INFO, "ingot.notes"):
        built(CHAINS["awq+gptq"], journal(tmp_path))
    assert noted(caplog) == ["awq: all 5 stages were done already", "gptq: all 5 stages were done already"]
    assert not steps_run


def test_a_later_pass_resumes_without_repeating_the_earlier_one(
    tmp_path: Path, kill_at: Any, caplog: pytest.LogCaptureFixture
) -> None:
    kill_at(CHAINS["awq+gptq"], journal(tmp_path), STAGES + 3, written=True)
    with caplog.at_level(logging.INFO, "ingot.notes"):
        built(CHAINS["awq+gptq"], journal(tmp_path))
    assert noted(caplog) == ["awq: all 5 stages were done already", "gptq: resumed at stage 4 of 5"]


@pytest.mark.parametrize("change", ["option", "pass before", "data", "checkpoint"])
def test_a_different_build_uses_no_record(
    change: str, tmp_path: Path, kill_at: Any, caplog: pytest.LogCaptureFixture
) -> None:
    kill_at(CHAINS["gptq"], journal(tmp_path), 4, written=True)
    passes, kept, sequences = CHAINS["gptq"], journal(tmp_path), 40
    if change == "option":
        passes = (Gptq(refine=1, damping=0.02),)
    if change == "pass before":
        passes = CHAINS["awq"] + passes
    if change == "data":
        sequences = 39
        kept = BuildJournal.open(tmp_path, "checkpoint", calibration_data(39), {"tool": "1"})
    if change == "checkpoint":
        kept = BuildJournal.open(tmp_path, "another", calibration_data(), {"tool": "1"})
    with caplog.at_level(logging.INFO, "ingot.notes"):
        found = bits(built(passes, kept, sequences))
    assert not noted(caplog)
    assert found == bits(built(passes, None, sequences))


def test_an_added_pass_keeps_the_records_of_earlier_ones(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    built(CHAINS["awq"], journal(tmp_path))
    with caplog.at_level(logging.INFO, "ingot.notes"):
        built(CHAINS["awq"] + CHAINS["gptq"], journal(tmp_path))
    assert noted(caplog) == ["awq: all 5 stages were done already"]


def test_a_damaged_record_or_snapshot_is_recomputed_with_a_warning(
    tmp_path: Path, kill_at: Any, caplog: pytest.LogCaptureFixture
) -> None:
    kill_at(CHAINS["gptq"], journal(tmp_path), 4, written=True)
    (record,) = tmp_path.glob("*/run-0.stage-0003-*.safetensors")
    record.write_bytes(record.read_bytes()[:-3])
    (copy,) = tmp_path.glob("*/run-0.step-*.activations")
    copy = copy.rename(copy.with_name("run-0.step-0002.activations"))
    (copy / "1.npy").write_bytes(b"nothing")
    with caplog.at_level(logging.WARNING, "ingot.pipeline"):
        found = bits(built(CHAINS["gptq"], journal(tmp_path)))
    assert found == bits(built(CHAINS["gptq"], None))
    damaged, again = warned(caplog)
    assert "stage-0003" in damaged
    assert damaged.endswith("is damaged; stage 3 is computed again")
    assert "step-0002.activations are damaged" in again


def test_resume_false_discards_the_records(tmp_path: Path, kill_at: Any, caplog: pytest.LogCaptureFixture) -> None:
    kill_at(CHAINS["gptq"], journal(tmp_path), 4, written=True)
    with caplog.at_level(logging.INFO, "ingot.notes"):
        built(CHAINS["gptq"], journal(tmp_path, resume=False))
    assert not noted(caplog)


def test_a_successful_build_removes_its_records_and_stale_folders(tmp_path: Path) -> None:
    kept = journal(tmp_path)
    built(CHAINS["awq+gptq"], kept)
    assert len(list(tmp_path.iterdir())) == 2
    kept.remove()
    assert not list(tmp_path.iterdir())
    for name, days in (("old", STALE_DAYS + 1), ("new", STALE_DAYS - 1)):
        folder = tmp_path / name
        folder.mkdir()
        stamp = folder.stat().st_mtime - days * 86_400
        os.utime(folder, (stamp, stamp))
    journal(tmp_path)
    assert [folder.name for folder in tmp_path.iterdir()] == ["new"]


def test_a_full_disk_ends_the_journal_but_not_the_build(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "file"
    root.write_text("no folder can be made in a file")
    with caplog.at_level(logging.WARNING, "ingot.pipeline"):
        found = bits(built(CHAINS["gptq"], BuildJournal(root / "journals", "build")))
    assert found == bits(built(CHAINS["gptq"], None))
    (message,) = warned(caplog)
    assert message.endswith("but cannot be resumed after this point")


def test_after_a_full_disk_no_snapshot_is_tried(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("no folder can be made in a file")
    snapshots = Snapshots(tmp_path / "snapshots", "run-0", 0.0, 10**9)
    records = RunJournal(tmp_path / "file/run", "run-0", "gptq", snapshots)
    with caplog.at_level(logging.WARNING, "ingot.pipeline"):
        records.save(0, {"a": np.zeros(1)})
        records.save(1, {"a": np.zeros(1)})
    assert len(warned(caplog)) == 1
    with Activations(1000) as store:
        records.snapshots.offer(1, store)
    assert not (tmp_path / "snapshots").exists()


def test_snapshots_respect_their_size_limit(tmp_path: Path) -> None:
    built(CHAINS["gptq"], journal(tmp_path, snapshot_bytes=1000))
    assert list(tmp_path.glob("*/*.safetensors"))
    assert not list(tmp_path.glob("*/*.activations"))


def test_nothing_is_recorded_without_a_pass_manager(tmp_path: Path) -> None:
    model = TinyDecoder().model
    with calibrate_with(CalibrationEngine(calibration_data(), journal=journal(tmp_path))):
        Gptq(refine=0)(model)
    assert not list(tmp_path.iterdir())


def test_the_data_digest_covers_tokens_and_lengths() -> None:
    data = calibration_data()
    same = replace(data, lengths=np.full(40, 32))
    shorter = replace(data, lengths=np.array([31] + [32] * 39))
    assert data.digest() == same.digest() != shorter.digest()


@pytest.mark.parametrize("file", ["other_pass.py", "other_pass/__init__.py"])
def test_another_distributions_pass_belongs_to_the_code(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = code_digest()
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("TIMES = 8\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    point = EntryPoint("other-pass", "other_pass:OtherPass", "ingot.passes")
    monkeypatch.setattr("ingot.passes.registry.entry_points", lambda group: [point])
    first = code_digest()
    (tmp_path / file).write_text("TIMES = 9\n")
    assert len({alone, first, code_digest()}) == 3
