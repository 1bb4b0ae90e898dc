"""Candidates are every recipe with every checkpoint, and artifacts with the checkpoint that they were built from."""

import json
import shutil
from pathlib import Path

import pytest

from ingot.artifact import Artifact
from ingot.builder.compare.candidates import ComparedSources, read_groups
from ingot.errors import RecipeError, UsageError
from tests.builder.compare.conftest import SMALL
from tests.conftest import BuildArtifact


@pytest.fixture(scope="module")
def other(two_layers: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint with another context, in a folder of another name."""
    folder = tmp_path_factory.mktemp("checkpoints") / "other"
    shutil.copytree(two_layers, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 512}))
    return folder


def test_every_recipe_is_a_candidate_for_every_checkpoint(two_layers: Path, other: Path) -> None:
    groups = read_groups(ComparedSources(("int8-cpu", "int4-cpu"), (two_layers, other), SMALL))
    assert [group.name for group in groups] == [two_layers.name, "other"]
    assert [[one.name for one in group.candidates] for group in groups] == [["int8-cpu", "int4-cpu"]] * 2
    assert {group.options.text and group.options.text.name for group in groups} == {"heldout.txt"}
    keys = {one.key for group in groups for one in group.candidates}
    assert len(keys) == 4


def test_a_key_changes_with_what_is_built_alone(two_layers: Path) -> None:
    def key(*overrides: str, gates: tuple[str, ...] = ()) -> str:
        sources = ComparedSources(("int4-cpu",), (two_layers,), (*SMALL, *overrides), gates)
        return read_groups(sources)[0].candidates[0].key

    assert key() == key("evaluation.tokens=2048", gates=("kl_mean=0.1",))
    assert key() != key("passes.quantize-weights.block_size=32")


def test_an_artifact_goes_to_its_own_checkpoint(two_layers: Path, other: Path, measured_alone: Artifact) -> None:
    artifact = str(measured_alone.path)
    groups = read_groups(ComparedSources((artifact, "int8-cpu"), (other, two_layers), SMALL))
    assert {group.name: [one.name for one in group.candidates] for group in groups} == {
        "other": ["int8-cpu"],
        two_layers.name: ["alone", "int8-cpu"],
    }
    with pytest.raises(UsageError, match=r"its baseline is built from its checkpoint: name that with --checkpoint"):
        read_groups(ComparedSources((artifact,), (), SMALL))
    with pytest.raises(UsageError, match=r"whose digest none of the compared checkpoints has \(other\)"):
        read_groups(ComparedSources((artifact,), (other,), SMALL))


def test_an_unmeasured_artifact_goes_to_the_only_checkpoint(
    two_layers: Path, other: Path, build_unmeasured: BuildArtifact
) -> None:
    artifact = str(build_unmeasured("int4-cpu", two_layers).path)
    [group] = read_groups(ComparedSources((artifact,), (two_layers,), SMALL))
    assert [one.name for one in group.candidates] == ["int4-cpu"]
    with pytest.raises(UsageError, match=r"does not record which checkpoint it was built from, and 2 are compared"):
        read_groups(ComparedSources((artifact,), (other, two_layers), SMALL))


def test_gates_replace_those_of_the_recipes(two_layers: Path) -> None:
    sources = ComparedSources(("int8-cpu",), (two_layers,), (*SMALL, "gates={size_ratio: {max: 2}}"), ("kl_mean=0.5",))
    [group] = read_groups(sources)
    assert list(group.candidates[0].recipe.gates) == ["kl_mean"]


def test_mistakes_are_reported_before_any_work(two_layers: Path) -> None:
    [group] = read_groups(ComparedSources(("int8-cpu",), (two_layers,), ("evaluation=null",)))
    with pytest.raises(UsageError, match=r"no recipe names an evaluation text.*give --eval FILE"):
        _ = group.options
    with pytest.raises(UsageError, match=r"two things that are compared have the name .*/int8-cpu: rename one"):
        read_groups(ComparedSources(("int8-cpu", "int8-cpu"), (two_layers,), SMALL))
    with pytest.raises(RecipeError, match="kl_meen"):
        read_groups(ComparedSources(("int8-cpu",), (two_layers,), SMALL, ("kl_meen=1",)))
