"""Compiles constraints with llguidance, within bounds, and keeps the latest: a service repeats its schemas.

A constraint is tried first in a process that may die of it (`trials`). What is cheap there is compiled again here:
that takes from a fraction of a millisecond to about a tenth of a second, without the interpreter's lock. Several
threads may compile at a time. Nothing is compiled in a step of the engine, if `Engine.add` gets a grammar that was
compiled before, as AsyncEngine gives it.
"""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from functools import cached_property, partial
from typing import TYPE_CHECKING, TypeVar

from ingot.errors import RequestError
from ingot.runtime.constraints.constraint import FIELD, Constraint
from ingot.runtime.constraints.matcher import Matcher
from ingot.runtime.constraints.schema_rules import GUIDANCE, escaped
from ingot.runtime.constraints.schemas import exact_grammar, schema_grammar, spaced
from ingot.runtime.constraints.trials import Cost, Refused, TrialProcesses, without_state
from ingot.runtime.constraints.vocabulary import TokenBytes, read_vocabulary
from ingot.runtime.constraints.worker import (
    COMPILE_STACK_BYTES,
    EXACT,
    ConstraintSource,
    Spelling,
    compiled,
    in_lark,
    on_stack,
)
from ingot.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

_KEPT = 128  # grammars, and as many refusals
# Grammars count with the memory that they took in their trials.
_KEPT_BYTES = 512 << 20
_SHOWN_CHARS = 400
_QUICK_SECONDS = 0.02
_ANY_OBJECT = '{"type": "object"}'
_COERCE = (
    "Enable 'coerce_one_of' option to approximate oneOf with anyOf",
    f'Use anyOf, or add "{GUIDANCE}": {{"coerce_one_of": true}} to the schema, which takes oneOf for anyOf',
)
_PLACE = re.compile(r"^(at )?\d+\(\d+\): ")
_EXCERPT = re.compile(r"^ +\d+ \| .*(\n +\^)?$", re.MULTILINE)
_UNSUPPORTED = re.compile(r'Unimplemented keys: \[((?:"(?:[^"\\]|\\.)*"(?:, )?)*)\]')


_Kept = TypeVar("_Kept")


class Grammar:
    """A compiled constraint, which any number of sequences may follow.

    Copies of llguidance's parser share its lexer, whose states add up over all sequences until a limit is exceeded, for
    all of them. A sequence whose parser fails therefore continues with a new one of its own (`new`), so that it fails
    by its own text alone; later sequences get copies of another new one. That happens within a step, so only where it
    is quick to compile.
    """

    def __init__(
        self,
        compiled: "Callable[[], llguidance.LLMatcher]",
        vocabulary: "llguidance.LLTokenizer",
        cost: Cost,
        *,
        may_recurse: bool,
    ) -> None:
        self._compiled = compiled
        self._native = compiled()
        self._vocabulary = vocabulary
        self._cost = cost
        # A text that is forced has no end in a rule that must contain itself, and llguidance may take minutes for it.
        self._drafts_forced = cost.forced_seconds <= _QUICK_SECONDS and not may_recurse
        self._lock = threading.Lock()

    @property
    def resident_bytes(self) -> int:
        """Memory that it took in its trial."""
        return self._cost.resident_bytes

    def matcher(self, end_token_ids: Collection[int]) -> Matcher:
        """The state of a new sequence, whose output any of these tokens ends."""
        with self._lock:
            native = self._native.deep_copy()
        new = self.new if self._cost.compile_seconds <= _QUICK_SECONDS else None
        return Matcher(native, self._vocabulary, end_token_ids, new, drafts_forced=self._drafts_forced)

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
        self._refused: OrderedDict[Constraint, str] = OrderedDict()
        self._trials = TrialProcesses(self._spelling)

    def compile(self, constraint: Constraint) -> Grammar:
        """The grammar of a constraint.

        RequestError, with the compiler's reason, when it cannot be compiled, takes too long or too much memory, or no
        token can begin its texts. EngineError where no process can be started that tries it.
        """
        with self._lock:
            known = self._kept.get(constraint)
            if known:
                self._kept.move_to_end(constraint)
                return known
            if reason := self._refused.get(constraint):
                raise RequestError(reason, field=FIELD)
        self.read_vocabulary()
        try:
            grammar = self._compile(constraint)
        except RequestError as error:
            self._keep(self._refused, constraint, str(error))
            raise
        self._keep(self._kept, constraint, grammar)
        with self._lock:
            while len(self._kept) > 1 and sum(each.resident_bytes for each in self._kept.values()) > _KEPT_BYTES:
                self._kept.popitem(last=False)
        return grammar

    def is_known(self, constraint: Constraint | None) -> bool:
        """Whether `compile` returns at once, or raises: the constraint is one of the latest."""
        with self._lock:
            return constraint in self._kept or constraint in self._refused

    def close(self) -> None:
        """End the processes that try constraints. Idempotent."""
        self._trials.close()

    def read_vocabulary(self) -> "llguidance.LLTokenizer":
        """Read the vocabulary, once: the first constraint waits for it otherwise."""
        with self._reading:
            return self._vocabulary

    @cached_property
    def _vocabulary(self) -> "llguidance.LLTokenizer":
        return read_vocabulary(self._token_bytes)

    @cached_property
    def _token_bytes(self) -> TokenBytes:
        if self._tokenizer is None:
            raise RequestError("a constraint is about texts, and the artifact has no tokenizer", field=FIELD)
        return TokenBytes(self._tokenizer, self._vocab_size)

    def _spelling(self) -> Spelling:
        found = self._token_bytes
        return Spelling(found.tokens, found.special_token_ids, found.eos_token_id)

    def _compile(self, constraint: Constraint) -> Grammar:
        source = source_of(constraint)
        try:
            cost = self._trials.run(source)
            recurses = may_recurse(constraint, source)
            return Grammar(partial(self._compiled, source), self._vocabulary, cost, may_recurse=recurses)
        except Refused as refused:
            raise _refusal(constraint, refused.reason) from refused

    def _compiled(self, source: ConstraintSource) -> "llguidance.LLMatcher":
        native = on_stack(COMPILE_STACK_BYTES, lambda: compiled(source, self._vocabulary))
        if native.is_error():
            raise Refused(native.get_error())
        return native

    def _keep(self, store: "OrderedDict[Constraint, _Kept]", constraint: Constraint, value: "_Kept") -> None:
        with self._lock:
            store[constraint] = value
            while len(store) > _KEPT:
                store.popitem(last=False)


def may_recurse(constraint: Constraint, source: ConstraintSource) -> bool:
    """Whether a part of a constraint may contain itself, as far as its text shows: any grammar of a client, and any
    reference of a schema (`$ref`, which JSON may spell with escapes)."""
    if source.is_regex:
        return False
    return constraint.is_clients_grammar or "$ref" in source.text or "\\u" in source.text


def source_of(constraint: Constraint) -> ConstraintSource:
    """The constraint as llguidance reads it."""
    if constraint.kind in ("regex", "choice"):
        return ConstraintSource(_expression_of(constraint), is_regex=True)
    return ConstraintSource(lark_of(constraint))


def lark_of(constraint: Constraint) -> str:
    """A constraint as a grammar in Lark's EBNF."""
    source = constraint.source
    match constraint.kind:
        case "regex" | "choice":
            return in_lark(_expression_of(constraint))
        case "json_schema":
            return schema_grammar(source, constraint.whitespace)
        case "json_object":
            return f"start: %json {spaced(_ANY_OBJECT, constraint.whitespace)}"
        case _:
            return exact_grammar(source)


def _expression_of(constraint: Constraint) -> str:
    """The regular expression of a constraint by one, or by choices."""
    is_regex = constraint.kind == "regex"
    return constraint.source if is_regex else "|".join(map(escaped, json.loads(constraint.source)))


def _in_own_words(reason: str, *, is_source: bool) -> str:
    """llguidance's reason without what the client did not write. `is_source`: its places are in the client's text."""
    reason = reason.replace(*_COERCE)
    if is_source:
        return "\n".join(line for line in reason.splitlines() if not line.endswith(f"| {EXACT}"))
    return _EXCERPT.sub("", _PLACE.sub("", reason)).removeprefix("failed to compile JSON schema: ").strip()


def _refusal(constraint: Constraint, reason: str) -> RequestError:
    unsupported = _UNSUPPORTED.search(reason)
    if unsupported:
        said = f"it uses keywords that are not supported: {unsupported[1]}; leave them out, or express them otherwise"
    else:
        text = _in_own_words(without_state(reason), is_source=constraint.is_clients_grammar)
        said = text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
    return RequestError(f"the {constraint.kind} cannot be compiled: {said}", field=FIELD)
