"""Finding the TensorRT module."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ingot.errors import BuildError
from ingot.pipeline.targets.tensorrt.library import load_library


def only(*modules: str) -> Callable[[str], Any]:
    """An import that finds only these modules."""

    def load(name: str) -> Any:
        if name not in modules:
            raise ImportError(name)
        return SimpleNamespace(__version__="1.2.3")

    return load


def test_tensorrt_rtx_is_preferred_and_tensorrt_is_the_alternative() -> None:
    assert load_library(only("tensorrt", "tensorrt_rtx")).name == "tensorrt-rtx"
    found = load_library(only("tensorrt"))
    assert (found.name, found.version, found.is_rtx, found.sms) == ("tensorrt", "1.2.3", False, ())


def test_a_missing_package_is_an_error_that_names_the_extra() -> None:
    with pytest.raises(BuildError, match=r"needs its Python package: .*pip install .*\[tensorrt\]'"):
        load_library(only())
