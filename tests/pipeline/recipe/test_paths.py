"""Every missing path of a recipe is reported at once, at its key."""

from pathlib import Path

import pytest

from ingot.errors import RecipeError
from ingot.pipeline.recipe.load import load_recipe
from ingot.pipeline.recipe.paths import require_paths
from ingot.pipeline.recipe.schema import Recipe
from tests.pipeline.recipe.recipe_files import written

TEXT = """\
checkpoint: nowhere
chat_template: none.jinja
evaluation:
  text: gone.txt
calibration: {text: lost.jsonl}
gpu: {tiles: tiles.json}
passes: [gptq]
"""


def missing(recipe: Recipe) -> list[str]:
    """The missing paths as "line:column: message"."""
    with pytest.raises(RecipeError) as caught:
        require_paths(recipe)
    return [f"{problem.line}:{problem.column}: {problem.message}" for problem in caught.value.problems]


def test_every_missing_path_is_reported_at_once_with_its_place(tmp_path: Path) -> None:
    found = missing(load_recipe(written(tmp_path, TEXT)))
    starts = [
        "1:1: checkpoint 'nowhere' is not a folder or GGUF file (looked for ",
        "2:1: chat_template 'none.jinja' is not a file (looked for ",
        "4:3: evaluation.text 'gone.txt' is not a file (looked for ",
        "5:15: calibration.text 'lost.jsonl' is not a file or folder (looked for ",
        "6:7: gpu.tiles 'tiles.json' is not a file (looked for ",
    ]
    assert len(found) == len(starts)
    for problem, start in zip(found, starts, strict=True):
        assert problem.startswith(start)


def test_a_text_in_a_missing_checkpoint_is_not_reported_too(tmp_path: Path) -> None:
    found = missing(load_recipe(written(tmp_path, "checkpoint: nowhere\nevaluation: {text: 'checkpoint:held.txt'}")))
    assert len(found) == 1


def test_a_missing_text_of_an_existing_checkpoint_is_reported(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    found = missing(load_recipe(written(tmp_path, "checkpoint: model\nevaluation: {text: 'checkpoint:held.txt'}")))
    assert [problem.split(" is not")[0] for problem in found] == ["2:14: evaluation.text 'checkpoint:held.txt'"]


def test_paths_that_a_recipe_needs_and_does_not_name_are_reported(tmp_path: Path) -> None:
    file = written(tmp_path, "extends: int4-gptq-cpu\n")
    with pytest.raises(RecipeError, match="2 problems in ") as caught:
        require_paths(load_recipe(file))
    checkpoint, text = caught.value.problems
    assert (checkpoint.line, Path(checkpoint.file).name) == (0, "mine.yaml")
    assert checkpoint.message.startswith("names no checkpoint; set it with --set checkpoint=")
    assert text.message.startswith("names no calibration text; set it with --set calibration.text=")


def test_a_path_given_on_the_command_line_is_reported_there(tmp_path: Path) -> None:
    recipe = load_recipe(written(tmp_path, TEXT), ["checkpoint=elsewhere", "evaluation=null", "calibration.text=t.txt"])
    with pytest.raises(RecipeError) as caught:
        require_paths(recipe)
    assert [problem.file for problem in caught.value.problems if "mine" not in problem.file] == [
        "--set:checkpoint",
        "--set:calibration.text",
    ]


def test_paths_that_exist_pass_and_an_unneeded_text_is_not_required(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "held.txt").write_text("text")
    text = "checkpoint: model\nevaluation: {text: 'checkpoint:held.txt'}\ncalibration: {}\n"
    require_paths(load_recipe(written(tmp_path, text)))


@pytest.mark.parametrize("name", ["x" * 5000, "a/" * 3000, "a\\0b"])
def test_a_name_that_no_file_can_have_is_missing(tmp_path: Path, name: str) -> None:
    text = f'checkpoint: "{name}"\nevaluation: {{text: "{name}"}}\nchat_template: "{name}"'
    found = missing(load_recipe(written(tmp_path, text)))
    assert len(found) == 3
    assert all(len(problem) < 1000 for problem in found)


def test_a_recipe_made_in_python_names_itself() -> None:
    with pytest.raises(RecipeError) as caught:
        require_paths(Recipe(name="mine"))
    assert caught.value.problems[0].file == "recipe mine"
