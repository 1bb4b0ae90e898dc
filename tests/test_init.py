"""The names of `import ingot`: documented in one list, found by editors, imported on first use."""

import ast
import os
import py_compile
import subprocess
import sys
from inspect import getmembers, isclass
from pathlib import Path
from types import ModuleType

import pytest

import ingot
import ingot.runtime
from ingot import errors


def test_all_and_dir_have_the_names_that_editors_see() -> None:
    for package in (ingot, ingot.runtime):
        assert dir(package) == vars(package)["__all__"] == sorted(home(package))
        for name, module in home(package).items():
            assert getattr(package, name) is getattr(sys.modules[module], name)


def home(package: ModuleType) -> dict[str, str]:
    """The module of each name that a package imports for type checkers."""
    tree = ast.parse(Path(str(package.__file__)).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert all(alias.name == alias.asname for node in imports for alias in node.names)
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def test_every_exception_is_exported() -> None:
    exceptions = {name for name, _ in getmembers(errors, lambda value: isclass(value) and issubclass(value, Exception))}
    assert exceptions == {name for name, module in home(ingot).items() if module == "ingot.errors"}


def test_all_names_are_imported_by_a_star() -> None:
    names: dict[str, object] = {}
    exec("from ingot import *", names)
    assert names.keys() - {"__builtins__"} == {*dir(ingot)}


def loaded(code: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after running `code`."""
    command = [sys.executable, "-c", f"{code}; import sys; print(*sys.modules)"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split())


@pytest.mark.parametrize(
    ("code", "unneeded"),
    [
        (
            "import ingot; dir(ingot)",
            {"importlib.metadata", "ingot.builder", "ingot.errors", "ingot.runtime", "numpy", "onnx", "onnxruntime"},
        ),
        ("import ingot; ingot.EngineError", {"ingot.builder", "ingot.runtime", "numpy", "onnx", "onnxruntime"}),
        ("import ingot; ingot.Engine", {"ingot.builder", "ingot.pipeline", "onnx", "onnx_ir"}),
    ],
    ids=["import", "errors", "engine"],
)
def test_only_what_is_used_is_imported(code: str, unneeded: set[str]) -> None:
    assert not loaded(code) & unneeded


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(AttributeError, match="module 'ingot' has no attribute 'Engin'") as caught:
        _ = ingot.Engin  # type: ignore[attr-defined]
    assert (caught.value.name, caught.value.obj) == ("Engin", ingot)


def test_names_are_found_where_only_compiled_code_is_installed(tmp_path: Path) -> None:
    source = tmp_path / "compiled_alone.py"
    source.write_text(
        "from typing import TYPE_CHECKING\n"
        "from ingot.lazy_names import lazy_names\n"
        "if TYPE_CHECKING:\n"
        "    from ingot.errors import EngineError as EngineError, UsageError as UsageError\n"
        "else:\n"
        "    __all__, __getattr__, __dir__ = lazy_names(__name__)\n"
    )
    py_compile.compile(str(source), cfile=str(tmp_path / "compiled_alone.pyc"))
    source.unlink()
    code = "import compiled_alone as c; print(c.__all__, dir(c), c.UsageError.__module__)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    names = ["EngineError", "UsageError"]
    assert done.stdout == f"{names} {names} ingot.errors\n"
