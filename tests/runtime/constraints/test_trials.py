"""Constraints that crash, loop or take all memory do so in a process of their own, and are refused with one error."""

import contextlib
import os
import re
import signal
import sys
import threading
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="the extra `structured` is not installed")

from ingot.errors import EngineError, RequestError
from ingot.runtime.constraints import Constraint
from ingot.runtime.constraints.compiler import ConstraintCompiler, source_of
from ingot.runtime.constraints.trials import Cost, Refused, TrialProcesses
from ingot.runtime.constraints.worker import ConstraintSource, Spelling
from tests.each_case import each_case
from tests.runtime.constraints.grammars import END
from tests.runtime.engines import demo_tokenizer

ORDINARY = Constraint.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}})
TOO_DEEP = "it is nested too deep, refers through too many steps, or has a number too large for the compiler; make"


def chained(number: int) -> dict[str, Any]:
    definitions = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(number)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{number}": {"type": "integer"}}}


def rules(number: int) -> str:
    return "start: r0\n" + "\n".join(f"r{n}: r{n + 1}" for n in range(number)) + f"\nr{number}: /a/"


@pytest.fixture(scope="module")
def compiler() -> Any:
    own = ConstraintCompiler(demo_tokenizer(), demo_tokenizer().vocab_size)
    yield own
    own.close()


@each_case(
    ("constraint", "reason"),
    [
        (Constraint.grammar(rules(3000)), TOO_DEEP),
        (Constraint.json_schema(chained(3000)), TOO_DEEP),
        (Constraint.regex("a?" * 16_000), "it takes more than"),
        (Constraint.regex("((a{1000}){1000}){1000}"), "too many expressions"),
        (Constraint.regex("(" * 5000 + "a" + ")*" * 5000), "invalid regex"),
        (Constraint.grammar(f"start: {'(' * 20_000}/a/{')' * 20_000}"), "nested"),
        (
            Constraint.json_schema({"type": "object", "properties": {f"key_{n}": {} for n in range(6000)}}),
            "it takes",
        ),
    ],
)
def test_a_constraint_that_would_crash_or_stop_the_engine_is_refused(
    compiler: ConstraintCompiler, constraint: Constraint, reason: str
) -> None:
    for _ in range(2):
        with pytest.raises(RequestError, match=re.escape(reason)) as refused:
            compiler.compile(constraint)
        assert refused.value.field == "constraint"
        assert str(refused.value).startswith(f"the {constraint.kind} cannot be compiled: ")
    assert compiler.compile(ORDINARY).matcher((END,)).mask().any(), "others are compiled after it"


@each_case(
    "constraint",
    [
        Constraint.json_schema(chained(200)),
        Constraint.grammar(rules(300)),
        Constraint.choice([f"choice {n}" for n in range(5000)]),
        Constraint.json_schema({"type": "object", "properties": {f"key_{n}": {"type": "null"} for n in range(480)}}),
        Constraint.json_schema({"enum": [f"value {n}" for n in range(5000)]}),
    ],
)
def test_a_large_constraint_that_is_cheap_is_followed(compiler: ConstraintCompiler, constraint: Constraint) -> None:
    assert compiler.compile(constraint).matcher((END,)).mask().any()


def test_what_was_refused_is_not_tried_again(compiler: ConstraintCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    constraint = Constraint.grammar(rules(2500))
    with pytest.raises(RequestError) as first:
        compiler.compile(constraint)
    monkeypatch.setattr(compiler._trials, "run", lambda source: pytest.fail("tried again"))
    with pytest.raises(RequestError) as second:
        compiler.compile(constraint)
    assert str(second.value) == str(first.value)


@each_case(
    ("cost", "reason"),
    [
        (
            Cost(0.6, 0, 0, 0),
            "it takes 0.60 s of processor time to compile; at most 0.5 s are allowed; make it simpler",
        ),
        (Cost(0, 0, 0.25, 0), "it takes 0.25 s of processor time for one token; at most 0.1 s are allowed"),
        (Cost(0, 0, 0, 200 << 20), "it takes 200 MiB of memory; at most 128 MiB are allowed"),
    ],
)
def test_a_constraint_that_takes_too_much_is_refused(cost: Cost, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = TrialProcesses(lambda: Spelling([], [], 0))
    monkeypatch.setattr(trials, "_answer", lambda source: cost._asdict())
    with pytest.raises(Refused, match=re.escape(reason)):
        trials.run(ConstraintSource("a", is_regex=True))


def spelling() -> Spelling:
    return Spelling([b"a", b"b", b"{", b"}", b'"', b":", b"<end>"], [6], 6)


def test_a_process_that_was_killed_is_replaced_and_none_is_left() -> None:
    trials = TrialProcesses(spelling)
    source = source_of(Constraint.regex("a*"))
    trials.run(source)
    (process,) = trials._idle
    os.kill(process._process.pid, signal.SIGKILL)
    process._process.wait()
    trials.run(source)
    (other,) = trials._idle
    assert other is not process
    trials.close()
    assert not trials._idle
    assert other._process.returncode == -signal.SIGKILL


def test_constraints_of_many_threads_are_tried_by_at_most_two_processes() -> None:
    trials = TrialProcesses(spelling)
    texts = ["a*", "b*", "(a|b){1,300}c", "a?" * 16_000, "[ab]{3}"] * 3
    outcomes: list[bool] = []

    def run(text: str) -> None:
        try:
            trials.run(ConstraintSource(text, is_regex=True))
        except Refused:
            outcomes.append(False)
        else:
            outcomes.append(True)

    threads = [threading.Thread(target=run, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == len(texts)
    assert len(trials._idle) <= 2
    trials.close()


@pytest.mark.parametrize(
    ("executable", "reason"), [("/no/such/python", "No such file or directory"), ("/bin/false", "it ended with code 1")]
)
def test_without_a_process_a_constraint_is_refused_and_not_compiled_here(
    executable: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ConstraintCompiler(demo_tokenizer(), demo_tokenizer().vocab_size)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", executable)
        with pytest.raises(EngineError, match=f"the process that compiles constraints could not be started.*{reason}"):
            own.compile(ORDINARY)
    own.compile(ORDINARY)
    own.close()


def test_a_constraint_is_known_once_it_was_compiled_or_refused(compiler: ConstraintCompiler) -> None:
    for constraint in (Constraint.regex("known[0-9]"), Constraint.regex("(unknown")):
        assert not compiler.is_known(constraint)
        with contextlib.suppress(RequestError):
            compiler.compile(constraint)
        assert compiler.is_known(constraint)
    assert not compiler.is_known(None)


def test_grammars_that_are_kept_have_a_bound_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ConstraintCompiler(demo_tokenizer(), demo_tokenizer().vocab_size)
    monkeypatch.setattr(own._trials, "run", lambda source: Cost(0, 0, 0, 200 << 20))
    constraints = [Constraint.regex(f"a{number}") for number in range(5)]
    for constraint in constraints:
        assert own.compile(constraint).matcher((END,)).mask().any()
    assert [own.is_known(each) for each in constraints] == [False, False, False, True, True]
