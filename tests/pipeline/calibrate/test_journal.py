"""A calibration that was cut off goes on at the stage where it stopped, and ends in the same bits."""

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
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
from ingot.pipeline.calibrate.journal import STALE_DAYS, BuildJournal, RunJournal
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
    """No handler of ours catches it."""


def journal(root: Path, **options: Any) -> BuildJournal:
    opened = BuildJournal.open(root, "checkpoint", calibration_data(), {"tool": "1"}, options.pop("resume", True))
    return replace(opened, **{"snapshot_seconds": 0.0, **options})


def built(passes: Sequence[Pass], kept: BuildJournal | None, sequences: int = 40) -> ir.Model:
    model = TinyDecoder(tied=False, layers=1).model
    data = calibration_data(sequences)
    with calibrate_with(CalibrationEngine(data, journal=kept)):
        PassManager(passes).run(model)
    return model


def bits(model: ir.Model) -> dict[str, object]:
    """Everything that the model is made of."""
    values = {name: value.const_value for name, value in model.graph.initializers.items()}
    tensors: dict[str, object] = {name: tensor.tobytes() for name, tensor in values.items() if tensor is not None}
    return {**tensors, "": model_to_text(model), **model.metadata_props}


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Warnings about records; a command line that ran before may have made other logs talkative."""
    return [one.getMessage() for one in caplog.records if one.name == "ingot.pipeline" and one.levelname == "WARNING"]


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the user is told of resuming."""
    return [message for message in caplog.messages if "stage" in message]


@pytest.fixture
def kill_at(monkeypatch: pytest.MonkeyPatch) -> Any:
    """kill_at(passes, root, stage, written): cut a build off when that stage, of all passes', ends."""

    def kill(passes: Sequence[Pass], kept: BuildJournal, stage: int, written: bool) -> None:
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
                built(passes, kept)

    return kill


@pytest.fixture
def steps_run(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Which levels are run, as they are."""
    seen: list[int] = []
    run = StepRunner._run

    def counted(self: StepRunner, number: int) -> None:
        seen.append(number)
        run(self, number)

    monkeypatch.setattr(StepRunner, "_run", counted)
    return seen


@pytest.mark.parametrize("name", CHAINS)
def test_cut_off_at_any_stage_it_ends_in_the_same_bits(name: str, tmp_path: Path, kill_at: Any) -> None:
    """With copies of the activations and without, before what was decided is on disk and behind it."""
    passes = CHAINS[name]
    whole = bits(built(passes, None))
    for stage in range(1, STAGES * len(passes) + 1):
        seconds, written = (0.0, NEVER)[stage % 2], stage % 4 < 2
        kill_at(passes, journal(tmp_path / str(stage), snapshot_seconds=seconds), stage, written)
        assert bits(built(passes, journal(tmp_path / str(stage), snapshot_seconds=seconds))) == whole, stage


def test_a_resumed_build_does_nothing_twice_and_says_where_it_goes_on(
    tmp_path: Path, kill_at: Any, steps_run: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    kill_at(CHAINS["gptq"], journal(tmp_path), 3, written=True)
    assert steps_run == [0, 1, 2]
    steps_run.clear()
    with caplog.at_level(logging.INFO, "ingot.notes"):
        built(CHAINS["gptq"], journal(tmp_path))
    assert told(caplog) == ["gptq: resumed at stage 4 of 5"]
    assert steps_run == [3, 4]


def test_a_build_that_was_cut_off_behind_its_passes_runs_no_level_at_all(
    tmp_path: Path, steps_run: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    built(CHAINS["awq+gptq"], journal(tmp_path))
    steps_run.clear()
    with caplog.at_level(logging.INFO, "ingot.notes"):
        built(CHAINS["awq+gptq"], journal(tmp_path))
    assert told(caplog) == ["awq: all 5 stages were done already", "gptq: all 5 stages were done already"]
    assert not steps_run


def test_a_pass_behind_another_goes_on_without_the_other_s_work(
    tmp_path: Path, kill_at: Any, caplog: pytest.LogCaptureFixture
) -> None:
    kill_at(CHAINS["awq+gptq"], journal(tmp_path), STAGES + 3, written=True)
    with caplog.at_level(logging.INFO, "ingot.notes"):
        built(CHAINS["awq+gptq"], journal(tmp_path))
    assert told(caplog) == ["awq: all 5 stages were done already", "gptq: resumed at stage 4 of 5"]


@pytest.mark.parametrize("change", ["option", "pass before", "data", "checkpoint"])
def test_nothing_is_recalled_for_another_build(
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
    assert not told(caplog)
    assert found == bits(built(passes, None, sequences))


def test_a_pass_that_follows_changes_nothing_for_those_before_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    built(CHAINS["awq"], journal(tmp_path))
    with caplog.at_level(logging.INFO, "ingot.notes"):
        built(CHAINS["awq"] + CHAINS["gptq"], journal(tmp_path))
    assert told(caplog) == ["awq: all 5 stages were done already"]


def test_a_damaged_record_and_damaged_activations_are_done_again_with_a_warning(
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


def test_to_start_afresh_what_was_kept_is_thrown_away(
    tmp_path: Path, kill_at: Any, caplog: pytest.LogCaptureFixture
) -> None:
    kill_at(CHAINS["gptq"], journal(tmp_path), 4, written=True)
    with caplog.at_level(logging.INFO, "ingot.notes"):
        built(CHAINS["gptq"], journal(tmp_path, resume=False))
    assert not told(caplog)


def test_a_build_that_ends_well_removes_what_it_kept_and_old_folders_go(tmp_path: Path) -> None:
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


def test_a_disk_that_is_full_ends_the_journal_and_not_the_build(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "file"
    root.write_text("no folder can be made in a file")
    with caplog.at_level(logging.WARNING, "ingot.pipeline"):
        found = bits(built(CHAINS["gptq"], BuildJournal(root / "journals", "build")))
    assert found == bits(built(CHAINS["gptq"], None))
    (message,) = warned(caplog)
    assert message.endswith("but cannot be resumed after this point")


def test_copies_of_activations_are_no_larger_than_allowed(tmp_path: Path) -> None:
    built(CHAINS["gptq"], journal(tmp_path, snapshot_bytes=1000))
    assert list(tmp_path.glob("*/*.safetensors"))
    assert not list(tmp_path.glob("*/*.activations"))


def test_without_a_manager_nothing_is_kept(tmp_path: Path) -> None:
    model = TinyDecoder().model
    with calibrate_with(CalibrationEngine(calibration_data(), journal=journal(tmp_path))):
        Gptq(refine=0)(model)
    assert not list(tmp_path.iterdir())


def test_data_differ_by_their_tokens_and_lengths_alone() -> None:
    data = calibration_data()
    same = replace(data, lengths=np.full(40, 32))
    shorter = replace(data, lengths=np.array([31] + [32] * 39))
    assert data.digest() == same.digest() != shorter.digest()
