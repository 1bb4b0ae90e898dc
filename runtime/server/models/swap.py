"""Replace a model's engine while the server runs: after it failed, or by a new artifact.

    restart   the engine failed: its requests got their errors. Load what was served again, `MOST_RESTARTS` times in ten
              minutes, with longer and longer pauses: a cause that passes may take a while.
    reload    load a new artifact next to the present one, check it with prompts that were served lately, and swap. The
              old engine stays loaded on probation: if the new one fails or is slow, requests go back to the old one.
              To compare them at equal load, both take requests for a few seconds of it (`swap_comparison`).

Requests that are open stay with the engine that has them. Two engines need the memory of two.
"""

import asyncio
import logging
import random
import time
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, get_args

from ingot.errors import IngotError
from ingot.runtime.server.http.api_error import ENGINE_UNAVAILABLE, ApiError
from ingot.runtime.server.models import self_check, swap_comparison
from ingot.runtime.server.models.served_models import Models, ServedModel, log_failure, warmed_up
from ingot.runtime.steps.metrics import EngineMetrics

_log = logging.getLogger(__name__)
_PAUSES_SECONDS = (0.0, 1.0, 5.0, 30.0)
_LONGER_PAUSE = 1.25  # so that servers which failed together do not load at the same time
MOST_RESTARTS, RESTARTS_SECONDS = len(_PAUSES_SECONDS), 600.0
_LOAD_SECONDS = 2.0  # until one was measured
_FAILURES, _FAILED_SHARE = 3, 0.05
_LOOK_SECONDS = 0.5
_COMPARISONS = 4  # of the engines' times, spread over a probation: the load changes meanwhile

LoadAgain = Callable[[str, bool], Awaitable[ServedModel]]
"""Loads the model of a name again: the artifact that is served. With True, what is in its folder now, unless its
evidence does not pass its gates."""

EvidenceChange = Callable[[ServedModel, ServedModel], str | None]
"""Describes how the second model is worse than the first by the evidence of their artifacts; None if it is not."""

Outcome = Literal["kept", "refused", "given_up"]
ReloadState = Literal["idle", "loading", "checking", "probation"] | Outcome
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


@dataclass
class Reload:
    """The last replacement of a model's artifact. Times are seconds since 1970; None: not reached.

    refused   it could not be loaded, or did not pass the checks before the swap
    given_up  it failed or was slow on probation, and the engine before it serves again
    """

    state: ReloadState = "idle"
    reason: str | None = None
    started: float | None = None
    swapped: float | None = None
    ended: float | None = None


@dataclass(frozen=True)
class Probation:
    """The metrics that an engine had when it took over."""

    start: EngineMetrics

    def fault_of(self, model: ServedModel) -> str | None:
        """Why requests should go back to the old engine, by the new one's failures; None without any."""
        problem = model.problem()
        if problem:
            return problem
        now = model.engine.metrics()
        finished = now.num_finished - self.start.num_finished
        failed = now.num_failed_requests - self.start.num_failed_requests
        if failed >= _FAILURES and failed > _FAILED_SHARE * finished:
            return f"{failed} of {finished} requests failed"
        return None


class Replacements:
    """Restarts and reloads of a server's models.

    One reload at a time, to its probation's end; a failed engine of another model does not wait for that.
    """

    def __init__(
        self,
        models: Models,
        load: LoadAgain,
        probation_seconds: float,
        wake: Callable[[ServedModel], Awaitable[ServedModel]] | None = None,
        evidence_change: EvidenceChange = lambda old, new: None,
    ) -> None:
        """`wake` loads a model that was unloaded because it was idle, to compare a new artifact with it."""
        self._models = models
        self._load = load
        self._wake = wake
        self._evidence_change = evidence_change
        self._load_seconds = _LOAD_SECONDS
        self._next_restart: dict[str, float] = {}
        self._probation_seconds = probation_seconds
        self._restarts: dict[str, deque[float]] = {}
        self._reloading = asyncio.Lock()
        self._replacing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # a model, by name
        self._given_up: weakref.WeakSet[ServedModel] = weakref.WeakSet()  # whose end is in the log
        self._tasks: set[asyncio.Task[None]] = set()
        self._last: dict[str, Reload] = {}
        self._checks: set[asyncio.Event] = set()
        self.num_restarts: Counter[str] = Counter()
        self.num_reloads: Counter[tuple[str, Outcome]] = Counter()

    def restart_failed(self) -> None:
        """Begin to restart engines that have failed, where that was not tried too often."""
        for model in self._models.all:
            if model.engine.is_healthy or model.is_unloaded or model.is_restarting:
                continue
            if self.may_restart(model):
                model.is_restarting = True
                self._begin(self._restart(model))
            elif model not in self._given_up:
                self._given_up.add(model)
                _log.error(
                    "%s: %s; it was loaded again %d times in %.0f minutes, and is not any more: find the cause, then"
                    " %s",
                    model.name,
                    model.engine.error,
                    MOST_RESTARTS,
                    RESTARTS_SECONDS / 60,
                    "start the server" if self.has_given_up else "restart the server or POST /admin/reload",
                )

    def may_restart(self, model: ServedModel) -> bool:
        """Whether a model was restarted fewer times lately than it may be."""
        times = self._restarts.setdefault(model.name, deque())
        while times and times[0] < time.monotonic() - RESTARTS_SECONDS:
            times.popleft()
        return len(times) < MOST_RESTARTS

    def seconds_until_ready(self, model: ServedModel) -> float | None:
        """How long a failed engine is expected to take until it serves again; None: it is not loaded again."""
        if not (model.is_restarting or self.may_restart(model)):
            return None
        return max(0.0, self._next_restart.get(model.name, 0.0) - time.monotonic()) + self._load_seconds

    @property
    def has_given_up(self) -> bool:
        """Whether the engines of all models have failed, are not loaded again, and no reload is under way."""
        if self._reloading.locked() or self.is_checking:
            return False
        return all(
            model in self._given_up and not model.is_restarting and not self.may_restart(model)
            for model in self._models.all
        )

    def last_reload(self, name: str) -> Reload:
        """The outcome of the last replacement of a model."""
        return self._last.get(name, Reload())

    def reload_all(self, *, accept_change: bool = False) -> asyncio.Event:
        """Begin to replace every model by the artifact that is in its folder now.

        With `accept_change` also by one that answers otherwise, or whose evidence is worse. The event is set when each
        was checked, and serves or was refused; the probation of the last may go on.
        """
        checked = asyncio.Event()
        self._checks.add(checked)
        task = self._begin(self._reload_all(checked, accept_change))
        task.add_done_callback(lambda done: checked.set())
        return checked

    @property
    def is_checking(self) -> bool:
        """Whether a model is to be replaced, or is being loaded and checked."""
        self._checks = {checked for checked in self._checks if not checked.is_set()}
        return bool(self._checks)

    async def close(self) -> None:
        """Give up what has begun."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, work: Coroutine[None, None, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _restart(self, model: ServedModel) -> None:
        async with self._replacing[model.name]:
            try:
                while model in self._models.all and self.may_restart(model):
                    pause = _PAUSES_SECONDS[len(self._restarts[model.name])] * random.uniform(1, _LONGER_PAUSE)
                    self._next_restart[model.name] = time.monotonic() + pause
                    self._restarts[model.name].append(time.monotonic() + pause)
                    self.num_restarts[model.name] += 1
                    after = f" after {pause:.0f} s" if pause else ""
                    _log.error("%s: %s; it is loaded again%s", model.name, model.engine.error, after)
                    await model.close()
                    await asyncio.sleep(pause)
                    started = time.monotonic()
                    try:
                        new = await warmed_up(self._load(model.name, False))
                    except Exception as error:  # noqa: BLE001 (whatever it was: try again, or let /health fail)
                        log_failure(_log, f"{model.name}: could not be loaded again", error)
                        continue
                    self._load_seconds = time.monotonic() - started
                    self._models.replace(model, new)
                    _log.warning("%s: serves again", model.name)
                    return
            finally:
                model.is_restarting = False

    async def _reload_all(self, checked: asyncio.Event, accept_change: bool) -> None:
        async with self._reloading:
            names = [model.name for model in self._models.all]
            for name in names:
                async with self._replacing[name]:
                    last = checked if name == names[-1] else None
                    await self._reload(self._models.by_name[name], last, accept_change)

    async def _reload(self, old: ServedModel, checked: asyncio.Event | None, accept_change: bool) -> None:
        """Replace a model, and set `checked` at the swap. An error of the new engine is in `last_reload` alone."""
        record = self._last[old.name] = Reload("loading", started=time.time())
        try:
            old = await self._awake(old)
            new = await self._checked(old, record, accept_change)
        except Exception as error:  # noqa: BLE001 (whatever it was: the present engine goes on)
            self._end(old.name, record, "refused", str(error) or type(error).__name__)
            log_failure(_log, f"{old.name}: the new artifact is not served", error)
            return
        self._swap(old, new, record)
        if checked:
            checked.set()
        try:
            fault = await self._watch(old, new)
        except BaseException:  # the server ends, and closes the new one
            await old.close()
            raise
        # With both dead, what had served before is started again, and not what failed at once.
        if fault and (old.serves or not (new.engine.is_healthy or old.is_unloaded)):
            self._models.replace(new, old)
            self._end(old.name, record, "given_up", fault)
            _log.error("%s: the new artifact is given up: %s", old.name, fault)
            await new.close(drain=new.engine.is_healthy)
        else:
            self._end(old.name, record, "kept", fault)
            _log.warning("%s: the new artifact is kept", old.name)
            await old.close(drain=True)

    async def _awake(self, model: ServedModel) -> ServedModel:
        """The model, loaded again if it was idle; unloaded still if what was served is gone."""
        if not model.is_unloaded or self._wake is None:
            return model
        try:
            return await self._wake(model)
        except ApiError as error:
            if error.code != ENGINE_UNAVAILABLE:
                raise
            _log.error("%s: %s; a new artifact is compared with nothing", model.name, error)
            return model

    async def _checked(self, old: ServedModel, record: Reload, accept_change: bool) -> ServedModel:
        """The new engine, which has completed lately served prompts. Raises what it raises."""
        new = await warmed_up(self._load(old.name, True))
        record.state = "checking"
        try:
            await self_check.find_failure(old)
            await self._require_no_change(old, new, accept_change)
            await swap_comparison.require_as_fast(old, new)
        except BaseException:
            await new.close()
            raise
        return new

    async def _require_no_change(self, old: ServedModel, new: ServedModel, accept_change: bool) -> None:
        """Raise IngotError where the new artifact is worse by its evidence, or answers otherwise."""
        change = self._evidence_change(old, new)
        if change is None and old.serves:
            change = await swap_comparison.change_of_answers(old, new)
        if change and not accept_change:
            raise IngotError(f"{change}; POST /admin/reload?accept_change=true serves it nevertheless")
        if change:
            _log.warning("%s: %s; the change is accepted", old.name, change)

    def _swap(self, old: ServedModel, new: ServedModel, record: Reload) -> None:
        new.recent_prompts = old.recent_prompts
        self._models.replace(old, new)
        record.state, record.swapped = "probation", time.time()
        _log.warning("%s: a new artifact is served, on probation for %g s", old.name, self._probation_seconds)

    def _end(self, name: str, record: Reload, outcome: Outcome, reason: str | None) -> None:
        record.state, record.reason, record.ended = outcome, reason, time.time()
        self.num_reloads[name, outcome] += 1

    async def _watch(self, old: ServedModel, new: ServedModel) -> str | None:
        """Why requests should go back to the old engine; None after a probation without a reason."""
        probation = Probation(new.engine.metrics())
        end = time.monotonic() + self._probation_seconds
        slowness = asyncio.create_task(self._slowness(old, new))
        try:
            while (left := end - time.monotonic()) > 0:
                await asyncio.wait([slowness], timeout=min(_LOOK_SECONDS, left))
                fault = probation.fault_of(new) or (slowness.result() if slowness.done() else None)
                if fault:
                    return fault
        finally:
            slowness.cancel()
            await asyncio.gather(slowness, return_exceptions=True)
        return None

    async def _slowness(self, old: ServedModel, new: ServedModel) -> str:
        """Compare both engines now and then until the new one is slower, and return how."""
        while True:
            with self._models.shared(old, new), suppress(IngotError):  # `fault_of` finds one that has failed
                found = await swap_comparison.slowness(old, new)
                if found:
                    return found
            await asyncio.sleep(self._probation_seconds / _COMPARISONS)
