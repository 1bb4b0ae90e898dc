"""The baseline is built once per recipe, checkpoint and tokenizer; an artifact is measured again against it."""

import shutil
from pathlib import Path

import pytest

from ingot.artifact import open_artifact
from ingot.builder import build, remeasure
from ingot.builder.baseline import baseline_artifact, with_checkpoint
from ingot.errors import RecipeError, UsageError
from ingot.pipeline.recipe.load import load_recipe
from ingot.pipeline.recipe.schema import Recipe
from tests.conftest import UNMEASURED, BuildArtifact
from tests.data_paths import FIXTURES

LLAMA = FIXTURES / "checkpoints" / "llama"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def recipe(name: str, checkpoint: Path, *overrides: str) -> Recipe:
    return load_recipe(name, [f"checkpoint={checkpoint}", *UNMEASURED, "generate=null", *overrides])


def test_recipes_that_differ_in_quantization_share_a_baseline_without_it(cache: Path) -> None:
    first = baseline_artifact(recipe("int4-cpu", LLAMA))
    written = (first / "manifest.json").stat().st_mtime_ns
    assert first.parent == cache / "baselines"
    assert baseline_artifact(recipe("int4-cpu", LLAMA, "passes.quantize-weights.bits=8")) == first
    assert (first / "manifest.json").stat().st_mtime_ns == written
    names = [entry.name for entry in with_checkpoint(open_artifact(first), None).passes]
    assert "quantize-weights" not in names
    assert "pack-projections" in names


def test_a_damaged_baseline_is_built_again() -> None:
    folder = baseline_artifact(recipe("fp32-cpu", LLAMA))
    identity = open_artifact(folder).manifest.identity
    weights = folder / "program" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    assert baseline_artifact(recipe("fp32-cpu", LLAMA)) == folder
    assert open_artifact(folder).manifest.identity == identity


def test_a_tokenizer_file_is_part_of_the_key(tmp_path: Path) -> None:
    shutil.copytree(LLAMA, tmp_path / "model")
    first = baseline_artifact(recipe("fp32-cpu", tmp_path / "model"))
    (tmp_path / "model" / "tokenizer_config.json").write_text("{}")
    assert baseline_artifact(recipe("fp32-cpu", tmp_path / "model")) != first


def test_measuring_again_requires_a_baseline_or_a_checkpoint_and_something_to_measure(
    build_unmeasured: BuildArtifact,
) -> None:
    artifact = build_unmeasured("fp32-cpu", LLAMA, "generate=null")
    with pytest.raises(UsageError, match=r"no baseline to compare with; add --baseline ARTIFACT, or --checkpoint FOLD"):
        remeasure(artifact.path)
    with pytest.raises(UsageError, match=r"measures nothing: set evaluation\.text or latency"):
        remeasure(artifact.path, checkpoint=LLAMA)


def test_an_artifact_is_measured_again_with_other_gates(
    build_unmeasured: BuildArtifact, memory_of_this_process: None
) -> None:
    artifact = build_unmeasured("fp32-cpu", LLAMA, "generate=null")
    before = artifact.manifest
    evidence = remeasure(artifact.path, checkpoint=LLAMA, overrides=["gates={size_ratio: {max: 0.1}}"])
    assert [(gate.name, gate.verdict) for gate in evidence.gates] == [("size_ratio", "FAIL")]
    assert open_artifact(artifact.path).manifest == before


@pytest.mark.parametrize(
    ("override", "error", "message"),
    [
        (
            "latency={prompt_tokens: 4096}",
            RecipeError,
            r"latency\.prompt_tokens \+ .* is 4160, and the model's context",
        ),
        ("evaluation={text: gone.txt}", UsageError, r"evaluation\.text 'gone\.txt' is not a file"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_a_baseline_is_built(
    build_unmeasured: BuildArtifact,
    monkeypatch: pytest.MonkeyPatch,
    override: str,
    error: type[Exception],
    message: str,
) -> None:
    artifact = build_unmeasured("fp32-cpu", LLAMA, "generate=null")

    def fail(*arguments: object) -> None:
        raise AssertionError("a baseline was built")

    monkeypatch.setattr("ingot.builder.baseline.baseline_artifact", fail)
    with pytest.raises(error, match=message):
        remeasure(artifact.path, checkpoint=LLAMA, overrides=[override])


def test_measuring_again_keeps_the_origin_and_warns_of_another_checkpoint(
    tmp_path: Path, memory_of_this_process: None, caplog: pytest.LogCaptureFixture
) -> None:
    size = ["gates={size_ratio: {max: 2}}"]
    sealed = build("fp32-cpu", [f"checkpoint={LLAMA}", *size], tmp_path / "out").artifact.path
    same = remeasure(sealed, checkpoint=LLAMA).notes.origin
    assert same is not None
    assert (same.recipe, same.checkpoint) == ("fp32-cpu", "llama")
    assert caplog.messages == []
    assert remeasure(sealed, checkpoint=LLAMA.with_name("llama-rope-linear")).notes.origin == same
    [warning] = caplog.messages
    assert f"was built from the checkpoint llama with digest {same.checkpoint_digest[:16]}, but llama-rope" in warning


def test_an_artifact_without_evidence_has_the_origin_of_the_given_checkpoint(
    build_unmeasured: BuildArtifact, memory_of_this_process: None
) -> None:
    artifact = build_unmeasured("fp32-cpu", LLAMA, "generate=null")
    origin = remeasure(artifact.path, checkpoint=LLAMA, overrides=["gates={size_ratio: {max: 2}}"]).notes.origin
    assert origin is not None
    assert origin.checkpoint == "llama"
