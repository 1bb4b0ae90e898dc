"""Loads a recipe: find the file, merge it over the recipe that it extends, apply --set, check, fill in defaults.

`--set KEY=VALUE` changes a key under the same checks as the file's own keys. The value is read as YAML; a pass is
addressed by its name: passes.quantize-weights.bits=8. A number alone is a gate's limit, or the only concurrency.

`require_paths` finds every path of a recipe that is missing, before any work is done.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ingot.artifact.metrics import METRICS
from ingot.errors import LONGEST_PATH, Problem, RecipeError, UsageError, near_or_all, shown, unknown
from ingot.pipeline.recipe.checks import check_recipe
from ingot.pipeline.recipe.schema import PathError, Recipe
from ingot.pipeline.recipe.shipped import shipped_recipes
from ingot.pipeline.recipe.yaml import Located, read_located

_SUFFIXES = (".yaml", ".yml")
# `extends` does not pass them on.
_OWN_KEYS = ("name", "description", "output", "extends")
_WHOLE_KEYS = ("place",)  # mappings that are replaced as a whole: their entries have a meaning together
_LONGEST_KEY = 80
# YAML takes 3 s for a recipe of this size.
_MOST_BYTES = 200_000


def load_recipe(source: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe: a file, or the name of one that ships; `overrides` are KEY=VALUE as with --set.

    Paths in a recipe are relative to the file that contains them, those in `overrides` to the working folder.
    Raises UsageError for a recipe that is not found, RecipeError with every mistake in it.
    """
    try:
        file = _find_recipe(source, Path.cwd())
    except ValueError as error:
        raise UsageError(str(error)) from error
    problems: list[Problem] = []
    located = _read_extended(file, (), problems)
    raise_problems(problems if located is None else [])
    assert located is not None, "a file that cannot be read has a problem"
    located = _apply_overrides(located, overrides, problems)
    recipe = check_recipe(located, file.path.stem, problems)
    raise_problems(problems)
    assert recipe is not None, "a recipe without problems has a value"
    return recipe


@dataclass(frozen=True)
class _RecipeFile:
    """A recipe's file, and its name in messages."""

    path: Path
    shown: str

    @classmethod
    def at(cls, path: Path) -> "_RecipeFile":
        """The file at this path, shown relative to the working folder where it is in there."""
        path, here = path.resolve(), Path.cwd().resolve()
        return cls(path, str(path.relative_to(here)) if path.is_relative_to(here) else str(path))


def _find_recipe(source: str | Path, relative_to: Path) -> _RecipeFile:
    """The file of a recipe: a path (it ends in .yaml or .yml, or has a slash) or the name of one that ships.

    Raises ValueError with the reason; the caller adds the place.
    """
    if isinstance(source, Path) or source.endswith(_SUFFIXES) or "/" in source or os.sep in source:
        path = Path(os.path.normpath(relative_to / Path(source).expanduser()))
        if not os.path.isfile(path):  # False too for names that no file can have, where Path.is_file raises
            reason = "is a folder" if os.path.isdir(path) else "does not exist"
            looked_for = shown(str(path), LONGEST_PATH)
            raise ValueError(
                f"recipe file {shown(str(source), LONGEST_PATH)} {reason} (looked for {looked_for}); give a .yaml file"
            )
        return _RecipeFile.at(path)
    shipped = shipped_recipes()
    if source not in shipped:
        raise ValueError(
            f"{unknown('recipe', source, shipped, 'recipes that ship')} For a file of your own give its path, such as "
            "./my-recipe.yaml"
        )
    return _RecipeFile.at(shipped[source])


def _read_extended(file: _RecipeFile, chain: tuple[_RecipeFile, ...], problems: list[Problem]) -> Located | None:
    """The file's mapping merged over what it extends; None for a file that is not a mapping. `chain` extends it."""
    located = _read_file(file, problems)
    if located is None or "extends" not in located.entries:
        return located
    named = located.entries["extends"]
    own = replace(located, value={key: value for key, value in located.entries.items() if key != "extends"})
    parent = _parent(named, (*chain, file), problems)
    base = _read_extended(parent, (*chain, file), problems) if parent else None
    if base is None:
        return own
    dropped = {*_OWN_KEYS, *(key for key in _WHOLE_KEYS if key in own.entries)}
    inherited = {key: value for key, value in base.entries.items() if key not in dropped}
    return _merge(replace(base, value=inherited), own)


def _read_file(file: _RecipeFile, problems: list[Problem]) -> Located | None:
    """The mapping in one file; None, with a problem appended, when it cannot be read as one."""
    try:
        with file.path.open("rb") as opened:
            content = opened.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            problems.append(Problem(file.shown, 0, f"it has more than {_MOST_BYTES:,} bytes; name a recipe"))
            return None
        text = content.decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
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


def _parent(named: Located, chain: tuple[_RecipeFile, ...], problems: list[Problem]) -> _RecipeFile | None:
    """The file that `extends` names; None, with a problem appended, when it is missing or already in the chain."""
    if not isinstance(named.value, str):
        problems.append(named.problem(f"extends is {shown(named.plain())}; it must be a recipe's name or a path"))
        return None
    try:
        parent = _find_recipe(named.value, named.folder)
    except ValueError as error:
        problems.append(named.problem(f"extends: {error}"))
        return None
    if parent.path in [file.path for file in chain]:
        names = " -> ".join(file.shown for file in (*chain, parent))
        problems.append(named.problem(f"recipes extend each other in a circle: {names}; remove one `extends`"))
        return None
    return parent


def _merge(base: Located, over: Located) -> Located:
    """Merge mappings key by key and replace everything else; every value keeps its place."""
    if not isinstance(base.value, dict) or not isinstance(over.value, dict):
        return over
    merged = dict(base.entries)
    for key, value in over.entries.items():
        merged[key] = _merge(merged[key], value) if key in merged else value
    return replace(over, value=merged)


def raise_problems(problems: list[Problem]) -> None:
    """Raise RecipeError with all problems, if any: files first, in order of lines, then --set."""
    if problems:
        order = list(dict.fromkeys(problem.file for problem in problems))
        order.sort(key=lambda file: file.startswith("--set"))
        unique = dict.fromkeys(problems)
        raise RecipeError(sorted(unique, key=lambda problem: (order.index(problem.file), problem.line, problem.column)))


def _apply_overrides(recipe: Located, overrides: Sequence[str], problems: list[Problem]) -> Located:
    """The recipe with every `key.path=value` applied, in order. Paths in values are relative to the working folder."""
    for text in overrides:
        key, separator, value_text = text.partition("=")
        place = f"--set:{key.strip()}" if len(key) <= _LONGEST_KEY else f"--set:{key.strip()[:_LONGEST_KEY]}..."
        path = key.strip().split(".")
        if not separator or not all(path):
            problems.append(Problem("--set", 0, f"{shown(text)} is not KEY=VALUE, such as engine.block_tokens=32"))
            continue
        found: list[Problem] = []
        value = read_located(value_text, place, Path.cwd(), found)
        problems.extend(replace(problem, line=0, column=0) for problem in found)  # a command line has no lines
        if value is not None and path == ["extends"]:
            problems.append(Problem(place, 0, "extends cannot be changed; name the other recipe instead of this one"))
        elif value is not None:
            recipe = _set(recipe, path, _spelled_out(path, _without_lines(value)), problems)
    return recipe


def _spelled_out(path: Sequence[str], value: Located) -> Located:
    """Return what a number alone means: the only concurrency, or the limit of a gate on its metric's worse side."""
    if isinstance(value.value, bool) or not isinstance(value.value, int | float):
        return value
    match path:
        case ["latency", "concurrency"]:
            return replace(value, value=(value,))
        case ["gates", metric]:
            facts = METRICS.get(metric.partition("@")[0])
            return replace(value, value={"min" if facts and facts.better == "higher" else "max": value})
    return value


def _without_lines(value: Located) -> Located:
    """The value with every line and column set to 0, the whole of the option."""
    if isinstance(value.value, dict):
        return replace(
            value, line=0, column=0, value={key: _without_lines(item) for key, item in value.entries.items()}
        )
    if isinstance(value.value, tuple):
        return replace(value, line=0, column=0, value=tuple(map(_without_lines, value.items)))
    return replace(value, line=0, column=0)


def _set(recipe: Located, path: list[str], value: Located, problems: list[Problem]) -> Located:
    if path[0] == "passes" and len(path) > 1:
        return _set_pass_option(recipe, path, value, problems)
    for depth in range(1, len(path)):
        outer = recipe.at(tuple(path[:depth]))
        if outer.value is not None and not isinstance(outer.value, dict):
            single = ".".join(path[:depth])
            problems.append(Problem(value.file, 0, f"{single} is a single value and has no keys of its own"))
            return recipe
    return _replace_at(recipe, path, value)


def _replace_at(outer: Located, path: list[str], value: Located) -> Located:
    """Put the value at the path, making mappings that are missing or null on the way."""
    key, rest = path[0], path[1:]
    entries = dict(outer.entries)
    if rest:
        inner = entries.get(key, replace(value, value={}))
        entries[key] = _replace_at(inner if inner.entries else replace(value, value={}), rest, value)
    else:
        entries[key] = value
    return replace(outer, value=entries)


def _set_pass_option(recipe: Located, path: list[str], value: Located, problems: list[Problem]) -> Located:
    """passes.NAME.option=value, or passes.NAME={options}, merged over the pass's present options."""
    listed = recipe.entries.get("passes", replace(value, value=()))
    names = [_pass_name(item) for item in listed.items]
    if names.count(path[1]) != 1:
        problems.append(Problem(value.file, 0, _pass_message(path[1], names)))
        return recipe
    index = names.index(path[1])
    options = _replace_at(replace(value, value={}), path[2:], value) if len(path) > 2 else value
    entry = listed.items[index]
    old = entry.entries.get(path[1], replace(entry, value={}))
    changed = replace(entry, value={path[1]: _merge(old, options)})
    items = (*listed.items[:index], changed, *listed.items[index + 1 :])
    return replace(recipe, value={**recipe.entries, "passes": replace(listed, value=items)})


def _pass_name(item: Located) -> str:
    return next(iter(item.entries), "") if item.entries else str(item.value)


def _pass_message(name: str, names: list[str]) -> str:
    if name in names:
        return f"the recipe runs {shown(name)} {names.count(name)} times; give the whole list with --set passes=[...]"
    passes = near_or_all(name, names, "its passes")
    return f"the recipe runs no pass {shown(name)}{passes} Give the whole list with --set passes=[...] to add one"


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
