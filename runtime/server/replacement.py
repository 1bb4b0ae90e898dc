"""Replace a model's engine while the server runs: after it failed, or by a new artifact.

    restart   the engine failed: its requests got their errors. Load it again; `MOST_RESTARTS` times in ten minutes.
    reload    load a new artifact next to the present one, check it with prompts that were served lately, and swap. The
              old engine stays loaded on probation: if the new one fails or is slow, requests go back to the old one.

Requests that are open stay with the engine that has them. Two engines need the memory of two.
"""

import asyncio
import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from ingot.errors import IngotError
from ingot.runtime.async_engine import AsyncEngine
from ingot.runtime.metrics import EngineMetrics
from ingot.runtime.prompts import TokenIds
from ingot.runtime.request_options import RequestOptions
from ingot.runtime.sampling import SamplingParams
from ingot.runtime.server.models import Models, ServedModel

_log = logging.getLogger(__name__)
MOST_RESTARTS, _RESTARTS_SECONDS = 3, 600.0
_SHADOW_TOKENS = 16
_SHADOW_ROUNDS = 5  # at most
_SLOWER = 2.0  # times the old engine's time per token, above which a new one is given up
_FAILURES, _FAILED_SHARE = 3, 0.05
_FEWEST = 16  # finished requests, from which a latency counts
_LOOK_SECONDS = 0.5

Load = Callable[[str, bool], Awaitable[ServedModel]]
"""Loads the model of a name again. The flag: refuse an artifact whose evidence does not pass its gates."""


@dataclass(frozen=True)
class Probation:
    """What an engine had when it took over, and the time per token of the one before it."""

    start: EngineMetrics
    tpot_seconds: float | None

    def fault_of(self, model: ServedModel) -> str | None:
        """Why requests should go back to the old engine; None while the new one is as good."""
        problem = model.problem()
        if problem:
            return problem
        now = model.engine.metrics()
        finished = now.num_finished - self.start.num_finished
        failed = now.num_failed_requests - self.start.num_failed_requests
        if failed >= _FAILURES and failed > _FAILED_SHARE * finished:
            return f"{failed} of {finished} requests failed"
        observed = now.tpot_seconds.num_observed - self.start.tpot_seconds.num_observed
        if observed < _FEWEST or not self.tpot_seconds:
            return None
        tpot = (now.tpot_seconds.total - self.start.tpot_seconds.total) / observed
        if tpot > _SLOWER * self.tpot_seconds:
            return f"a token takes {1000 * tpot:.2f} ms, with the engine before {1000 * self.tpot_seconds:.2f} ms"
        return None


class Replacements:
    """Restarts and reloads of a server's models; one at a time."""

    def __init__(self, models: Models, load: Load, probation_seconds: float) -> None:
        self._models = models
        self._load = load
        self._probation_seconds = probation_seconds
        self._restarts: dict[str, deque[float]] = {}
        self._one = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def restart_failed(self) -> None:
        """Begin to restart engines that have failed, where that was not tried too often."""
        for model in self._models.all:
            is_broken = not (model.engine.is_healthy or model.is_unloaded or model.is_restarting)
            if is_broken and self.may_restart(model):
                model.is_restarting = True
                self._begin(self._restart(model))

    def may_restart(self, model: ServedModel) -> bool:
        """Whether a model was restarted fewer times lately than it may be."""
        times = self._restarts.setdefault(model.name, deque())
        while times and times[0] < time.monotonic() - _RESTARTS_SECONDS:
            times.popleft()
        return len(times) < MOST_RESTARTS

    def reload_all(self) -> None:
        """Begin to replace every model by the artifact that is in its folder now."""
        self._begin(self._reload_all())

    async def close(self) -> None:
        """Give up what has begun."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _restart(self, model: ServedModel) -> None:
        async with self._one:
            try:
                while model in self._models.all and self.may_restart(model):
                    self._restarts[model.name].append(time.monotonic())
                    _log.error("%s: %s; it is loaded again", model.name, model.engine.error)
                    await model.engine.close()
                    try:
                        new = await self._load(model.name, False)
                        await new.warm_up()
                    except IngotError as error:
                        _log.error("%s: could not be loaded again: %s", model.name, error)
                        continue
                    self._models.replace(model, new)
                    _log.warning("%s: serves again", model.name)
                    return
            finally:
                model.is_restarting = False

    async def _reload_all(self) -> None:
        async with self._one:
            for model in self._models.all:
                if model.is_unloaded:
                    _log.warning("%s: is unloaded; the next request loads what is in its folder", model.name)
                    continue
                try:
                    await self._reload(model)
                except IngotError as error:
                    _log.error("%s: the new artifact is not served: %s", model.name, error)

    async def _reload(self, old: ServedModel) -> None:
        new = await self._load(old.name, True)
        try:
            await new.warm_up()
            await _compare(old, new)
        except BaseException:
            await new.engine.close()
            raise
        probation = Probation(new.engine.metrics(), old.engine.metrics().tpot_seconds.mean)
        self._models.replace(old, new)
        _log.warning("%s: a new artifact is served, on probation for %g s", old.name, self._probation_seconds)
        try:
            fault = await self._watch(new, probation)
        except asyncio.CancelledError:  # the server ends, and closes the new one
            await old.engine.close()
            raise
        if fault and old.engine.is_healthy:
            self._models.replace(new, old)
            _log.error("%s: the new artifact is given up: %s", old.name, fault)
            await new.engine.close(drain=new.engine.is_healthy)
        else:
            await old.engine.close(drain=True)

    async def _watch(self, new: ServedModel, probation: Probation) -> str | None:
        end = time.monotonic() + self._probation_seconds
        while time.monotonic() < end:
            await asyncio.sleep(min(_LOOK_SECONDS, self._probation_seconds))
            fault = probation.fault_of(new)
            if fault:
                return fault
        return None


async def _compare(old: ServedModel, new: ServedModel) -> None:
    """Serve prompts of the old engine with both; raises what the new one raises, and IngotError if it is slow."""
    prompts = [prompt for prompt in old.recent_prompts if len(prompt) + _SHADOW_TOKENS < new.context_tokens]
    if new.engine.model.vocab_size < old.engine.model.vocab_size:
        prompts = [prompt for prompt in prompts if max(prompt) < new.engine.model.vocab_size]
    if not prompts:
        return
    present, proposed = math.inf, math.inf  # the best round: requests and other programs disturb single ones
    for _ in range(_SHADOW_ROUNDS):
        present = min(present, await _seconds_per_token(old.engine, prompts))
        proposed = min(proposed, await _seconds_per_token(new.engine, prompts))
        if proposed <= _SLOWER * present:
            return
    raise IngotError(
        f"{len(prompts)} prompts took {1000 * proposed:.2f} ms a token,"
        f" and {1000 * present:.2f} ms with the present engine"
    )


async def _seconds_per_token(engine: AsyncEngine, prompts: Sequence[TokenIds]) -> float:
    params = SamplingParams(max_tokens=_SHADOW_TOKENS, ignore_eos=True)
    times = []
    for prompt in prompts:
        done = await engine.generate(prompt, params, options=RequestOptions(prefix_cache=False))
        times.append(done.metrics.e2e_seconds / len(done.token_ids))
    return statistics.median(times)
