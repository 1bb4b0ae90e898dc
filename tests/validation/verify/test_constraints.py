"""Which constraints are verified follows from the characters that the vocabulary spells."""

from string import ascii_lowercase

import pytest

pytest.importorskip("llguidance", reason="the extra `structured` is not installed")

from ingot.runtime.constraints.compiler import ConstraintCompiler
from ingot.runtime.text.tokenizer import Tokenizer
from ingot.validation.verify.constraints import PATTERN, SCHEMA, missing_constraints, sampled_constraint
from tests.each_case import each_case
from tests.runtime.engines import demo_tokenizer, sentencepiece_tokenizer


@each_case("tokenizer", [demo_tokenizer(), sentencepiece_tokenizer()])
def test_most_vocabularies_spell_json(tokenizer: Tokenizer) -> None:
    size = tokenizer.vocab_size
    assert missing_constraints(tokenizer, size) == ""
    assert sampled_constraint(tokenizer, size) == SCHEMA


def test_a_vocabulary_without_braces_verifies_the_pattern() -> None:
    tokenizer = sentencepiece_tokenizer(f"{ascii_lowercase},", byte_fallback=False)
    size = tokenizer.vocab_size
    assert missing_constraints(tokenizer, size) == ""
    assert sampled_constraint(tokenizer, size) == PATTERN
    ConstraintCompiler(tokenizer, size).compile(PATTERN)


def test_a_vocabulary_that_spells_neither_names_a_character_that_it_lacks() -> None:
    tokenizer = sentencepiece_tokenizer("abcdefghijklmnopqrstuvwxy", byte_fallback=False)
    assert missing_constraints(tokenizer, tokenizer.vocab_size) == "the vocabulary has no token for ',' alone"
    assert "no tokenizer" in missing_constraints(None, 100)
