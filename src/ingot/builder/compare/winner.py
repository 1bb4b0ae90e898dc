"""Writes the winner of a comparison as a recipe that builds, measures and gates it."""

import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from ingot.builder.compare.results import ComparedRow, Comparison
from ingot.errors import NAME_PATTERN, UsageError, naming_file, shown_path
from ingot.pipeline.recipe.load import load_recipe
from ingot.pipeline.recipe.schema import IN_CHECKPOINT, Recipe
from ingot.pipeline.recipe.sections import RecipePath


def winner_file(output: Path, comparison: Comparison, num_comparisons: int) -> Path:
    """The file of one of several winners has its checkpoint's name before the suffix."""
    return output if num_comparisons == 1 else output.with_name(f"{output.stem}-{comparison.group.name}{output.suffix}")


def require_recipe_file(output: Path) -> None:
    """Raise UsageError for a file whose name is not a recipe's."""
    if output.suffix not in (".yaml", ".yml") or not re.match(NAME_PATTERN, output.stem):
        raise UsageError(
            f"-o {shown_path(output)}: the winner is a recipe, and has its file's name; name a .yaml file with letters,"
            " digits, '.', '_' and '-', the first a letter or digit"
        )


def write_winner(comparison: Comparison, row: ComparedRow, file: Path) -> None:
    """Write the row's recipe with what was measured and the gates that decided, and check that it loads."""
    recipe = comparison.group.measured_as(row.outcome.candidate)
    data: dict[str, Any] = yaml.safe_load(recipe.resolved_yaml(with_serving=True))
    for key, path in _paths(recipe).items():
        section, _, name = key.partition(".")
        if name:
            data[section][name] = path
        else:
            data[section] = path
    del data["name"]
    text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=float("inf"))
    with naming_file(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        # Of the same name: it is the recipe's.
        with TemporaryDirectory(dir=file.parent, prefix=".winner-") as folder:
            temporary = Path(folder, file.name)
            temporary.write_text(f"# {_why(comparison, row)}\n{text}", encoding="utf-8")
            load_recipe(temporary)
            temporary.replace(file)


def _why(comparison: Comparison, row: ComparedRow) -> str:
    passed = sum(other.may_win for other in comparison.rows)
    return (
        f"{row.name} of {comparison.group.name}: the best {comparison.prefer} of {passed} candidates that no gate"
        f" rejects, of {len(comparison.rows)} compared"
    )


def _paths(recipe: Recipe) -> dict[str, str]:
    """The recipe's files and folders by key, absolute, except `checkpoint:FILE`."""
    evaluation, calibration = recipe.evaluation, recipe.calibration
    given: dict[str, RecipePath | None] = {
        "checkpoint": recipe.checkpoint,
        "adapter": recipe.adapter,
        "chat_template": recipe.chat_template,
        "gpu.tiles": recipe.gpu.tiles,
        "evaluation.text": evaluation.text if evaluation else None,
        "calibration.text": calibration.text if calibration else None,
    }
    return {
        key: path.given if path.given.startswith(IN_CHECKPOINT) else str(path.path.absolute())
        for key, path in given.items()
        if path is not None
    }
