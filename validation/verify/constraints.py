"""The constraints of a verification: a JSON schema and a pattern, if the vocabulary spells all their characters."""

from collections.abc import Mapping
from importlib.util import find_spec

from ingot.errors import shown
from ingot.runtime.constraints.constraint import Constraint
from ingot.runtime.constraints.vocabulary import TokenBytes
from ingot.runtime.text.tokenizer import Tokenizer
from ingot.version import install_command

_DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
# Many short objects that leave out keys: a draft copied from an earlier object ends in the value of another key.
SCHEMA = Constraint.json_schema(
    {
        "type": "array",
        "minItems": 99,
        "items": {
            "type": "object",
            "properties": {
                "aa": {"enum": ["a", "b"]},
                "bb": _DIGIT,
                "cc": {"type": "boolean"},
                "dd": {"type": "array", "items": _DIGIT, "maxItems": 1},
            },
            "required": ["dd"],
            "additionalProperties": False,
        },
    }
)
PATTERN = Constraint.regex(r"((one|two|three) and a (half|quarter), ){2,400}")
_CHARACTERS: Mapping[Constraint, str] = {
    SCHEMA: '{}[]:," 0123456789abcdetrufls',
    PATTERN: "one two three and a half quarter,",
}


def missing_constraints(tokenizer: Tokenizer | None, vocab_size: int) -> str:
    """The reason why an engine cannot follow constraints, or ""."""
    if tokenizer is None:
        return "the artifact has no tokenizer, and constraints are about texts"
    if find_spec("llguidance") is None:
        return f"the package llguidance is not installed: {install_command('structured')}"
    missing = _missing_characters(PATTERN, tokenizer, vocab_size)
    return f"the vocabulary has no token for {', '.join(map(shown, missing))} alone" if missing else ""


def sampled_constraint(tokenizer: Tokenizer, vocab_size: int) -> Constraint:
    """The schema, or the pattern where the vocabulary does not spell JSON."""
    return PATTERN if _missing_characters(SCHEMA, tokenizer, vocab_size) else SCHEMA


def _missing_characters(constraint: Constraint, tokenizer: Tokenizer, vocab_size: int) -> list[str]:
    """Characters of the constraint's texts that are not a token of their own, so that a text may be a dead end."""
    tokens = set(TokenBytes(tokenizer, vocab_size).tokens)
    return [each for each in sorted(set(_CHARACTERS[constraint])) if each.encode() not in tokens]
