"""The names of `import ingot`: documented in one list, found by editors, imported on first use."""

import ast
import subprocess
import sys
from inspect import getmembers, isclass
from pathlib import Path

import pytest

import ingot
from ingot import errors


def test_all_home_and_dir_have_the_same_names() -> None:
    assert dir(ingot) == sorted(ingot.__all__)
    assert set(ingot._HOME) == set(ingot.__all__) - {"__version__"}
    for name, module in ingot._HOME.items():
        assert getattr(ingot, name) is getattr(sys.modules[module], name)


def test_editors_see_every_name() -> None:
    tree = ast.parse(Path(ingot.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imported = {
        (alias.name, node.module) for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert imported == set(ingot._HOME.items())


def test_every_exception_is_exported() -> None:
    exceptions = {name for name, _ in getmembers(errors, lambda value: isclass(value) and issubclass(value, Exception))}
    assert exceptions == {name for name, module in ingot._HOME.items() if module == "ingot.errors"}


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
        _ = ingot.Engin
    assert (caught.value.name, caught.value.obj) == ("Engin", ingot)
