"""The winner's recipe builds the winner again, from any folder."""

from pathlib import Path

import pytest

from ingot.builder import build
from ingot.builder.compare.results import compare
from ingot.builder.compare.winner import require_recipe_file, winner_file, write_winner
from ingot.errors import UsageError
from ingot.pipeline.recipe.load import load_recipe
from tests.builder.compare.conftest import Compared
from tests.conftest import UNMEASURED


def test_the_written_recipe_builds_the_same_artifact(
    compared: Compared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison = compare(compared.group, compared.outcomes)
    row = next(row for row in comparison.rows if row.name == "int8-cpu")
    file = tmp_path / "folder" / "winner.yaml"
    write_winner(comparison, row, file)
    assert [entry.name for entry in file.parent.iterdir()] == ["winner.yaml"]
    assert file.read_text().startswith(f"# int8-cpu of {compared.group.name}: the best tpot of 3 candidates")
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(file)
    assert recipe.evaluation
    assert recipe.evaluation.tokens == 1024
    assert row.outcome.artifact
    again = build(str(file), [*UNMEASURED, "verify=null", "generate=null"], tmp_path / "int8-cpu").artifact
    assert again.manifest.program_bytes == row.outcome.artifact.manifest.program_bytes
    assert {name: entry for name, entry in again.manifest.files.items() if name.startswith("program/")} == {
        name: entry for name, entry in row.outcome.artifact.manifest.files.items() if name.startswith("program/")
    }


def test_several_winners_have_their_checkpoints_names(compared: Compared) -> None:
    comparison = compare(compared.group, compared.outcomes)
    assert winner_file(Path("winner.yaml"), comparison, 1) == Path("winner.yaml")
    assert winner_file(Path("winner.yaml"), comparison, 2) == Path(f"winner-{compared.group.name}.yaml")
    for name in ("winner.json", "my winner.yaml", "-winner.yaml"):
        with pytest.raises(
            UsageError, match=rf"-o {name}: the winner is a recipe, .*; name a \.yaml file with letters"
        ):
            require_recipe_file(Path(name))
