"""Public names of a package that are imported on first use."""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazy_names(package: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` of a package that imports its public names on first use.

        if TYPE_CHECKING:
            from ingot.builder import build as build
        else:
            __all__, __getattr__, __dir__ = lazy_names(__name__)

    The imports in the first branch, which type checkers and editors read, are the list of names.
    """
    home = _imported_names(package)

    def get(name: str) -> Any:
        module = sys.modules[package]
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=module)
        value = getattr(import_module(home[name]), name)
        setattr(module, name, value)
        return value

    return sorted(home), get, lambda: sorted(home)


def _imported_names(package: str) -> dict[str, str]:
    """Return the module of each name that a package imports for type checkers."""
    loader: Any = vars(sys.modules[package])["__loader__"]
    branches = [node for node in ast.parse(loader.get_source(package)).body if isinstance(node, ast.If)]
    imports = [node for branch in branches for node in branch.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}
