"""The recipes that ship are listed as they load, and without the compiler's packages."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ingot.errors import UsageError
from ingot.pipeline.recipe import shipped
from ingot.pipeline.recipe.load import load_recipe
from ingot.pipeline.recipe.shipped import list_recipes, shipped_recipes


def test_descriptions_are_those_of_the_loaded_recipes() -> None:
    assert list_recipes() == [(name, load_recipe(name).description) for name in shipped_recipes()]
    assert all(description for _, description in list_recipes())


def test_listing_imports_none_of_the_compiler_s_packages() -> None:
    code = (
        "import sys; from ingot.cli.compiler.catalog import recipes_command; recipes_command(None, (), True);"
        "print(sorted({'onnx', 'onnx_ir', 'onnxruntime', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()[-1] == "[]"


def test_the_demo_model_of_an_installed_package_is_said_to_be_in_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(shipped_recipes()["demo"].parent, tmp_path / "recipes")
    monkeypatch.setattr(shipped, "files", lambda _: tmp_path / "recipes")
    recipe = load_recipe(tmp_path / "recipes/demo.yaml")
    with pytest.raises(UsageError, match=r"stdlib-llama-6m' is in Ingot's source .*`ingot init-demo` fetches it from"):
        recipe.require_checkpoint()
    (tmp_path / "pyproject.toml").touch()  # now it is a source tree
    with pytest.raises(UsageError, match=r"stdlib-llama-6m' is not a folder or GGUF file"):
        recipe.require_checkpoint()
    assert shipped.source_only(tmp_path.parent) is None
