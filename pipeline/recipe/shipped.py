"""The recipes that ship: their files and descriptions, and where the files are that ship with the source alone.

The compiler's packages are not needed for any of it.
"""

from importlib.resources import files
from pathlib import Path

import yaml

from ingot.version import project_source


def shipped_recipes() -> dict[str, Path]:
    """Name -> file of the recipes that ship, sorted. They are real files: Ingot is not installed as a zip."""
    folder = Path(str(files("ingot.recipes"))).resolve()
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def list_recipes() -> list[tuple[str, str]]:
    """Name and description of the recipes that ship, sorted by name."""
    found = ((name, yaml.safe_load(path.read_text(encoding="utf-8"))) for name, path in shipped_recipes().items())
    return [(name, recipe.get("description", "")) for name, recipe in found]


def source_only(path: Path) -> str | None:
    """Say that the path is in Ingot's source tree but not in the installed package; None for any other path."""
    tree = Path(str(files("ingot.recipes"))).resolve().parent
    if not path.is_relative_to(tree) or (tree / "pyproject.toml").exists():
        return None
    return (
        f"is in Ingot's source and not in the installed package: `ingot init-demo` fetches it from {project_source()}"
    )
