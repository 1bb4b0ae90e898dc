"""The attack on the compiler of constraints makes the same constraints by a seed, follows them and reports a death."""

import io
import json
import random

import pytest

pytest.importorskip("llguidance", reason="the extra `structured` is not installed")

from benchmarks.structured import attack

from ingot.runtime.constraints import Constraint
from tests.runtime.constraints.grammars import compiler


def test_a_seed_makes_the_same_constraints() -> None:
    for kind in ("regex", "known"):
        made = [[attack.KINDS[kind](random.Random(seed)) for seed in range(20)] for _ in range(2)]
        assert made[0] == made[1]
        assert len(set(made[0])) > 5


def test_nested_texts_are_followed_deeply() -> None:
    nested = Constraint.grammar('start: "(" start ")" | "[" start "]" | "a"')
    found = attack.follow(compiler(), nested, seed=1, num_tokens=300)
    assert (found.refusal, found.failure) == ("", "")
    assert found.masks >= 300


def test_what_is_refused_is_not_followed() -> None:
    found = attack.follow(compiler(), Constraint.regex("("), seed=1)
    assert found.refusal.startswith("the regex cannot be compiled: ")
    assert found.masks == 0


def test_a_process_that_dies_is_a_problem_with_its_constraint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attack, "KINDS", {name: lambda rng: Constraint.regex("a") for name in attack.KINDS})
    monkeypatch.setattr(attack, "_follow_all", _dies)
    log = io.StringIO()
    found = attack.attack(60, 0, log, most=1)
    assert found["problems"] == [{"problem": "the process ended: SIGSEGV", "kind": "regex", "source": "a"}]
    assert json.loads(log.getvalue())["source"] == "a"


def _dies(connection: object) -> None:
    import os
    import signal

    connection.recv()  # type: ignore[attr-defined]
    os.kill(os.getpid(), signal.SIGSEGV)
