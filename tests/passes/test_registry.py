"""Passes by name: Ingot's own, third parties', and every mistake in a name or an option."""

import math
from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin

import pytest

from ingot.errors import UsageError
from ingot.options import Range, options_of
from ingot.passes.base import PassKind
from ingot.passes.registry import PASSES, load_pass_class, make_pass, pass_names
from tests.each_case import each_case
from tests.passes.example_passes import AllOptions, install

FOREIGN = "tests.passes.example_passes:AllOptions"


@each_case("name", PASSES)
def test_every_registered_pass_can_be_made_with_its_defaults(name: str) -> None:
    pass_ = make_pass(name)
    assert str(pass_) == pass_.name == name
    assert pass_.summary.endswith(".")
    assert pass_.kind in get_args(PassKind)


def numbers(annotation: Any) -> Iterator[Range | None]:
    """The range of every number that an option may be; None for a number without one."""
    if get_origin(annotation) is Annotated:
        yield get_args(annotation)[1]
    elif annotation in (int, float):
        yield None
    else:
        for argument in get_args(annotation):
            yield from numbers(argument)


NUMERIC_OPTIONS = [
    (name, option.name, option.annotation)
    for name in PASSES
    for option in options_of(load_pass_class(name)).values()
    if list(numbers(option.annotation))
]


@each_case(("name", "option", "annotation"), NUMERIC_OPTIONS)
def test_every_numeric_option_has_a_range_and_absurd_values_are_refused(
    name: str, option: str, annotation: Any
) -> None:
    ranges = list(numbers(annotation))
    assert None not in ranges, f"{name}: {option}"
    for value in (-1, -1e9, 1e18, 10**20, math.nan, math.inf, -math.inf):
        if not any(value in found for found in ranges if found):
            with pytest.raises(UsageError, match=f"{name}: {option} is .*; allowed: "):
                make_pass(name, {option: value})


@each_case("pattern", ["2:" + "9" * 5000, "1:1000000000", "-1:4", "4:2", "0:4", "٢:٤", "half"])
def test_an_absurd_sparsity_is_refused(pattern: str) -> None:
    with pytest.raises(UsageError, match=r"prune-weights: sparsity is .*allowed: a share") as caught:
        make_pass("prune-weights", {"sparsity": pattern})
    assert len(str(caught.value)) < 400


def test_names_are_listed_in_order() -> None:
    assert list(PASSES) == sorted(PASSES)
    assert set(PASSES) <= set(pass_names())


def test_an_unknown_pass_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UsageError, match=r"unknown pass 'cleanup'\. Did you mean 'clean-up'\?"):
        load_pass_class("cleanup")


def test_an_unknown_option_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UsageError) as caught:
        make_pass("fold-constants", {"max_byte": 3})
    message = "fold-constants: unknown option 'max_byte'. Did you mean 'max_bytes'?"
    assert str(caught.value) == message


def test_a_pass_without_options_says_so() -> None:
    with pytest.raises(UsageError, match=r"clean-up: unknown option 'fast'; it has no options\."):
        make_pass("clean-up", {"fast": True})


def test_a_wrong_value_is_refused() -> None:
    with pytest.raises(UsageError, match="pack-projections: strict is 'yes'; allowed: true or false"):
        make_pass("pack-projections", {"strict": "yes"})


def test_lists_of_a_recipe_become_tuples(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ("all-options", FOREIGN))
    assert make_pass("all-options", {"layers": ["a"], "ratio": 2}) == AllOptions(layers=("a",), ratio=2.0)


def test_a_third_party_pass_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ("all-options", FOREIGN))
    assert "all-options" in pass_names()
    assert load_pass_class("all-options") is AllOptions


def test_a_third_party_pass_cannot_take_the_name_of_a_built_in(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ("clean-up", FOREIGN))
    with pytest.raises(
        UsageError, match=f"{FOREIGN} registers a pass named 'clean-up', which is ingot.passes.fusion.clean_up"
    ):
        make_pass("fold-constants")


def test_two_third_parties_cannot_share_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ("all-options", FOREIGN), ("all-options", "elsewhere:Other"))
    with pytest.raises(UsageError, match=r"elsewhere:Other registers a pass named 'all-options', which is tests\."):
        pass_names()


def test_an_entry_point_to_a_pass_of_another_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ("other-name", FOREIGN))
    with pytest.raises(UsageError, match="registered as pass 'other-name' but is not a Pass class of that name"):
        load_pass_class("other-name")
