"""Masks against brute force: exactly the tokens that some text of the language continues."""

import random
from itertools import permutations

import numpy as np
import pytest

pytest.importorskip("llguidance", reason="the extra `structured` is not installed")

import regex

from ingot.runtime.constraints import Constraint
from ingot.runtime.constraints.compiler import ConstraintCompiler, Grammar
from ingot.runtime.constraints.constraint import MADE_HERE
from ingot.runtime.constraints.matcher import ConstraintFailed, MaskWorker
from tests.runtime.constraints.grammars import END, NAMES, allowed, matcher, spelled
from tests.runtime.engines import demo_tokenizer, sentencepiece_tokenizer

PATTERN = r"(ab?c|\d{2,4}(\.\d)?|é+)( and [a-c]{1,3})*"
CHOICES = Constraint.choice(NAMES)


def spelled_in_full(text: bytes, token: int) -> str | None:
    """The text with a token, where that ends with a whole character."""
    try:
        return (text + spelled(token)).decode()
    except UnicodeDecodeError:
        return None


def test_choices_allow_exactly_the_tokens_that_one_of_them_continues() -> None:
    rng = random.Random(1)
    texts = [name.encode() for name in NAMES]
    for _ in range(12):
        state, text = matcher(CHOICES), b""
        while not state.is_complete:
            expected = {
                token
                for token in range(demo_tokenizer().vocab_size)
                if (piece := spelled(token)) and any(each.startswith(text + piece) for each in texts)
            }
            expected |= {END} if text in texts else set()
            assert set(allowed(state.mask())) == expected
            token = rng.choice(sorted(expected - {END}))
            state.consume(token)
            text += spelled(token)
        assert text in texts


def test_a_regex_allows_exactly_the_tokens_that_a_match_continues() -> None:
    rng = random.Random(2)
    pattern = regex.compile(PATTERN)
    for _ in range(6):
        state, text = matcher(Constraint.regex(PATTERN)), b""
        for _ in range(8):
            found = set(allowed(state.mask()))
            for token in range(demo_tokenizer().vocab_size):
                whole = spelled_in_full(text, token)
                if whole is not None and token != END and whole.encode() != text:
                    assert (token in found) == bool(pattern.fullmatch(whole, partial=True)), (text, token)
            ends = spelled_in_full(text, END)
            if ends is not None:
                assert (END in found) == bool(pattern.fullmatch(ends))
            token = rng.choice(sorted(found - {END}) or [END])
            if token == END:
                break
            state.consume(token)
            text += spelled(token)


def test_masks_after_drafts_are_those_of_plain_steps() -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
    ids = demo_tokenizer().encode('{"name": "Ann", "age": 41}', add_special_tokens=False)
    plain, masks = matcher(Constraint.json_schema(schema)), []
    for token in ids:
        masks.append(plain.mask())
        plain.consume(token)
    assert plain.is_complete
    for start in range(len(ids)):
        for count in range(min(5, len(ids) - start)):
            drafted = matcher(Constraint.json_schema(schema))
            for token in ids[:start]:
                drafted.consume(token)
            MaskWorker().start([(drafted, ids[start : start + count])])()
            assert len(drafted.masks_ahead) == count + 1
            for index, mask in enumerate(drafted.masks_ahead):
                np.testing.assert_array_equal(mask, masks[start + index])


_KINDS = {
    "string": {"type": "string"},
    "integer": {"type": "integer"},
    "choice": {"enum": ["a", 1]},
    "array": {"type": "array"},
}


@pytest.mark.parametrize(("kind", "drafted"), list(permutations(_KINDS, 2)))
def test_a_rejected_draft_of_another_key_leaves_the_masks_of_the_value(kind: str, drafted: str) -> None:
    properties = {"spec": _KINDS[kind], "labels": _KINDS[drafted]}
    constraint = Constraint.json_schema({"type": "object", "properties": properties, "required": ["labels"]})
    begin, draft, key, colon = (
        demo_tokenizer().encode(text, add_special_tokens=False) for text in ('{"', 'labels":', "spec", '":')
    )
    state, plain = matcher(constraint), matcher(constraint)
    for token in begin:
        state.consume(token)
    state.prepare(draft)
    for token in key:
        state.consume(token)
    state.forced()
    for token in colon:
        state.consume(token)
    for token in (*begin, *key, *colon):
        plain.consume(token)
    np.testing.assert_array_equal(state.mask(), plain.mask())


def test_a_rejected_draft_leaves_no_mask_of_it() -> None:
    state = matcher(CHOICES)
    first, other = (demo_tokenizer().encode(text, add_special_tokens=False) for text in ("alpha", "beta"))
    state.prepare(first[:1])
    state.consume(other[0])
    assert not state.masks_ahead
    rest = matcher(CHOICES)
    rest.consume(other[0])
    np.testing.assert_array_equal(state.mask(), rest.mask())


def test_a_fork_goes_its_own_way() -> None:
    state = matcher(CHOICES)
    copy = state.fork()
    before = allowed(copy.mask())
    state.consume(demo_tokenizer().encode("beta", add_special_tokens=False)[0])
    assert allowed(copy.mask()) == before


def test_end_tokens_are_allowed_where_the_text_is_complete_alone() -> None:
    digits = demo_tokenizer().encode("12", add_special_tokens=False)
    space = demo_tokenizer().encode(" ", add_special_tokens=False)[0]
    state = matcher(Constraint.regex(r"\d+( \d+)?"), ends=(END, space))
    assert END not in allowed(state.mask())
    for token in digits:
        state.consume(token)
    assert {END, space} <= set(allowed(state.mask()))
    state.consume(space)  # as a token of the text it may follow too; as an end token it is never consumed
    assert not {END, space} & set(allowed(state.mask()))
    without = matcher(Constraint.regex(r"\d+"), ends=())
    for token in digits:
        without.consume(token)
    assert END not in allowed(without.mask())


def test_a_token_that_is_forbidden_fails_the_sequence() -> None:
    state = matcher(CHOICES)
    with pytest.raises(ConstraintFailed, match="cannot be followed further"):
        state.consume(END)
    with pytest.raises(ConstraintFailed):
        state.mask()


def test_a_draft_that_is_not_allowed_fails_the_sequence() -> None:
    state = matcher(CHOICES)
    with pytest.raises(ConstraintFailed, match="cannot be followed further"):
        state.prepare([END, END])


def test_a_dead_end_names_its_cause() -> None:
    tokenizer = sentencepiece_tokenizer("ab", byte_fallback=False)
    grammar = ConstraintCompiler(tokenizer, tokenizer.vocab_size).compile(Constraint.regex("ax"))
    state = grammar.matcher(())
    state.consume(tokenizer.encode("a", add_special_tokens=False)[-1])
    with pytest.raises(ConstraintFailed, match="no token of the vocabulary spells what must follow"):
        state.mask()


def test_forced_text_is_spelled_in_tokens_that_are_allowed() -> None:
    tokenizer = sentencepiece_tokenizer()
    grammar = ConstraintCompiler(tokenizer, tokenizer.vocab_size).compile(Constraint.choice(["entrue and more"]))
    state = grammar.matcher(())
    forced = state.forced()
    assert len(forced) > 2
    assert state.num_allowed(forced) == len(forced)


NESTED = {"type": "array", "items": {"$ref": "#/$defs/nested"}, "minItems": 1}
ENDLESS = [
    Constraint.grammar('start: "n" | x\nx: "[" x'),
    # It takes minutes in llguidance: every "[" goes on in all the pairs before it.
    Constraint.grammar('start: "n" | x\nx: "[" x x | "[" x'),
    Constraint.grammar(f'{MADE_HERE}\nstart: "n" | x\nx: "[" x'),
    Constraint.json_schema({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/nested"}], "$defs": {"nested": NESTED}}),
]


@pytest.mark.parametrize("constraint", ENDLESS)
def test_a_text_that_may_be_forced_without_end_is_not_drafted(constraint: Constraint) -> None:
    state = matcher(constraint)
    assert state.forced() == []
    if constraint.kind == "grammar":
        state.consume(next(token for token in allowed(state.mask()) if spelled(token) == b"["))
        assert state.forced() == []


def test_forced_text_is_spelled_in_tokens() -> None:
    state = matcher(Constraint.choice(["def read_file(path):"]))
    text = b"".join(map(spelled, state.forced()))
    assert text
    assert b"def read_file(path):".startswith(text)


def test_a_sequence_that_exceeds_a_limit_leaves_the_others_as_they_are_alone() -> None:
    constraint = Constraint.regex(r"(\w{1,50}){1,57}x")

    def outcome(grammar: Grammar, seed: int, num_tokens: int) -> list[int] | str:
        state, rng, tokens = grammar.matcher(()), random.Random(seed), list[int]()
        try:
            for _ in range(num_tokens):
                allowed = np.flatnonzero(np.unpackbits(state.mask().view(np.uint8), bitorder="little"))
                tokens.append(int(rng.choice(allowed)))
                state.consume(tokens[-1])
        except ConstraintFailed as error:
            return str(error)
        return tokens

    asked = [(5, 10), (0, 60), (5, 10), (1, 60), (5, 1), (6, 8)]
    shared = ConstraintCompiler(demo_tokenizer(), 4096).compile(constraint)
    found = [outcome(shared, *each) for each in asked]
    alone = [outcome(ConstraintCompiler(demo_tokenizer(), 4096).compile(constraint), *each) for each in asked]
    assert found == alone
    assert any(isinstance(each, str) for each in found)
    assert any(isinstance(each, list) for each in found[2:])
