"""Runs a plan: loads its engines, serves its requests step by step, and observes what happened."""

import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from ingot.errors import EngineError
from ingot.runtime.asking.outputs import Completion
from ingot.runtime.asking.request_options import RequestOptions
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.engine.engine import Engine
from ingot.validation.verify.adapters import load_adapters
from ingot.validation.verify.failing_transfers import TransferFailures, make_transfers_fail
from ingot.validation.verify.plan import Observed, Plan, VerifiedAnswer
from ingot.validation.verify.requests import Expected, VerifiedRequest
from ingot.validation.verify.subject import Subject

_BEFORE = "before "
_SPARE_BLOCKS = 8
_DISK_BLOCKS = 400
_BLOCK_HEADER_BYTES = 4096
# An engine has stalled after so many steps and so much time without an output.
_STALLED_STEPS = 2_000
_STALLED_SECONDS = 60.0
_CANCELLED_AFTER_STEPS = (0, 1, 3)  # while it waits, in its prompt; or while its blocks are restored
_CANCELLED_AFTER_TOKENS = (1, 6)  # while it decodes
# One step in so many runs while blocks are being saved, the others after that.
_FLUSHED_STEPS = 2
_FLUSH_SECONDS = 120.0


class Stalled(EngineError):
    """The engine makes steps, but a request does not end; or its blocks do not reach their tier."""


@dataclass(frozen=True)
class Cancellation:
    """A mate that is cancelled after so many steps, or once it has so many tokens, however many steps that takes."""

    expected: Expected
    steps: int = 0
    tokens: int = 0

    def is_due(self, num_steps: int, num_tokens: int) -> bool:
        """Whether to cancel it now."""
        return num_steps >= self.steps and num_tokens >= self.tokens


def run_plan(plan: Plan, subject: Subject, expected: Sequence[Expected], *, keep_logits: bool) -> Observed:
    """Serve the requests by the plan, and return what they got.

    Raises what the engine raises, Stalled, and AssertionError when the engine's own bookkeeping is inconsistent.
    """
    with tempfile.TemporaryDirectory(prefix="ingot-verify-", dir=subject.scratch) as folder:
        return _run_in(Path(folder), plan, subject, expected, keep_logits)


def _run_in(folder: Path, plan: Plan, subject: Subject, expected: Sequence[Expected], keep_logits: bool) -> Observed:
    before: list[VerifiedAnswer] = []
    if plan.restarts:
        size = _DISK_BLOCKS * (subject.kv.block_bytes + _BLOCK_HEADER_BYTES)
        plan = replace(plan, options=replace(plan.options, kv_disk_path=folder / "kv", kv_disk_bytes=size))
        with _engine(plan, subject, expected) as engine:
            if plan.fails:
                make_transfers_fail(engine, TransferFailures(plan.rarity))
            before = _served_before(engine, warm_up(expected))
            _flush(engine)
    with _engine(plan, subject, expected) as engine:
        failures = TransferFailures(plan.rarity)
        observed = Observed(engine.max_batch_tokens, subject.kv.block_tokens, before=before, failures=failures)
        if plan.fails:
            make_transfers_fail(engine, failures)
        if plan.warm:
            observed.before += _served_before(engine, warm_up(expected))
        observed.before_run = engine.metrics()
        _serve_by_plan(engine, plan, expected, observed, keep_logits)
        if plan.evicts:
            _flush(engine)
            _push_out(engine, expected, subject.kv.block_tokens)
            _serve_by_plan(engine, plan, expected, observed, keep_logits)
        observed.after_run = engine.metrics()
        if plan.warm:
            observed.apart = _served_apart(engine, expected[0])
        _require_no_leak(engine)
    return observed


def _flush(engine: Engine) -> None:
    if not engine.flush_kv(_FLUSH_SECONDS):
        raise Stalled(
            f"cached blocks were not stored within {_FLUSH_SECONDS:.0f} seconds, or none of them moved for long"
        )


def _push_out(engine: Engine, expected: Sequence[Expected], block_tokens: int) -> None:
    """Serve other prompts until every block of the pool has been used for one."""
    longest = max((one.request for one in expected), key=lambda request: len(request.prompt))
    total, size = engine.metrics().blocks_total, len(longest.prompt)
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    tokens = [*reversed(longest.prompt)]
    for number in range(1 + total * block_tokens // size):
        shift = number % size
        prompt = [*tokens[shift:], *tokens[:shift]]
        prompt[0] = (prompt[0] + 1 + number) % engine.model.vocab_size
        engine.generate(prompt, params)


def _serve_by_plan(
    engine: Engine, plan: Plan, expected: Sequence[Expected], observed: Observed, keep_logits: bool
) -> None:
    how = _How(plan.choices, keep_logits, flushes=not plan.fails, has_slow_part=plan.slow)
    if plan.together:
        ordered = expected if plan.pool == "ample" else _shortest_first(expected, plan.turn)
        _serve(engine, ordered, observed, how, _cancellations(expected) if plan.cancels else [])
        return
    for one in expected:
        _serve(engine, [one], observed, how)


def _served_before(engine: Engine, expected: Sequence[Expected]) -> list[VerifiedAnswer]:
    """Answers to requests that fill the cache; of those whose end was changed only errors are kept."""
    warm = Observed(engine.max_batch_tokens)
    for one in expected:
        _serve(engine, [one], warm, _How())
    return [
        answer
        for answer in warm.answers
        if answer.completion.error or not answer.expected.request.name.startswith(_BEFORE)
    ]


def _served_apart(engine: Engine, expected: Expected) -> list[VerifiedAnswer]:
    """Answers to a request whose blocks are cached, from a tenant with another salt and from one that opted out."""
    apart = Observed(engine.max_batch_tokens)
    for options in (RequestOptions(cache_salt="another"), RequestOptions(prefix_cache=False)):
        _serve(engine, [expected], apart, _How(options=options))
    return apart.answers


def warm_up(expected: Sequence[Expected]) -> list[Expected]:
    """Requests that leave blocks in the cache: each one's beginning with another end, and the first in full.

    Beginnings are two thirds of a prompt, so that most end within a block and leave prompts to compute.
    """
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    others = [replace(one, request=replace(_before(one.request), params=params)) for one in expected[1:]]
    return [*others, expected[0]]


def _before(request: VerifiedRequest) -> VerifiedRequest:
    return replace(request, name=f"{_BEFORE}{request.name}", prompt=_beginning(request.prompt))


def _beginning(prompt: tuple[int, ...]) -> tuple[int, ...]:
    kept = prompt[: max(1, len(prompt) * 2 // 3)]
    return (*kept, *reversed(kept[-3:]))


@contextmanager
def _engine(plan: Plan, subject: Subject, expected: Sequence[Expected]) -> Iterator[Engine]:
    """A fresh engine with the plan's pool."""
    size = subject.kv.block_tokens
    needed = [-(-one.request.num_tokens // size) for one in expected]
    blocks = {
        "ample": 2 * sum(needed) + _SPARE_BLOCKS,
        "tight": max(needed) + plan.spare,
        "minimal": max(needed),
    }
    options = replace(plan.options, kv_blocks=blocks[plan.pool])
    if plan.slow:
        fast = max(1, max(needed) // 2)
        options = replace(options, kv_blocks=fast, kv_offload=(blocks[plan.pool] - fast) * subject.kv.block_bytes)
    with subject.load(options) as engine:
        if plan.adapters:
            load_adapters(engine)
        yield engine


def _cancellations(expected: Sequence[Expected]) -> list[Cancellation]:
    """Mates with the prompts of verified requests, the longest first; one that is to decode is in each half."""
    longest = iter(sorted(expected, key=lambda one: -len(one.request.prompt)))
    early = [Cancellation(one, steps=steps) for steps, one in zip(_CANCELLED_AFTER_STEPS, longest, strict=False)]
    late = [Cancellation(one, tokens=tokens) for tokens, one in zip(_CANCELLED_AFTER_TOKENS, longest, strict=False)]
    return early + late


@dataclass(frozen=True)
class _How:
    """Way of adding requests."""

    choices: int = 1
    keep_logits: bool = False
    options: RequestOptions | None = None
    flushes: bool = True  # wait now and then for blocks that are being saved
    has_slow_part: bool = False

    def add(self, engine: Engine, expected: Expected) -> int:
        """Add a request; returns its number."""
        request = expected.request
        params = replace(request.params, n=self.choices)
        options = replace(self.options or RequestOptions(), adapter=request.adapter)
        return engine.add(list(request.prompt), params, options=options, keep_logits=self.keep_logits)


def _serve(
    engine: Engine,
    expected: Sequence[Expected],
    observed: Observed,
    how: _How,
    cancellations: Sequence[Cancellation] = (),
) -> None:
    """Run requests to their ends, with mates that are cancelled; every other mate arrives before the requests."""
    waiting = {how.add(engine, one.expected): one for one in cancellations[::2]}
    left = {how.add(engine, one): one for one in expected}
    waiting |= {how.add(engine, one.expected): one for one in cancellations[1::2]}
    observed.asked += [one.choice(index).request.name for one in expected for index in range(how.choices)]
    stall, num_tokens = _StallWatch(), Counter[int]()
    for step in count():
        due = [number for number, mate in waiting.items() if mate.is_due(step, num_tokens[number])]
        for number in due if left else ():
            observed.cancelled += _answers(waiting.pop(number).expected, engine.abort(number))
        if not engine.has_unfinished():
            break
        if how.flushes and not step % _FLUSHED_STEPS:
            engine.flush_kv(_FLUSH_SECONDS)
        outputs = engine.step()
        if how.has_slow_part:
            observed.slow_blocks = max(observed.slow_blocks, engine.metrics().blocks_slow_in_use)
        observed.shared_steps += len({output.request_id for output in outputs if output.tokens}) > 1
        for output in outputs:
            num_tokens[output.request_id] += len(output.tokens)
            if output.result:
                waiting.pop(output.request_id, None)
                if output.request_id in left:
                    observed.answers += _answers(left.pop(output.request_id), output.result)
        stall.check(bool(outputs), left.values())


def _shortest_first(expected: Sequence[Expected], turn: int) -> list[Expected]:
    """In a small pool many short requests run at once, and then there is not enough space for all to grow."""
    ordered = sorted(expected, key=lambda one: len(one.request.prompt))
    return ordered[turn:] + ordered[:turn]


def _answers(expected: Expected, result: Completion | None) -> list[VerifiedAnswer]:
    """The answers of all choices of a result; none for a mate that ended before it was cancelled."""
    choices = result.choices if result else ()
    return [VerifiedAnswer(expected.choice(choice.index), choice) for choice in choices]


def _require_no_leak(engine: Engine) -> None:
    engine.check()
    leaked = engine.metrics().blocks_in_use
    assert not leaked, f"{leaked} KV blocks are still in use after the last request"


class _StallWatch:
    """Raises Stalled after many steps and a minute without an output."""

    def __init__(self) -> None:
        self._steps, self._since = 0, time.monotonic()

    def check(self, advanced: bool, left: Iterable[Expected]) -> None:
        """Count a step."""
        if advanced:
            self._steps, self._since = 0, time.monotonic()
            return
        self._steps += 1
        if self._steps > _STALLED_STEPS and time.monotonic() - self._since > _STALLED_SECONDS:
            names = ", ".join(one.request.name for one in left)
            raise Stalled(f"{self._steps} steps without an output; requests that do not end: {names}")
