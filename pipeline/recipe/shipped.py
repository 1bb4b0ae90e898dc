"""The recipes that ship: their files and descriptions, for which the compiler's packages need not be installed."""

from importlib.resources import files
from pathlib import Path

import yaml


def shipped_recipes() -> dict[str, Path]:
    """Name -> file of the recipes that ship, sorted. They are real files: Ingot is not installed as a zip."""
    folder = Path(str(files("ingot.recipes"))).resolve()
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def list_recipes() -> list[tuple[str, str]]:
    """Name and description of the recipes that ship, sorted by name."""
    found = ((name, yaml.safe_load(path.read_text(encoding="utf-8"))) for name, path in shipped_recipes().items())
    return [(name, recipe.get("description", "")) for name, recipe in found]
