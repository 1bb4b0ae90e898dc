"""The table of targets."""

import pytest

from ingot.errors import UsageError
from ingot.passes.registry import load_pass_class
from ingot.pipeline.targets.table import TARGETS, get_target


def test_every_row_is_found_by_its_name_and_its_lowering_exists() -> None:
    for name, target in TARGETS.items():
        assert get_target(name) is target
        assert target.name == name
        for lowering in target.lowering:
            load_pass_class(lowering)


def test_an_unknown_target_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UsageError, match=r"unknown target 'cpuu'\. Did you mean 'cpu'\?"):
        get_target("cpuu")
