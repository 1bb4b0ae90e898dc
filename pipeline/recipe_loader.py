"""From YAML to a Recipe, or to one error with every mistake in it.

The way: find the file, read it with places, merge what it extends, apply --set, check, and fill in the defaults.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from ingot.errors import Problem, UsageError
from ingot.pipeline.recipe import PassEntry, Recipe
from ingot.pipeline.recipe_checks import (
    calibration_problems,
    gate_problems,
    read_passes,
    schema_problems,
    scheme_problems,
)
from ingot.pipeline.recipe_overrides import apply_overrides
from ingot.pipeline.recipe_paths import RecipePath
from ingot.pipeline.recipe_sources import find_recipe, raise_if, read_chain, shipped_recipes
from ingot.pipeline.recipe_target_checks import target_problems
from ingot.pipeline.recipe_yaml import Located

_PATHS = (("checkpoint",), ("evaluation", "text"), ("calibration", "text"), ("gpu", "tiles"))


def load_recipe(source: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe: a file, or the name of one that ships; `overrides` are KEY=VALUE as with --set.

    Paths in a recipe are relative to the file that they stand in, those in `overrides` to the working folder.
    Raises UsageError when there is no such recipe, RecipeError with every mistake in it.
    """
    try:
        file = find_recipe(source, Path.cwd())
    except ValueError as error:
        raise UsageError(str(error)) from error
    problems: list[Problem] = []
    located = read_chain(file, problems)
    raise_if(problems if located is None else [])
    assert located is not None, "a file that cannot be read has a problem"
    located = apply_overrides(located, overrides, problems)
    recipe = _checked(located, file.stem, problems)
    raise_if(problems)
    assert recipe is not None, "a recipe without problems has a value"
    return recipe


def list_recipes() -> list[tuple[str, str]]:
    """Name and description of the recipes that ship, sorted by name."""
    return [(name, load_recipe(name).description) for name in shipped_recipes()]


def _checked(located: Located, default_name: str, problems: list[Problem]) -> Recipe | None:
    """The recipe, or None and its problems."""
    located = _without_null_gates(located)
    passes = read_passes(located, problems)
    problems.extend(target_problems(located, passes))
    problems.extend(gate_problems(located))
    problems.extend(calibration_problems(located, passes))
    problems.extend(scheme_problems(located, passes))
    try:
        return Recipe.model_validate(_as_fields(located, default_name, passes))
    except ValidationError as error:
        problems.extend(schema_problems(error, located))
    return None


def _as_fields(located: Located, default_name: str, passes: tuple[PassEntry, ...]) -> Mapping[str, object]:
    """Plain values for the schema: passes read already, paths with the folder that they are relative to."""
    for path in _PATHS:
        located = _with_path(located, path)
    plain = {key: item.plain() for key, item in located.entries.items()}
    return {"name": default_name, **plain, "passes": passes}


def _with_path(located: Located, keys: tuple[str, ...]) -> Located:
    """Replace the text under these keys by a RecipePath; anything else is left for the schema to refuse."""
    key, *rest = keys
    inner = located.entries.get(key)
    if inner is None:
        return located
    if rest:
        changed = _with_path(inner, tuple(rest))
    else:
        changed = replace(inner, value=RecipePath(inner.value, inner.folder)) if isinstance(inner.value, str) else inner
    return replace(located, value={**located.entries, key: changed})


def _without_null_gates(located: Located) -> Located:
    """`metric: null` takes out a gate that an extended recipe sets."""
    gates = located.entries.get("gates")
    if gates is None:
        return located
    kept = {metric: gate for metric, gate in gates.entries.items() if gate.value is not None}
    value = kept if isinstance(gates.value, dict) else gates.value
    return replace(located, value={**located.entries, "gates": replace(gates, value={} if value is None else value)})
