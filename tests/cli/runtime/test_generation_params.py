"""Parameters of `ingot run`: of sampling without a beam width, of a beam search with one."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from ingot.cli.runtime.generation_params import constraint_of, generation_params, with_values
from ingot.errors import UsageError
from ingot.runtime import BeamParams, Constraint, SamplingParams
from tests.each_case import each_case

OTHERS: dict[str, Any] = {  # values other than the defaults
    "max_tokens": 7,
    "min_tokens": 3,
    "allowed_token_ids": (5,),
    "skip_special_tokens": False,
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.1,
    "seed": 0,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": {3: 1.0},
    "stop": "x",
    "stop_token_ids": (5,),
    "ignore_eos": True,
    "logprobs": 0,
    "prompt_logprobs": 0,
    "n": 2,
    "best_of": 2,
    "keep_special_tokens": ("<x>",),
    "constraint": Constraint.choice(["yes", "no"]),
}


def test_a_width_makes_a_beam_search() -> None:
    sampling = SamplingParams(max_tokens=9, stop_token_ids=(4,), ignore_eos=True)
    assert generation_params(sampling, None, None) == sampling
    assert generation_params(sampling, 2, None) == BeamParams(
        width=2, max_tokens=9, stop_token_ids=(4,), ignore_eos=True
    )
    assert generation_params(sampling, 1, 0.0) == BeamParams(
        width=1, max_tokens=9, length_penalty=0.0, stop_token_ids=(4,), ignore_eos=True
    )


@each_case("name", [field.name for field in fields(SamplingParams)])
def test_every_parameter_of_sampling_is_one_of_the_search_or_refused(name: str) -> None:
    sampling = SamplingParams(**{name: OTHERS[name]})
    if hasattr(BeamParams(), name):
        assert getattr(generation_params(sampling, 3, None), name) == OTHERS[name]
        return
    with pytest.raises(
        UsageError, match=f"^{name} is .* and beam_width 3, but a beam search .*; leave out one of them$"
    ):
        generation_params(sampling, 3, None)


def test_given_values_replace_those_of_a_search_and_may_end_it() -> None:
    beams = BeamParams(width=4, max_tokens=9, length_penalty=0.5)
    assert with_values(beams, {}) == beams
    assert with_values(beams, {"beam_width": 2}) == BeamParams(width=2, max_tokens=9, length_penalty=0.5)
    assert with_values(beams, {"length_penalty": 2}) == BeamParams(width=4, max_tokens=9, length_penalty=2)
    assert with_values(beams, {"length_penalty": None}) == BeamParams(width=4, max_tokens=9)
    assert with_values(beams, {"beam_width": None, "n": 2}) == SamplingParams(max_tokens=9, n=2)
    assert with_values(SamplingParams(seed=3), {"top_k": 2}) == SamplingParams(seed=3, top_k=2)


def test_one_option_constrains_the_text(tmp_path: Path) -> None:
    schema, grammar = tmp_path / "book.json", tmp_path / "book.lark"
    schema.write_text('{"type": "integer"}')
    grammar.write_text('start: "a"')
    assert constraint_of(schema, None, None) == Constraint.json_schema({"type": "integer"})
    assert constraint_of(None, "[a-z]+", None) == Constraint.regex("[a-z]+")
    assert constraint_of(None, None, grammar) == Constraint.grammar('start: "a"')
    assert constraint_of(None, None, None) is None


@each_case(
    "text, given, message",
    [
        (b"{}", {"regex": "a"}, "--schema and --regex constrain the same text; give one of them"),
        (b"[", {}, r"--schema: the constraint cannot be used: the json_schema is not JSON"),
        (b"3", {}, r"the json_schema is 3; it must be an object, or true"),
        (b"\xff", {}, r"--schema .*s.json cannot be read as text: .*; give a UTF-8 file"),
        (b" " * (1 << 21), {}, r"--schema .*s.json cannot be read as text: it is larger than"),
        (None, {}, r"--schema .*s.json cannot be read: No such file or directory; check the path"),
    ],
    ids=lambda case: repr(case)[:40],
)
def test_a_constraint_that_cannot_be_used_is_refused(
    tmp_path: Path, text: bytes | None, given: dict[str, str], message: str
) -> None:
    file = tmp_path / "s.json"
    if text is not None:
        file.write_bytes(text)
    with pytest.raises(UsageError, match=message):
        constraint_of(file, given.get("regex"), None)
