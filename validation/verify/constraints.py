"""The constraints of a verification: a JSON schema and a pattern, if the vocabulary spells all their characters."""

from collections.abc import Mapping
from importlib.util import find_spec

from ingot.errors import shown
from ingot.runtime.constraints.constraint import Constraint
from ingot.runtime.constraints.vocabulary import TokenBytes
from ingot.runtime.text.tokenizer import Tokenizer

SCHEMA = Constraint.json_schema(
    {
        "type": "object",
        "properties": {
            "identifier": {"type": "integer"},
            "category": {"enum": ["first category", "second category", "third category"]},
            "values": {"type": "array", "items": {"type": "integer"}, "minItems": 3},
        },
        "required": ["identifier", "category", "values"],
        "additionalProperties": False,
    }
)
PATTERN = Constraint.regex(r"((one|two|three) and a (half|quarter), ){2,400}")
_CHARACTERS: Mapping[Constraint, str] = {
    SCHEMA: '{}[]:," -0123456789identifier first second third category values',
    PATTERN: "one two three and a half quarter,",
}


def missing_constraints(tokenizer: Tokenizer | None, vocab_size: int) -> str:
    """The reason why an engine cannot follow constraints; "" if it can."""
    if tokenizer is None:
        return "the artifact has no tokenizer, and constraints are about texts"
    if find_spec("llguidance") is None:
        return "the package llguidance is not installed: pip install 'ingot[structured]'"
    missing = _missing_characters(PATTERN, tokenizer, vocab_size)
    return f"the vocabulary has no token for {', '.join(map(shown, missing))} alone" if missing else ""


def sampled_constraint(tokenizer: Tokenizer, vocab_size: int) -> Constraint:
    """The schema, or the pattern where the vocabulary does not spell JSON."""
    return PATTERN if _missing_characters(SCHEMA, tokenizer, vocab_size) else SCHEMA


def _missing_characters(constraint: Constraint, tokenizer: Tokenizer, vocab_size: int) -> list[str]:
    """Characters of the constraint's texts that are not a token of their own, so that a text may be a dead end."""
    tokens = set(TokenBytes(tokenizer, vocab_size).tokens)
    return [each for each in sorted(set(_CHARACTERS[constraint])) if each.encode() not in tokens]
