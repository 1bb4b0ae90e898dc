"""A load served by a real engine, in real time: the batch of each step, when it began, and what became of requests."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ingot.planning.simulation.replica import EndedRequest, TimedRequest
from ingot.planning.simulation.simulated_executor import StepRecord
from ingot.planning.step_model import StepShape
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.engine.engine import Engine
from ingot.runtime.forward_batch import FloatArray, ForwardBatch


@dataclass
class RecordedRun:
    """Seconds of a step last until the next step begins, or the engine is idle."""

    steps: list[StepRecord] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    computing_seconds: list[float] = field(default_factory=list)
    ended: list[EndedRequest] = field(default_factory=list)


class MeasuredTimes:
    """The seconds of recorded steps, one after the other. Implements `StepPredictor`."""

    def __init__(self, seconds: Sequence[float]) -> None:
        self._seconds = iter(seconds)

    def seconds(self, step: StepShape) -> float:
        return next(self._seconds)


def record(engine: Engine, load: Sequence[TimedRequest], *, patience: float = 0.001) -> RecordedRun:
    """Serve a load; a request joins the first step that begins after it has arrived."""
    run, waiting, requests = RecordedRun(), list(reversed(load)), dict[int, TimedRequest]()
    executor: Any = engine._executor
    forward = executor.forward

    def recorded(batch: ForwardBatch) -> FloatArray:
        run.steps.append(StepRecord.of(batch))
        before = time.perf_counter()
        logits: FloatArray = forward(batch)
        run.computing_seconds.append(time.perf_counter() - before)
        return logits

    executor.forward = recorded
    started, now = engine.clock(), 0.0
    while waiting or engine.has_unfinished():
        if not engine.has_unfinished():  # an idle engine begins at the arrival, not when this thread wakes
            while (left := waiting[-1].seconds - (engine.clock() - started)) > 0:
                time.sleep(min(left, patience))
            now = max(now, waiting[-1].seconds)
        while waiting and waiting[-1].seconds <= now:
            request = waiting.pop()
            params = SamplingParams(max_tokens=request.lengths.output_tokens, ignore_eos=True)
            prompt = request.prompt(engine.model.vocab_size)
            requests[engine.add(prompt, params, arrival_seconds=started + request.seconds)] = request
        num_steps = len(run.steps)
        outputs = engine.step()
        run.ended += [EndedRequest(requests[each.request_id], each.result) for each in outputs if each.result]
        later = engine.clock() - started
        if len(run.steps) > num_steps:
            run.seconds.append(later - now)
        now = later
    executor.forward = forward
    return run
