"""docs/recipes.md lists every key with its default and meaning, and every metric; its examples load."""

from collections.abc import Iterator
from pathlib import Path
from re import DOTALL, MULTILINE, findall
from typing import get_args

import pytest
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from ingot.artifact.metrics import METRICS
from ingot.pipeline.recipe.load import load_recipe
from ingot.pipeline.recipe.schema import Recipe
from ingot.pipeline.recipe.sections import GateLimit, PassEntry
from ingot.pipeline.recipe.shipped import list_recipes
from tests.data_paths import ROOT
from tests.each_case import each_case

DOC = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")


def key_rows(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The table row of every key: name, default, meaning."""
    for name, field in model.model_fields.items():
        inner = _section(field.annotation)
        default = "required" if field.default is PydanticUndefined else _shown(field.default)
        if field.default_factory or (inner and field.default is not None):
            default = "see below"
        yield f"| `{prefix}{name}` | {default} | {field.description} |"
        if inner:
            yield from key_rows(inner, f"{prefix}{name}.")


def _section(annotation: object) -> type[BaseModel] | None:
    candidates = [annotation, *get_args(annotation)]
    found = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
    return found[0] if found and found[0] not in (GateLimit, PassEntry) else None


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return "`null`" if value is None else f"`{value!r}`".replace("'", '"') if value == "" else f"`{value}`"


@each_case("row", [*key_rows(Recipe), *key_rows(GateLimit, "gates.METRIC.")])
def test_the_manual_lists_every_key_with_its_default_and_meaning(row: str) -> None:
    if row.startswith("| `name`"):
        row = row.replace("required", "the file's name")
    assert row in DOC.splitlines()


def test_the_manual_lists_no_unknown_key() -> None:
    keys = {row.split("`")[1] for row in [*key_rows(Recipe), *key_rows(GateLimit, "gates.METRIC.")]}
    table = DOC.split("## Keys")[1].split("## ")[0]
    assert set(findall(r"^\| `([^`]+)`", table, flags=MULTILINE)) == keys | {"extends"}


@each_case("name", METRICS)
def test_the_manual_lists_every_metric(name: str) -> None:
    facts = METRICS[name]
    bound = "max" if facts.better == "lower" else "min"
    assert f"| `{name}` | `{bound}` | {facts.section or 'always'} | {facts.definition} |" in DOC.splitlines()


def test_the_manual_lists_every_recipe_that_ships() -> None:
    for name, description in list_recipes():
        assert f"| `{name}` | {description} |" in DOC.splitlines()


@pytest.mark.parametrize("example", findall(r"```yaml\n(.*?)```", DOC, flags=DOTALL))
def test_every_example_of_the_manual_loads(tmp_path: Path, example: str) -> None:
    file = tmp_path / "example.yaml"
    file.write_text(example, encoding="utf-8")
    load_recipe(file)
