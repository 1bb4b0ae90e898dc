"""The cases of every kernel except the samplers, whose results are tokens."""

from importlib import import_module
from pathlib import Path

from tests.kernels.cases import Case


def all_cases() -> list[Case]:
    """All cases of the modules whose names end with _cases and that have `cases`, in the order of their names."""
    names = sorted(file.stem for file in Path(__file__).parent.glob("*_cases.py") if file != Path(__file__))
    modules = [import_module(f"tests.kernels.{name}") for name in names]
    return [case for module in modules if hasattr(module, "cases") for case in module.cases()]
