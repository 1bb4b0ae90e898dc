"""Public names of a package that are imported on first use."""

import dis
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

    The imports in the first branch, which type checkers and editors read, are the list of names. They are found in the
    caller's compiled code, as a package may be installed without its sources.
    """
    home = _imported_names(sys._getframe(1).f_code)

    def get(name: str) -> Any:
        module = sys.modules[package]
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=module)
        value = getattr(import_module(home[name]), name)
        setattr(module, name, value)
        return value

    return sorted(home), get, lambda: sorted(home)


def _imported_names(code: Any) -> dict[str, str]:
    """Return the module of each name that compiled code imports from Ingot, but for this one."""
    home, module = dict[str, str](), ""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            module = str(instruction.argval)
        elif instruction.opname == "IMPORT_FROM" and module.startswith("ingot.") and module != __name__:
            home[str(instruction.argval)] = module
    return home
