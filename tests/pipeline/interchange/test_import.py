"""An import has the same weights in one form and a recipe that builds them; a wrong checkpoint is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from ingot.builder import build
from ingot.cli.main import run
from ingot.errors import CheckpointError
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.interchange.export import export_checkpoint
from ingot.pipeline.interchange.import_ import RECIPE, import_foreign
from tests.conftest import UNMEASURED
from tests.data_paths import DEMO_MODEL
from tests.each_case import each_case
from tests.pipeline.checkpoint.formats.test_fixtures_build import FLOATS, WEIGHTS, engine_nodes
from tests.pipeline.checkpoint.formats.tiny_model import quantize, recipe, tiny_checkpoint
from tests.pipeline.checkpoint.formats.whole_fixture import FIXTURES, whole_checkpoint
from tests.pipeline.tiny_checkpoint import edit_tensors


@each_case("name", FIXTURES)
def test_the_folder_holds_the_same_weights_and_as_many_codes(name: str, tmp_path: Path) -> None:
    source = whole_checkpoint(name, tmp_path / "model")
    outcome = import_foreign(source, tmp_path / "out")
    assert outcome.transcoded.proof.equal
    assert list(outcome.warnings) == []
    in_floats = len(FLOATS.get(name, ((), ""))[0])
    assert (outcome.kept, sum(map(len, outcome.floats.values()))) == (len(WEIGHTS) - in_floats, in_floats)
    encoded = Checkpoint.open(outcome.transcoded.folder).encoded
    # Layers with minima are floats there, too; fp8 and activation order keep their codes.
    without_codes = in_floats if name in ("gguf-Q4_1", "gguf-llamacpp-Q3_K_M", "gguf-llamacpp-Q4_K_M") else 0
    assert len(encoded) == len(WEIGHTS) - without_codes


@pytest.mark.parametrize("name", ["autogptq-w3-asym", "gguf-llamacpp-Q3_K_M", "llmcompressor-mxfp4a16"])
def test_its_recipe_builds_with_the_codes(name: str, tmp_path: Path) -> None:
    folder = import_foreign(whole_checkpoint(name, tmp_path / "model"), tmp_path / "out").transcoded.folder
    artifact = build(folder / RECIPE, (*UNMEASURED, "cpu.engine=onnxruntime"), tmp_path / "artifact").artifact
    in_codes = len(WEIGHTS) - len(FLOATS.get(name, ((), ""))[0])
    assert engine_nodes(artifact).count("MatMulNBits") == in_codes


def test_a_plain_model_keeps_its_types(tmp_path: Path) -> None:
    outcome = import_foreign(DEMO_MODEL, tmp_path / "out")
    assert outcome.transcoded.target == "safetensors"
    before, after = (load_file(folder / "model.safetensors") for folder in (DEMO_MODEL, outcome.transcoded.folder))
    assert {name: array.dtype for name, array in before.items()} == {name: a.dtype for name, a in after.items()}


def test_all_errors_are_listed_and_nothing_is_written(tmp_path: Path) -> None:
    made = recipe(tmp_path, tiny_checkpoint(tmp_path / "model"), quantize(symmetric=True, scale_dtype="float16"))
    folder = export_checkpoint(made, tmp_path / "awq", "awq")
    names = [f"model.layers.{n}.mlp.up_proj.scales" for n in (0, 1)]
    edit_tensors(folder, {name: np.full((2, 96), np.inf, np.float16) for name in names})
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up_proj.*infinite.*layers\.1\.mlp\.up_proj.*infinite"):
        import_foreign(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_prints_the_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["import", str(DEMO_MODEL), "-o", str(tmp_path / "one")]) == 0
    text = capsys.readouterr().out
    assert "largest difference 0" in text
    assert "extends: fp32-cpu" in text
    assert run(["import", str(DEMO_MODEL), "-o", str(tmp_path / "two"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["equal"], facts["kept"], facts["recipe"]) == (True, 0, str(tmp_path / "two" / RECIPE))
