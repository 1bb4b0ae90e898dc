"""Finds every path of a recipe that is missing, before any work is done."""

from collections.abc import Callable, Iterator
from pathlib import Path

from ingot.pipeline.recipe.load import raise_problems
from ingot.pipeline.recipe.schema import PathError, Recipe


def require_paths(recipe: Recipe) -> None:
    """Raise RecipeError with every missing checkpoint, adapter, text, template and table, at the place of its key."""
    problems = []
    for find in _searches(recipe):
        try:
            find()
        except PathError as error:
            problems.append(recipe.problem(error.key, error.message))
    raise_problems(problems)  # once each: a text in a missing checkpoint reports the checkpoint again


def _searches(recipe: Recipe) -> Iterator[Callable[[], Path | None]]:
    """Functions that find the files which the build reads, in the order of the schema."""
    yield recipe.require_checkpoint
    yield recipe.adapter_folder
    yield recipe.chat_template_file
    yield recipe.tile_table
    names_text = recipe.calibration is not None and recipe.calibration.text is not None
    if names_text or any(made.needs_calibration for made in recipe.make_passes()):
        yield recipe.calibration_text
    yield recipe.evaluation_text
