"""Layers are dropped by an influence that a build remembers when it is cut off, in its first walk or its second."""

from pathlib import Path
from typing import Any

import pytest

from ingot.passes.calibration import calibrate_with
from ingot.passes.manager import PassManager
from ingot.passes.pruning.prune_structure import PruneStructure
from ingot.pipeline.calibrate import CalibrationEngine
from ingot.pipeline.calibrate.journal import RunJournal
from tests.passes.calibration_data import calibration_data
from tests.passes.tiny_decoder import TinyDecoder
from tests.pipeline.calibrate.test_journal import Killed, bits, journal

STAGES = 2 + 5  # two layers' influence; then q k v, o, gate and up, down of one layer, and the head


def built(root: Path | None) -> dict[str, object]:
    model = TinyDecoder(tied=False, layers=2).model
    kept = None if root is None else journal(root)
    with calibrate_with(CalibrationEngine(calibration_data(), journal=kept)):
        PassManager([PruneStructure(layers=1, ffn=0.5)]).run(model)
    return bits(model)


@pytest.mark.parametrize("stage", range(1, STAGES + 1))
def test_cut_off_at_any_stage_it_ends_in_the_same_bits(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, calls = RunJournal.save, 0

    def cut_off(self: RunJournal, number: int, arrays: Any) -> None:
        nonlocal calls
        calls += 1
        save(self, number, arrays)
        if calls == stage:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(RunJournal, "save", cut_off)
        with pytest.raises(Killed):
            built(tmp_path)
    assert built(tmp_path) == built(None)
