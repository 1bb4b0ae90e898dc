"""Where recipes come from: files, the recipes that ship, and `extends` between them."""

import os
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from ingot.errors import Problem, RecipeError, did_you_mean, one_of
from ingot.pipeline.recipe_yaml import Located, read_located

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
