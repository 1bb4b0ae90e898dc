"""Recipe files of tests, and the problems that loading them reports."""

from pathlib import Path

import pytest

from ingot.errors import RecipeError
from ingot.pipeline.recipe.load import load_recipe


def written(folder: Path, text: str | bytes, name: str = "mine.yaml") -> Path:
    """Write a recipe file."""
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def problems(source: str | Path, *overrides: str) -> list[str]:
    """The recipe's problems as "file's name:line: message"."""
    with pytest.raises(RecipeError) as caught:
        load_recipe(source, overrides)
    return [f"{Path(p.file).name if '/' in p.file else p.file}:{p.line}: {p.message}" for p in caught.value.problems]


def the_problem(folder: Path, text: str | bytes, *overrides: str) -> str:
    """The only problem of a recipe."""
    found = problems(written(folder, text), *overrides)
    assert len(found) == 1, found
    return found[0]
