"""`--set key.path=value`: changes to a recipe from the command line, under the same checks as the file's own keys.

The value is read as YAML. A pass of the list is addressed by its name: passes.quantize-weights.bits=8.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ingot.errors import Problem, did_you_mean, one_of
from ingot.pipeline.recipe_sources import merge
from ingot.pipeline.recipe_yaml import Located, read_located


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
