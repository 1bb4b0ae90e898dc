"""Exports of rotated and pruned models, compared with transformers: their config.json fits their tensors."""

from pathlib import Path
from typing import Any

import pytest

from ingot.pipeline.calibrate import CalibrationEngine
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.interchange.export import export_checkpoint
from ingot.pipeline.model.importer import import_checkpoint
from tests.each_case import each_case
from tests.oracle.cases import CASES, Case
from tests.parity import CHECKPOINTS, LOGITS, compare, load_logits
from tests.passes.calibration_data import calibration_data
from tests.pipeline.test_pruned_models import logits, options, recipe
from tests.tolerances import within

torch: Any = pytest.importorskip("torch", reason="the oracle needs torch")
transformers: Any = pytest.importorskip("transformers", reason="the oracle needs transformers")
fixtures: Any = pytest.importorskip("tests.oracle.make_fixtures")

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]


@each_case("name", ["rotate", "prune-structure"])
@each_case("case", [c for c in CASES if c.context_tokens is None], ids=lambda case: case.name)
def test_transformers_gives_the_logits_of_our_import_of_an_export(
    case: Case, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    engine = CalibrationEngine(calibration_data(sequences=4, tokens=24, vocab=64))
    monkeypatch.setattr("ingot.pipeline.interchange.export.calibration_engine", lambda *_: engine)
    rewrite: Any = "rotate" if name == "rotate" else {name: options(case.name)}
    folder = export_checkpoint(recipe(tmp_path, CHECKPOINTS / case.name, rewrite), tmp_path / "out", "safetensors")
    tokens, _ = load_logits(CHECKPOINTS / case.name / LOGITS)
    theirs = fixtures.reference_logits(folder, tokens)
    parity = compare(logits(case.name, import_checkpoint(Checkpoint.open(folder))), theirs)
    assert within("parity.float32", parity.worst, case.name, max(1.0, parity.largest / 4))
