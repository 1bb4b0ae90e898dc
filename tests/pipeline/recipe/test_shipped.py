"""The recipes that ship are listed as they load, and without the compiler's packages."""

import subprocess
import sys

from ingot.pipeline.recipe.load import load_recipe
from ingot.pipeline.recipe.shipped import list_recipes, shipped_recipes


def test_descriptions_are_those_of_the_loaded_recipes() -> None:
    assert list_recipes() == [(name, load_recipe(name).description) for name in shipped_recipes()]
    assert all(description for _, description in list_recipes())


def test_listing_imports_none_of_the_compiler_s_packages() -> None:
    code = (
        "import sys; from ingot.cli.catalog import recipes_command; recipes_command(None, (), True);"
        "print(sorted({'onnx', 'onnx_ir', 'onnxruntime', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()[-1] == "[]"
