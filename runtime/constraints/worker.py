"""Compiles constraints where llguidance may crash, loop or take all memory: in a process with a vocabulary and no more.

`trials` starts this file as a script, without Ingot's other modules, so that it is ready in a tenth of a second. The
engine's own process then compiles with the same functions what was cheap here, on a larger stack.
"""

import json
import os
import pickle
import random
import resource
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeVar

if TYPE_CHECKING:
    import llguidance

_T = TypeVar("_T")
LENGTH = struct.Struct("<I")
SECONDS = 2.0  # of processor time for one constraint
MEMORY_BYTES = 256 << 20  # beyond the vocabulary
OUT_OF_MEMORY = "out of memory"
COMPILE_STACK_BYTES = 8 << 20  # in the engine's process
# What survives on the smaller stacks of a trial does so in the engine's process, whose masks any thread computes.
_TRIAL_STACK_BYTES, _MASK_STACK_BYTES = 2 << 20, 1 << 20
_LEXER_FUEL = 1_000_000  # of the start: about 20 ms
_STEP_LEXER_FUEL = 100_000
_STEP_ITEMS = 25_000
_GRAMMAR_SYMBOLS = 500_000
_WALKS, _WALK_TOKENS = 2, 8


class Spelling(NamedTuple):
    """The bytes of each token; special tokens spell nothing. The form of a vocabulary that travels to this process."""

    tokens: Sequence[bytes]
    special_token_ids: Sequence[int]
    eos_token_id: int
    bos_token_id: int | None = None

    def __call__(self, text: str) -> list[int]:
        """Tokens of a text. Nothing here depends on them: they only spell out what a grammar forces."""
        return []


class ConstraintSource(NamedTuple):
    """A regular expression, or a grammar in Lark's EBNF."""

    text: str
    is_regex: bool = False


def compiled(source: ConstraintSource, vocabulary: "llguidance.LLTokenizer") -> "llguidance.LLMatcher":
    """Compile a source. `is_error` of the result says whether that failed; ValueError for a wrong expression."""
    import llguidance

    grammar = in_lark(source.text) if source.is_regex else source.text
    limits = llguidance.LLParserLimits(
        initial_lexer_fuel=_LEXER_FUEL,
        step_lexer_fuel=_STEP_LEXER_FUEL,
        step_max_items=_STEP_ITEMS,
        max_grammar_size=_GRAMMAR_SYMBOLS,
        verbose_errors=False,
    )
    return llguidance.LLMatcher(
        vocabulary, llguidance.LLMatcher.grammar_from_lark(f"{grammar}\n{EXACT}"), log_level=0, limits=limits
    )


def in_lark(expression: str) -> str:
    """The grammar of the texts that a regular expression matches."""
    import llguidance

    return f"start: /{llguidance.regex_to_lark(expression, '')}/"


# Where a text is forced, allow every spelling of it, not only that of the tokenizer: masks then forbid nothing but what
# the language does. At the end of a grammar, so that errors have the lines of the source.
EXACT = '%llguidance {"no_forcing": true}'


_stack = threading.Lock()


def on_stack(num_bytes: int, work: Callable[[], _T]) -> _T:
    """Do some work in a thread with a stack of this size, and return or raise what it does."""
    outcome: Future[_T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 (the caller gets it: a panic of Rust too)
            outcome.set_exception(error)

    with _stack:  # threads that start elsewhere meanwhile have such a stack too
        before = threading.stack_size(num_bytes)
        try:
            thread = threading.Thread(target=run, name="ingot-compile")
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return outcome.result()


def tried(source: ConstraintSource, vocabulary: "llguidance.LLTokenizer") -> dict[str, object]:
    """Compile a source and follow it for some tokens, as the engine's process would; what that took, or the reason."""
    begun, (_, before) = time.process_time(), _memory_bytes()
    matcher = on_stack(_TRIAL_STACK_BYTES, lambda: compiled(source, vocabulary))
    compile_seconds = time.process_time() - begun
    if matcher.is_error():
        return {"reason": matcher.get_error()}
    found = on_stack(_MASK_STACK_BYTES, lambda: _followed(matcher))
    return found if "reason" in found else {
        **found, "compile_seconds": compile_seconds, "resident_bytes": _memory_bytes()[1] - before
    }  # fmt: skip


def _followed(matcher: "llguidance.LLMatcher") -> dict[str, object]:
    begun = time.process_time()
    forced = matcher.deep_copy().compute_ff_bytes()
    forced_seconds = time.process_time() - begun
    first = matcher.deep_copy()
    first.compute_bitmask()
    if first.is_error():
        return {"reason": first.get_error(), "forced": forced[:64].decode(errors="ignore")[:1]}
    walks = (_slowest_mask(matcher.deep_copy(), random.Random(seed)) for seed in range(_WALKS))
    return {"forced_seconds": forced_seconds, "mask_seconds": max(walks)}


def _slowest_mask(matcher: "llguidance.LLMatcher", rng: random.Random) -> float:
    """Follow allowed tokens, chosen at random, and return the longest processor time of a mask."""
    slowest = 0.0
    for _ in range(_WALK_TOKENS):
        begun = time.process_time()
        mask = matcher.compute_bitmask()
        slowest = max(slowest, time.process_time() - begun)
        token = None if matcher.is_error() else _allowed_token(mask, rng)
        if token is None or not matcher.consume_token(token):
            break
    return slowest


def _allowed_token(mask: bytes, rng: random.Random) -> int | None:
    """The first allowed token from a random place on; None without one."""
    start = rng.randrange(len(mask))
    rest = mask[start:] + mask[:start]
    place = len(rest) - len(rest.lstrip(b"\0"))
    if place == len(rest):
        return None
    bits = [bit for bit in range(8) if rest[place] >> bit & 1]
    return (start + place) % len(mask) * 8 + rng.choice(bits)


def _memory_bytes() -> tuple[int, int]:
    """Addresses that this process uses, and memory that it has; 0 of both where the system is not Linux."""
    try:
        with open("/proc/self/statm", "rb") as file:
            pages, resident = map(int, file.read().split()[:2])
    except OSError:
        return 0, 0
    return pages * resource.getpagesize(), resident * resource.getpagesize()


def read_message(file: BinaryIO) -> bytes:
    """A message after its length; EOFError at the end of the file."""
    head = file.read(LENGTH.size)
    if len(head) < LENGTH.size:
        raise EOFError
    return file.read(LENGTH.unpack(head)[0])


def main() -> None:
    """Answer each source that arrives on standard input with JSON, until that ends. The first message is a Spelling."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library may print, and only answers may go there
    import llguidance

    vocabulary = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Spelling(*pickle.loads(_next()))))
    _limit_memory()
    _answer(answers, {})
    while True:
        source = ConstraintSource(*pickle.loads(_next()))
        # A process that takes longer ends by SIGPROF.
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        answer = _tried_or_reason(source, vocabulary)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _answer(answers, answer)


def _next() -> bytes:
    try:
        return read_message(sys.stdin.buffer)
    except EOFError:
        os._exit(0)


def _tried_or_reason(source: ConstraintSource, vocabulary: "llguidance.LLTokenizer") -> dict[str, object]:
    try:
        return tried(source, vocabulary)
    except MemoryError:
        return {"reason": OUT_OF_MEMORY}
    except BaseException as error:  # noqa: BLE001 (the client gets it: a panic of Rust too)
        return {"reason": str(error)}


def _limit_memory() -> None:
    used, _ = _memory_bytes()
    if not used:
        return
    limit = used + MEMORY_BYTES
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    if most == resource.RLIM_INFINITY or limit < most:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _answer(file: BinaryIO, value: dict[str, Any]) -> None:
    data = json.dumps(value).encode()
    file.write(LENGTH.pack(len(data)) + data)
    file.flush()


if __name__ == "__main__":
    main()
