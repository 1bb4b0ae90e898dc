"""Packages that a target's writer needs, asked for before any work."""

import pytest

from ingot.errors import BuildError
from ingot.pipeline.targets import writers as program_writers
from ingot.pipeline.targets.table import TARGETS, get_target
from ingot.pipeline.targets.writers import program_writer, require_packages
from tests.each_case import each_case


def test_a_missing_package_is_named_with_the_extra_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_writers, "find_spec", lambda name: None if "tensorrt" in name else name)
    with pytest.raises(
        BuildError,
        match=r"is built with tensorrt_rtx or tensorrt, which is not .*pip install .*\[tensorrt\]'",
    ):
        require_packages(get_target("tensorrt"))
    require_packages(get_target("cuda-sm90"))
    monkeypatch.setattr(program_writers, "find_spec", lambda name: None)
    with pytest.raises(BuildError, match=r"target cuda-sm90 is built with triton, .*pip install .*\[cuda\]'"):
        require_packages(get_target("cuda-sm90"))


def test_either_of_two_packages_will_do_and_the_cpu_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_writers, "find_spec", lambda name: None if name == "tensorrt_rtx" else name)
    require_packages(get_target("tensorrt"))
    monkeypatch.setattr(program_writers, "find_spec", lambda name: None)
    require_packages(get_target("cpu"))


@each_case("name", TARGETS)
def test_every_target_has_its_writer(name: str) -> None:
    assert callable(program_writer(get_target(name)))
