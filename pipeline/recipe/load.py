"""Where recipes come from: files, the recipes that ship, and `extends` between them.

From YAML to a Recipe, or to one error with every mistake in it.

The way: find the file, read it with places, merge what it extends, apply --set, check, and fill in the defaults.

`--set key.path=value`: changes to a recipe from the command line, under the same checks as the file's own keys.

The value is read as YAML. A pass of the list is addressed by its name: passes.quantize-weights.bits=8.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from pydantic import ValidationError

from ingot.errors import Problem, RecipeError, UsageError, did_you_mean, one_of
from ingot.pipeline.recipe.checks import (
    calibration_problems,
    gate_problems,
    read_passes,
    schema_problems,
    scheme_problems,
    target_problems,
)
from ingot.pipeline.recipe.schema import PassEntry, Recipe, RecipePath
from ingot.pipeline.recipe.yaml import Located, read_located

SUFFIXES = (".yaml", ".yml")
# What says which recipe it is, and so is not taken over from the one it extends.
OWN_KEYS = ("name", "description", "output", "extends")


@dataclass(frozen=True)
class RecipeFile:
    """A recipe's file, and how messages call it."""

    path: Path
    shown: str

    @property
    def stem(self) -> str:
        """The recipe's name where it gives none."""
        return self.path.stem


def shipped_recipes() -> dict[str, RecipeFile]:
    """Name -> file of the recipes that ship, sorted. They are real files: Ingot is not installed as a zip."""
    folder = Path(str(files("ingot.recipes"))).resolve()
    return {path.stem: _recipe_file(path) for path in sorted(folder.glob("*.yaml"))}


def find_recipe(source: str | Path, relative_to: Path) -> RecipeFile:
    """The file of a recipe: a path (it ends in .yaml or .yml, or has a slash) or the name of one that ships.

    Raises ValueError with the reason, for the caller to say where it stands.
    """
    if isinstance(source, Path) or source.endswith(SUFFIXES) or "/" in source or os.sep in source:
        path = Path(os.path.normpath(relative_to / Path(source).expanduser()))
        if not path.is_file():
            kind = "a folder" if path.is_dir() else "not there"
            raise ValueError(f"recipe file {str(source)!r} is {kind} (looked for {path}); give a .yaml file")
        return _recipe_file(path)
    shipped = shipped_recipes()
    if source not in shipped:
        near = did_you_mean(source, shipped)
        raise ValueError(
            f"no recipe is named {source!r}; recipes that ship: {one_of(shipped)}.{near} "
            "For a file of your own give its path, such as ./my-recipe.yaml"
        )
    return shipped[source]


def read_chain(file: RecipeFile, problems: list[Problem]) -> Located | None:
    """The recipe's mapping with everything it extends merged in; None when a file of the chain is no mapping."""
    return _read_extended(file, (), problems)


def read_recipe_file(file: RecipeFile, problems: list[Problem]) -> Located | None:
    """One file's mapping, as it stands; None (and a problem) when it cannot be read as one."""
    try:
        text = file.path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = file.path.read_bytes()[: error.start].count(b"\n") + 1
        problems.append(Problem(file.shown, line, "this is not UTF-8 text; save the file as UTF-8"))
        return None
    except OSError as error:
        problems.append(Problem(file.shown, 0, f"the file cannot be read: {error.strerror}"))
        return None
    located = read_located(text, file.shown, file.path.parent, problems)
    if located is None or isinstance(located.value, dict):
        return located
    found = "empty" if located.value is None else f"a {'list' if located.items else type(located.value).__name__}"
    problems.append(Problem(file.shown, 0, f"a recipe is a mapping of keys, this file is {found}"))
    return None


def merge(base: Located, over: Located) -> Located:
    """Mappings merge key by key, everything else is replaced; places travel with the values."""
    if not isinstance(base.value, dict) or not isinstance(over.value, dict):
        return over
    merged = dict(base.entries)
    for key, value in over.entries.items():
        merged[key] = merge(merged[key], value) if key in merged else value
    return replace(over, value=merged)


def _read_extended(file: RecipeFile, chain: tuple[RecipeFile, ...], problems: list[Problem]) -> Located | None:
    located = read_recipe_file(file, problems)
    if located is None or "extends" not in located.entries:
        return located
    named = located.entries["extends"]
    own = replace(located, value={key: value for key, value in located.entries.items() if key != "extends"})
    parent = _parent(named, (*chain, file), problems)
    base = _read_extended(parent, (*chain, file), problems) if parent else None
    if base is None:
        return own
    kept = {key: value for key, value in base.entries.items() if key not in OWN_KEYS}
    return merge(replace(base, value=kept), own)


def _parent(named: Located, chain: tuple[RecipeFile, ...], problems: list[Problem]) -> RecipeFile | None:
    """The file that `extends` names; None (and a problem) when there is none or it would go round in circles."""
    if not isinstance(named.value, str):
        problems.append(named.problem(f"extends is {named.plain()!r}; it must be a recipe's name or a path"))
        return None
    try:
        parent = find_recipe(named.value, named.folder)
    except ValueError as error:
        problems.append(named.problem(f"extends: {error}"))
        return None
    if parent.path in [file.path for file in chain]:
        names = " -> ".join(file.shown for file in (*chain, parent))
        problems.append(named.problem(f"recipes extend each other in a circle: {names}; take one `extends` out"))
        return None
    return parent


def _recipe_file(path: Path) -> RecipeFile:
    path = path.resolve()
    here = Path.cwd().resolve()
    return RecipeFile(path, str(path.relative_to(here)) if path.is_relative_to(here) else str(path))


def raise_if(problems: list[Problem]) -> None:
    """Raise RecipeError with all problems: files first, in order of lines, then --set; nothing when there is none."""
    if problems:
        files = list(dict.fromkeys(problem.file for problem in problems))
        files.sort(key=lambda file: file.startswith("--set"))
        unique = dict.fromkeys(problems)
        raise RecipeError(sorted(unique, key=lambda problem: (files.index(problem.file), problem.line)))


def apply_overrides(recipe: Located, overrides: Sequence[str], problems: list[Problem]) -> Located:
    """The recipe with every `key.path=value` applied, in order. Paths in values are relative to the working folder."""
    for text in overrides:
        key, separator, value_text = text.partition("=")
        place = f"--set:{key.strip()}"
        path = key.strip().split(".")
        if not separator or not all(path):
            problems.append(Problem("--set", 0, f"{text!r} does not read as KEY=VALUE, such as engine.block_tokens=32"))
            continue
        found: list[Problem] = []
        value = read_located(value_text, place, Path.cwd(), found)
        problems.extend(replace(problem, line=0) for problem in found)  # a command line has no lines
        if value is not None and path == ["extends"]:
            problems.append(Problem(place, 0, "extends cannot be changed; name the other recipe instead of this one"))
        elif value is not None:
            recipe = _set(recipe, path, _without_lines(value), problems)
    return recipe


def _without_lines(value: Located) -> Located:
    """The value with all its places on the whole of the option."""
    if isinstance(value.value, dict):
        return replace(value, line=0, value={key: _without_lines(item) for key, item in value.entries.items()})
    if isinstance(value.value, tuple):
        return replace(value, line=0, value=tuple(map(_without_lines, value.items)))
    return replace(value, line=0)


def _set(recipe: Located, path: list[str], value: Located, problems: list[Problem]) -> Located:
    if path[0] == "passes" and len(path) > 1:
        return _set_pass_option(recipe, path, value, problems)
    for depth in range(1, len(path)):
        outer = recipe.at(tuple(path[:depth]))
        if outer.value is not None and not isinstance(outer.value, dict):
            shown = ".".join(path[:depth])
            problems.append(Problem(value.file, 0, f"{shown} is a single value and has no keys of its own"))
            return recipe
    return _replace_at(recipe, path, value)


def _replace_at(outer: Located, path: list[str], value: Located) -> Located:
    """Put the value at the path: mappings that are missing or null on the way are made."""
    key, rest = path[0], path[1:]
    entries = dict(outer.entries)
    if rest:
        inner = entries.get(key, replace(value, value={}))
        entries[key] = _replace_at(inner if inner.entries else replace(value, value={}), rest, value)
    else:
        entries[key] = value
    return replace(outer, value=entries)


def _set_pass_option(recipe: Located, path: list[str], value: Located, problems: list[Problem]) -> Located:
    """passes.NAME.option=value, or passes.NAME={options}, which are added to those it has."""
    listed = recipe.entries.get("passes", replace(value, value=()))
    names = [_pass_name(item) for item in listed.items]
    if names.count(path[1]) != 1:
        problems.append(Problem(value.file, 0, _pass_message(path[1], names)))
        return recipe
    index = names.index(path[1])
    options = _replace_at(replace(value, value={}), path[2:], value) if len(path) > 2 else value
    entry = listed.items[index]
    old = entry.entries.get(path[1], replace(entry, value={}))
    changed = replace(entry, value={path[1]: merge(old, options)})
    items = (*listed.items[:index], changed, *listed.items[index + 1 :])
    return replace(recipe, value={**recipe.entries, "passes": replace(listed, value=items)})


def _pass_name(item: Located) -> str:
    return next(iter(item.entries), "") if item.entries else str(item.value)


def _pass_message(name: str, names: list[str]) -> str:
    if name in names:
        return f"the recipe runs {name!r} {names.count(name)} times; give the whole list with --set passes=[...]"
    known = f"its passes: {one_of(names)}.{did_you_mean(name, names)}" if names else "it has no passes."
    return f"the recipe runs no pass {name!r}; {known} Give the whole list with --set passes=[...] to add one"


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
