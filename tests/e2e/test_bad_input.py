"""Bad input at the command line: one clear error, exit code 1 or 2, no traceback, no files left."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ingot.artifact import Artifact
from ingot.cli.main import run
from tests.cli.refusals import assert_refused
from tests.conftest import UNMEASURED, BuildArtifact
from tests.data_paths import DEMO_MODEL
from tests.each_case import each_case

Change = Callable[[Path], None]


def edit_config(**changes: object) -> Change:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


def edit_tensors(edit: Callable[[dict[str, np.ndarray]], None]) -> Change:
    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors")

    return change


def set_value(name: str, value: float) -> Change:
    def edit(tensors: dict[str, np.ndarray]) -> None:
        tensors[name].reshape(-1)[7] = value

    return edit_tensors(edit)


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def oversize_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes((1 << 60).to_bytes(8, "little") + file.read_bytes()[8:])


def index_without_shard(folder: Path) -> None:
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    weight_map = dict.fromkeys(names, "model-00001-of-00002.safetensors")
    weight_map["model.norm.weight"] = "model-00002-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


Q_PROJ = "model.layers.2.self_attn.q_proj.weight"
CHECKPOINTS: dict[str, tuple[Change, str]] = {
    "missing weights": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
    "truncated weights": (truncate, "model.safetensors"),
    "oversized header": (oversize_header, "header"),
    "missing shard": (index_without_shard, "model-00002-of-00002.safetensors"),
    "wrong shape": (edit_tensors(lambda t: t.update({Q_PROJ: t[Q_PROJ][:, :128]})), Q_PROJ),
    "missing tensor": (edit_tensors(lambda t: (t.pop(Q_PROJ), None)[1]), Q_PROJ),
    "NaN": (set_value(Q_PROJ, np.nan), f"{Q_PROJ}' in model.safetensors has 1 NaN and 0 Inf"),
    "Inf": (set_value("model.norm.weight", np.inf), "model.norm.weight' in model.safetensors has 0 NaN and 1 Inf"),
    "unknown model_type": (edit_config(model_type="lama"), "model_type is 'lama', which Ingot does not import"),
    "unknown activation": (edit_config(hidden_act="silo"), "silo"),
    "unknown rope type": (edit_config(rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}), "spiral"),
    "config contradicts tensors": (edit_config(num_hidden_layers=7), "layers.6"),
    "heads that do not divide": (edit_config(num_attention_heads=7), "num_attention_heads"),
    "config is not JSON": (break_config, "is not JSON"),
}


@each_case("name", CHECKPOINTS)
def test_a_bad_checkpoint_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    change, wanted = CHECKPOINTS[name]
    shutil.copytree(DEMO_MODEL, tmp_path / "model")
    change(tmp_path / "model")
    settings = [part for s in (f"checkpoint={tmp_path / 'model'}", *UNMEASURED) for part in ("--set", s)]
    code = run(["build", "demo", *settings, "-o", str(tmp_path / "out/demo")])
    assert_refused(code, capsys.readouterr().err, wanted)
    assert not (tmp_path / "out/demo").exists()
    assert list(tmp_path.glob("out/*")) == []


def test_three_mistakes_in_a_recipe_are_all_told_with_their_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("extends: int4-cpu\ncheckpont: model\npasses:\n  - fuse-everything\nlatency:\n  rounds: many\n")
    code = run(["build", str(recipe), "-o", str(tmp_path / "out")])
    shown = capsys.readouterr().err
    assert_refused(code, shown, "mine.yaml:2", expected_code=2)
    assert "Did you mean 'checkpoint'?" in shown
    assert "mine.yaml:4" in shown
    assert "mine.yaml:6" in shown
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.yaml"]


def test_an_evaluation_text_too_short_is_refused_with_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short.txt").write_text("def f(): pass\n" * 10)
    settings = ["--set", f"evaluation.text={tmp_path / 'short.txt'}", "--set", "latency=null", "--set", "gates={}"]
    code = run(["build", "demo", *settings, "-o", str(tmp_path / "out/demo")])
    assert_refused(code, capsys.readouterr().err, "the text has 50 tokens; 60 windows of 512 need 30721")
    assert not (tmp_path / "out/demo").exists()


@pytest.fixture
def artifact(build_unmeasured: BuildArtifact) -> Artifact:
    return build_unmeasured("int4-cpu")


@pytest.mark.parametrize("command", ["run", "inspect", "validate"])
def test_a_damaged_artifact_is_refused_by_every_command(
    artifact: Artifact, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    shutil.copytree(artifact.path, tmp_path / "copy")
    weights = tmp_path / "copy/program/weights.safetensors"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 4
    weights.write_bytes(data)
    code = run([command, str(tmp_path / "copy"), *(["x"] if command == "run" else [])])
    assert_refused(code, capsys.readouterr().err, "weights.safetensors: its SHA-256 is not the manifest's")


@each_case(
    ("arguments", "wanted"),
    [
        (["biuld", "demo"], "Did you mean 'build'?"),
        (["build", "dmeo"], "demo"),
        (["build", "int4-cpu"], "names no checkpoint"),
        (["build", "demo", "--set", "evaluation.tokns=1"], "tokens"),
        (["build", "demo", "--set", "target=cpuu"], "Did you mean 'cpu'?"),
        (["build", "demo", "--print-ir-after", "clean-upp"], "Did you mean 'clean-up'?"),
        (["passes", "quantise-weights"], "Did you mean 'quantize-weights'?"),
        (["recipes", "int5-cpu"], "int4-cpu"),
        (["validate"], "ARTIFACT"),
    ],
)
def test_a_wrong_command_line_is_refused_with_the_nearest_name(
    capsys: pytest.CaptureFixture[str], arguments: list[str], wanted: str
) -> None:
    assert_refused(run(arguments), capsys.readouterr().err, wanted, expected_code=2)


def test_what_is_no_artifact_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(run(["inspect", str(tmp_path)]), capsys.readouterr().err, "holds no manifest.json")


def test_an_output_that_is_no_artifact_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    code = run(["build", "demo", "-o", str(tmp_path)])
    assert_refused(code, capsys.readouterr().err, "exists and is not an artifact")
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
