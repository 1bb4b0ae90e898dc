"""Find models whose every request fails although their engines run, as with damaged weights, and see when that ends.

After `_FAILURES` requests that failed, with none between that was served, a request of the server itself decides:
clients may send what must fail. While that fails too the model does not serve, and it is sent again until it is served.
"""

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from ingot.errors import EngineError, Overloaded, RequestError
from ingot.runtime.asking.request_options import RequestOptions
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.server.models.served_models import ServedModel
from ingot.runtime.steps.metrics import EngineMetrics

_log = logging.getLogger(__name__)
_FAILURES = 5
_PAUSE_SECONDS = 2.0
_ANSWER_SECONDS = 30.0
_TOKENS = 32


@dataclass
class _Watched:
    """A model at the last look: its requests, those that failed since one was served, and its check."""

    num_served: int = 0
    num_failed: int = 0
    failures: int = 0
    is_checked: bool = False
    next_check_seconds: float = 0.0


class SelfCheck:
    """Sets `failing` of models, at each look."""

    def __init__(self) -> None:
        self._watched: WeakKeyDictionary[ServedModel, _Watched] = WeakKeyDictionary()
        self._tasks: set[asyncio.Task[None]] = set()

    def look(self, models: Iterable[ServedModel]) -> None:
        """Count what was served and what failed since the last look, and begin to check models that may be failing."""
        now = time.monotonic()
        for model in models:
            watched = self._watched.setdefault(model, _Watched())
            _count(model, watched, model.engine.metrics())
            may_fail = model.failing or watched.failures >= _FAILURES
            is_due = not watched.is_checked and now >= watched.next_check_seconds
            if may_fail and is_due and model.engine.is_healthy and not model.is_unloaded:
                watched.is_checked = True
                task = asyncio.create_task(_check(model, watched))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Give up what has begun."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _count(model: ServedModel, watched: _Watched, metrics: EngineMetrics) -> None:
    num_served = sum(metrics.finished_by_reason.get(reason, 0) for reason in ("stop", "length"))
    was_served, num_failed = num_served > watched.num_served, metrics.num_failed_requests - watched.num_failed
    watched.num_served, watched.num_failed = num_served, metrics.num_failed_requests
    # Those of one look may have ended in any order.
    watched.failures = num_failed if was_served else watched.failures + num_failed
    if was_served and not num_failed:
        _end_failing(model)


async def _check(model: ServedModel, watched: _Watched) -> None:
    try:
        await find_failure(model)
        watched.failures = 0
    finally:
        watched.next_check_seconds = time.monotonic() + _PAUSE_SECONDS
        watched.is_checked = False


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
