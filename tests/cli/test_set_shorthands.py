"""CHECKPOINT, --eval, --calibration and --chat-template are short for --set, and do not contradict it."""

from pathlib import Path

import pytest

from ingot.cli.main import run
from ingot.cli.set_shorthands import KEYS, with_shorthands
from ingot.errors import UsageError
from ingot.pipeline.recipe.load import load_recipe
from tests.conftest import UNMEASURED

Captured = pytest.CaptureFixture[str]


def test_a_shorthand_is_added_after_the_settings() -> None:
    given = {"--eval": Path("a b: #1.txt"), "CHECKPOINT": None}
    assert with_shorthands(("seed=1",), given) == ("seed=1", 'evaluation.text="a b: #1.txt"')


def test_the_keys_are_keys_of_recipes() -> None:
    paths = {name: Path("x") for name in KEYS if name != "--chat-template"}
    recipe = load_recipe("int4-gptq-cpu", with_shorthands((), paths))
    assert recipe.checkpoint is not None
    assert recipe.evaluation is not None
    assert recipe.calibration is not None
    assert {recipe.checkpoint.given, recipe.evaluation.text.given, str(recipe.calibration.text)} == {"x"}


@pytest.mark.parametrize("override", ["evaluation.text=b", "evaluation=null", " evaluation = {text: b}"])
def test_a_contradiction_is_refused(override: str) -> None:
    with pytest.raises(UsageError, match=r"--eval a and --set .* both set evaluation.text; leave one of them out"):
        with_shorthands((override,), {"--eval": Path("a")})


def test_settings_of_the_same_section_do_not_contradict() -> None:
    assert with_shorthands(("evaluation.tokens=100",), {"--eval": Path("a")})[1] == 'evaluation.text="a"'


@pytest.mark.usefixtures("memory_of_this_process")
def test_a_checkpoint_and_a_text_are_enough_for_a_measured_build(
    two_layers: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my model").symlink_to(two_layers)
    (tmp_path / "text.txt").write_text((two_layers / "heldout.txt").read_text(encoding="utf-8")[:4000])
    settings = ("evaluation.tokens=128", "evaluation.window_tokens=64", "evaluation.layer_kl_tokens=0", "gates={}")
    options = [part for setting in (*settings, "latency=null") for part in ("--set", setting)]
    assert run(["build", "int4-cpu", "./my model", "--eval", "text.txt", "-o", "out", *options]) == 0
    shown = capsys.readouterr().out
    assert "Top-1 agreement" in shown
    assert "sealed out (" in shown


def test_an_export_takes_a_checkpoint_and_an_artifact_none(two_layers: Path, tmp_path: Path, capsys: Captured) -> None:
    out = str(tmp_path / "out")
    assert run(["export", "fp32-cpu", str(two_layers), "--to", "safetensors", "-o", out]) == 0
    assert run(["build", "fp32-cpu", str(two_layers), "-o", f"{out}-a", *(f"--set={one}" for one in UNMEASURED)]) == 0
    capsys.readouterr()
    assert run(["export", f"{out}-a", str(two_layers), "--to", "safetensors", "-o", f"{out}-b"]) == 2
    assert "is an artifact, whose weights are fixed: --set checkpoint=" in capsys.readouterr().err
