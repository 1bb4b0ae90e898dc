"""Compiles constraints with llguidance, within bounds, and keeps the latest: a service repeats its schemas.

Compilation takes from a fraction of a millisecond to about a tenth of a second; what a hostile source could make longer
is bounded by the compiler's own budget (`LLParserLimits`), not by a clock, so that a source is refused on every machine
or on none. Several threads may compile at a time. Nothing is compiled in a step of the engine, if `Engine.add` gets a
grammar that was compiled before, as AsyncEngine gives it.
"""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from functools import cached_property, partial
from typing import TYPE_CHECKING

from ingot.errors import RequestError, shown
from ingot.runtime.constraints.constraint import FIELD, Constraint, JsonWhitespace
from ingot.runtime.constraints.dates import with_dates
from ingot.runtime.constraints.matcher import ConstraintFailed, Matcher
from ingot.runtime.constraints.vocabulary import read_vocabulary
from ingot.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

_KEPT = 128  # grammars
_LEXER_FUEL = 1_000_000  # of the start: about 20 ms
_GRAMMAR_SYMBOLS = 500_000
_SHOWN_CHARS = 400
# Where a text is forced, allow every spelling of it, not only that of the tokenizer: masks then forbid nothing but what
# the language does. At the end of a grammar, so that errors have the lines of the source.
_EXACT = '%llguidance {"no_forcing": true}'
# Natural JSON, such as {"a": 1, "b": [2, 3]}, with or without its spaces.
_COMPACT = json.dumps({"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"})
_ANY_OBJECT = '{"type": "object"}'
_GUIDANCE = "x-guidance"  # the key of llguidance's own options in a schema
_COERCE = (
    "Enable 'coerce_one_of' option to approximate oneOf with anyOf",
    f'Use anyOf, or add "{_GUIDANCE}": {{"coerce_one_of": true}} to the schema, which takes oneOf for anyOf',
)
_PLACE = re.compile(r"^(at )?\d+\(\d+\): ")
_EXCERPT = re.compile(r"^ +\d+ \| .*(\n +\^)?$", re.MULTILINE)
_UNSUPPORTED = re.compile(r'Unimplemented keys: \[((?:"(?:[^"\\]|\\.)*"(?:, )?)*)\]')


class Grammar:
    """A compiled constraint, which any number of sequences may follow.

    Copies of llguidance's parser share its lexer, whose states add up over all sequences until a limit is exceeded, for
    all of them. A sequence whose parser fails therefore continues with a new one of its own (`new`), so that it fails
    by its own text alone; later sequences get copies of another new one.
    """

    def __init__(self, compiled: "Callable[[], llguidance.LLMatcher]", vocabulary: "llguidance.LLTokenizer") -> None:
        self._compiled = compiled
        self._native = compiled()
        self._vocabulary = vocabulary
        self._lock = threading.Lock()

    def matcher(self, end_token_ids: Collection[int]) -> Matcher:
        """The state of a new sequence, whose output any of these tokens ends."""
        with self._lock:
            return Matcher(self._native.deep_copy(), self._vocabulary, end_token_ids, self.new)

    def new(self) -> "llguidance.LLMatcher":
        """A parser at the beginning of a text, which shares nothing with others."""
        with self._lock:
            self._native = self._compiled()
        return self._compiled()


class ConstraintCompiler:
    """Compiles the constraints of one model."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._kept: OrderedDict[Constraint, Grammar] = OrderedDict()  # the least recently used first

    def compile(self, constraint: Constraint) -> Grammar:
        """The grammar of a constraint.

        RequestError, with the compiler's reason, when it cannot be compiled, or no token can begin its texts.
        """
        with self._lock:
            known = self._kept.get(constraint)
            if known:
                self._kept.move_to_end(constraint)
                return known
        grammar = Grammar(partial(self._compiled, constraint), self.read_vocabulary())
        _require_beginning(constraint, grammar)
        with self._lock:
            self._kept[constraint] = grammar
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return grammar

    def read_vocabulary(self) -> "llguidance.LLTokenizer":
        """Read the vocabulary, once: the first constraint waits for it otherwise."""
        with self._reading:
            return self._vocabulary

    @cached_property
    def _vocabulary(self) -> "llguidance.LLTokenizer":
        if self._tokenizer is None:
            raise RequestError("a constraint is about texts, and the artifact has no tokenizer", field=FIELD)
        return read_vocabulary(self._tokenizer, self._vocab_size)

    def _compiled(self, constraint: Constraint) -> "llguidance.LLMatcher":
        vocabulary = self.read_vocabulary()
        import llguidance

        limits = llguidance.LLParserLimits(
            initial_lexer_fuel=_LEXER_FUEL, max_grammar_size=_GRAMMAR_SYMBOLS, verbose_errors=False
        )
        source = llguidance.LLMatcher.grammar_from_lark(f"{lark_of(constraint)}\n{_EXACT}")
        native = llguidance.LLMatcher(vocabulary, source, log_level=0, limits=limits)
        if native.is_error():
            raise _refusal(constraint, native.get_error())
        return native


def _require_beginning(constraint: Constraint, grammar: Grammar) -> None:
    """Raise RequestError unless some token can begin a text of the constraint."""
    state = grammar.matcher(())
    forced = state.forced_text().decode(errors="ignore")
    try:
        state.mask()
    except ConstraintFailed as error:
        if not error.lacks_tokens:
            raise _refusal(constraint, str(error)) from error
        beginning = f"{shown(forced[0])}, which all its texts begin with" if forced else "the beginning of its texts"
        raise _refusal(constraint, f"no token of the model's vocabulary spells {beginning}") from error


def lark_of(constraint: Constraint) -> str:
    """The constraint as a grammar in Lark's EBNF."""
    source = constraint.source
    match constraint.kind:
        case "json_schema":
            if '"format"' in source:
                source = json.dumps(with_dates(json.loads(source)), ensure_ascii=False)
            return f"start: %json {_spaced(source, constraint.whitespace)}"
        case "json_object":
            return f"start: %json {_spaced(_ANY_OBJECT, constraint.whitespace)}"
        case "regex":
            return _matching(source)
        case "choice":
            return _matching("|".join(map(_literal, json.loads(source))))
        case "grammar":
            return source


def _spaced(schema: str, whitespace: JsonWhitespace) -> str:
    """The JSON text of a schema with the option for its white space, unless it has options of its own.

    The option is added to the text, because numbers may not survive being parsed and written again.
    """
    value = json.loads(schema)
    if whitespace == "flexible" or value is False or (isinstance(value, dict) and _GUIDANCE in value):
        return schema
    rest = schema.strip().removeprefix("{").lstrip() if value and isinstance(value, dict) else "}"
    return f'{{"{_GUIDANCE}": {_COMPACT}{", " if rest != "}" else ""}{rest}'


def _matching(pattern: str) -> str:
    from llguidance import regex_to_lark

    return f"start: /{regex_to_lark(pattern, '')}/"


def _literal(text: str) -> str:
    """A regular expression for a text: other escapes than these differ between dialects."""
    return "".join(each if each.isalnum() else f"\\x{{{ord(each):x}}}" for each in text)


def _in_own_words(reason: str, *, is_source: bool) -> str:
    """llguidance's reason without what the client did not write. `is_source`: its places are in the client's text."""
    reason = reason.replace(*_COERCE)
    if is_source:
        return "\n".join(line for line in reason.splitlines() if not line.endswith(f"| {_EXACT}"))
    return _EXCERPT.sub("", _PLACE.sub("", reason)).removeprefix("failed to compile JSON schema: ").strip()


def _refusal(constraint: Constraint, reason: str) -> RequestError:
    unsupported = _UNSUPPORTED.search(reason)
    if unsupported:
        said = f"it uses keywords that are not supported: {unsupported[1]}; leave them out, or express them otherwise"
    else:
        text = _in_own_words(reason.partition("\n<")[0].strip(), is_source=constraint.kind == "grammar")
        said = text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
    return RequestError(f"the {constraint.kind} cannot be compiled: {said}", field=FIELD)
