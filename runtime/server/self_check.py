"""Find models whose every request fails although their engines run, as with damaged weights, and see when that ends.

After `_FAILURES` requests that failed, with none between that was served, a request of the server itself decides:
clients may send what must fail. While that fails too the model does not serve, and it is sent again until it is served.
"""

import asyncio
import logging
import time
from collections.abc import Iterable
from weakref import WeakKeyDictionary, WeakSet

from ingot.errors import EngineError, Overloaded, RequestError
from ingot.runtime.metrics import EngineMetrics
from ingot.runtime.request_options import RequestOptions
from ingot.runtime.sampling import SamplingParams
from ingot.runtime.server.models import ServedModel

_log = logging.getLogger(__name__)
_FAILURES = 5
_PAUSE_SECONDS = 2.0
_ANSWER_SECONDS = 30.0
_TOKENS = 32


class SelfCheck:
    """Sets `failing` of models, at each look."""

    def __init__(self) -> None:
        self._counted: WeakKeyDictionary[ServedModel, tuple[int, int]] = WeakKeyDictionary()
        self._failures: WeakKeyDictionary[ServedModel, int] = WeakKeyDictionary()
        self._next: WeakKeyDictionary[ServedModel, float] = WeakKeyDictionary()
        self._checked: WeakSet[ServedModel] = WeakSet()
        self._tasks: set[asyncio.Task[None]] = set()

    def look(self, models: Iterable[ServedModel]) -> None:
        """Count what was served and what failed since the last look, and begin to check models that may be failing."""
        now = time.monotonic()
        for model in models:
            self._count(model, model.engine.metrics())
            may_fail = model.failing or self._failures[model] >= _FAILURES
            is_due = model not in self._checked and now >= self._next.get(model, now)
            if may_fail and is_due and model.engine.is_healthy and not model.is_unloaded:
                self._checked.add(model)
                task = asyncio.create_task(self._check(model))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Give up what has begun."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _count(self, model: ServedModel, metrics: EngineMetrics) -> None:
        served = sum(metrics.finished_by_reason.get(reason, 0) for reason in ("stop", "length"))
        before = self._counted.get(model, (0, 0))
        num_failed = metrics.num_failed_requests - before[1]
        self._counted[model] = served, metrics.num_failed_requests
        # Those of one look may have ended in any order.
        self._failures[model] = num_failed if served > before[0] else self._failures.get(model, 0) + num_failed
        if served > before[0] and not num_failed:
            _end_failing(model)

    async def _check(self, model: ServedModel) -> None:
        try:
            await find_failure(model)
            self._failures[model] = 0
        finally:
            self._next[model] = time.monotonic() + _PAUSE_SECONDS
            self._checked.discard(model)


async def find_failure(model: ServedModel) -> None:
    """Set or clear `failing` by a request of the server's own; neither where the engine has no time for one."""
    if not model.engine.is_healthy:
        return
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            await _serve_one(model)
    except (Overloaded, TimeoutError):
        return
    except EngineError as error:
        if model.engine.is_healthy and not model.failing:
            model.failing = f"every request fails, and so does one of the server's own: {error}"
            _log.error("%s: %s; restart the server, or reload an artifact that is whole", model.name, model.failing)
    else:
        _end_failing(model)


async def _serve_one(model: ServedModel) -> None:
    """Serve tokens from all of the vocabulary."""
    size = model.engine.model.vocab_size
    count = max(1, min(_TOKENS, model.context_tokens - 1))
    spread = [index * size // count for index in range(count)]
    params, options = SamplingParams(max_tokens=1, ignore_eos=True), RequestOptions(prefix_cache=False)
    try:
        await model.engine.generate(spread, params, options=options)
    except RequestError:
        # The pool has fewer blocks.
        await model.engine.generate(spread[:1], params, options=options)


def _end_failing(model: ServedModel) -> None:
    if model.failing:
        model.failing = None
        _log.warning("%s: requests are served again", model.name)
