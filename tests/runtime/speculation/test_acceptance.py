"""Estimates of acceptance: kinds and grades apart, a request's own mixed with those of all."""

import pytest

from ingot.runtime.speculation.acceptance import Acceptance


def test_grades_of_one_kind_say_nothing_of_another_nor_of_other_grades() -> None:
    learned = Acceptance()
    unknown = learned.rate(1, "suffix", 3)
    for _ in range(40):
        learned.observe(1, "lookup", (3,), 0)
        learned.observe(1, "draft", (3,), 1)
    assert learned.rate(1, "suffix", 3) == learned.rate(1, "lookup", 2) == unknown
    assert learned.rate(1, "lookup", 3) < 0.1
    assert learned.rate(1, "draft", 3) > 0.9
    assert learned.mean_rate(1, "lookup") < 0.1 < 0.9 < learned.mean_rate(1, "draft")


def test_another_request_begins_with_what_all_had_and_learns_on_its_own() -> None:
    learned = Acceptance()
    for _ in range(40):
        learned.observe(1, "lookup", (3,), 0)
    assert learned.rate(2, "lookup", 3) < 0.1
    for _ in range(20):
        learned.observe(2, "lookup", (3, 3), 2)
    assert learned.rate(2, "lookup", 3) > 0.8
    learned.forget(2)
    learned.forget(2)
    assert learned.rate(2, "lookup", 3) < 0.8


def test_a_draft_survives_if_all_before_it_do() -> None:
    learned = Acceptance()
    learned.observe(1, "draft", (1, 2, 2), 2)
    rates = [learned.rate(1, "draft", grade) for grade in (1, 2)]
    assert learned.survivals(1, "draft", (1, 2)) == pytest.approx([rates[0], rates[0] * rates[1]])
    assert learned.survivals(1, "draft", ()) == []
