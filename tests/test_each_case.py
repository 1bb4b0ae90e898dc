"""Every case runs and is named, with a folder and patches of its own; pytest sees the other fixtures alone."""

import inspect
import os
from pathlib import Path

import pytest

from tests import each_case as module
from tests.each_case import each_case


def test_all_cases_run_and_the_failure_names_each_that_failed() -> None:
    ran = []

    @each_case(("value", "limit"), [(1, 2), (5, 2), pytest.param(0, 2, id="none"), (7, 3)])
    def check(value: int, limit: int) -> None:
        ran.append(value)
        assert value < limit, f"{value} is too large"

    with pytest.raises(AssertionError, match="5 is too large") as caught:
        check()
    assert ran == [1, 5, 0, 7]
    assert caught.value.__notes__ == ["2 of 4 cases failed: 5, 2; 7, 3"]


def test_a_failure_of_pytest_itself_is_one() -> None:
    @each_case("value", [1, 2], ids=["one", "two"])
    def check(value: int) -> None:
        with pytest.raises(ValueError):
            int("1" if value == 2 else "x")

    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE") as caught:
        check()
    assert caught.value.__notes__ == ["1 of 2 cases failed: two"]


def test_cases_skip_alone_and_the_test_only_when_all_do() -> None:
    ran = []

    @each_case("value", [1, 2, 3])
    @each_case("limit", [2, 3], ids=str)
    def check(value: int, limit: int) -> None:
        if value < limit:
            pytest.skip(f"{value} is below {limit}")
        ran.append((value, limit))

    check()
    assert ran == [(2, 2), (3, 2), (3, 3)]

    @each_case("value", [1, 2])
    def skips(value: int) -> None:
        pytest.skip(f"no {value}")

    with pytest.raises(pytest.skip.Exception, match="no 1"):
        skips()

    @each_case("value", [])
    def has_none(value: int) -> None:
        """Nothing."""

    with pytest.raises(pytest.skip.Exception, match="no case was found"):
        has_none()


def test_pytest_gives_the_other_fixtures_and_marks_stay() -> None:
    @pytest.mark.slow
    @each_case("value", [1])
    def check(tmp_path: Path, value: int) -> None:
        """Nothing."""

    assert list(inspect.signature(check).parameters) == ["tmp_path"]
    assert [mark.name for mark in check.pytestmark] == ["slow"]  # type: ignore[attr-defined]


@each_case("name", ["a", "b"])
def test_folders_patches_and_output_are_a_cases_own(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not list(tmp_path.iterdir())
    (tmp_path / name).touch()
    assert "INGOT_CASE" not in os.environ
    monkeypatch.setenv("INGOT_CASE", name)
    print(name)
    if name == "b":
        assert capsys.readouterr().out == "b\n"


def test_the_option_chooses_cases_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    @each_case("value", ["llama", "llama3", "phi"])
    def check(value: str) -> None:
        ran.append(value)

    monkeypatch.setattr(module, "ONLY", ["llama"])
    check()
    assert ran == ["llama", "llama3"]
    monkeypatch.setattr(module, "ONLY", ["qwen"])
    with pytest.raises(pytest.skip.Exception, match="no case has such a name"):
        check()


def test_the_option_chooses_by_all_names_of_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    @each_case("value", ["llama", "phi"])
    @each_case("bits", [4, 8])
    def check(value: str, bits: int) -> None:
        ran.append((value, bits))

    monkeypatch.setattr(module, "ONLY", ["phi, 4"])
    check()
    monkeypatch.setattr(module, "ONLY", ["llama"])
    check()
    assert ran == [("phi", 4), ("llama", 4), ("llama", 8)]
