"""The table of executors."""

from importlib import import_module
from typing import get_args

import pytest

from ingot.artifact import EngineKind
from ingot.runtime.executors import EXECUTORS


def test_every_engine_of_the_manifest_has_an_executor() -> None:
    assert set(EXECUTORS) == set(get_args(EngineKind))


@pytest.mark.parametrize("place", EXECUTORS.values())
def test_every_row_of_the_table_is_a_function(place: str) -> None:
    module, _, name = place.partition(":")
    assert callable(getattr(import_module(module), name))
