"""The fake executor with a device's manners: steps are queued, and computed as late as a device may.

Nothing is computed before the tokens of a step, or of a later one, are asked for. Arrays are read when a step is
submitted, copies of blocks keep their place in the queue, and tokens are chosen on the "device" from the draws in
float32. Beside what the fake executor refuses, it refuses tokens carried from the wrong place, draws out of range, and
a `forward` while a step is in flight.
"""

from collections import deque
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np

from ingot.errors import EngineError
from ingot.runtime.batch import FloatArray, ForwardBatch, Int32Array, Int64Array
from ingot.runtime.blocks import BlockCopy
from ingot.runtime.sampler import SamplingArrays, draw_token
from ingot.runtime.sampling import SamplingParams
from tests.simulators.fake_executor import FakeExecutor, require, within

_Arrays = TypeVar("_Arrays", ForwardBatch, SamplingArrays)


class FakePipelinedExecutor(FakeExecutor):
    """Logits and options are those of FakeExecutor."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._queue: deque[FakeStep | BlockCopy] = deque()
        self._newest: FakeStep | None = None
        self.num_submitted = 0

    def submit(self, batch: ForwardBatch, draws: SamplingArrays, carried: Int32Array) -> "FakeStep":
        """Queue a step. EngineError for arguments that break the contract of `PipelinedExecutor`."""
        self.require_open()
        self.check(batch)
        _check_draws(draws, len(batch.logits_indices))
        _check_carried(batch, carried, self._newest)
        step = FakeStep(self, self.num_submitted, _copied(batch), _copied(draws), carried.copy(), self._newest)
        self._queue.append(step)
        self._newest = step
        self.num_submitted += 1
        return step

    def forward(self, batch: ForwardBatch) -> FloatArray:
        """As FakeExecutor's, behind all that was queued. EngineError while the tokens of a step were not asked for."""
        require(self._newest is None or self._newest.asked, "forward was called while a step is in flight")
        self._newest = None
        while self._queue:
            self._work()
        return super().forward(batch)

    def copy_block(self, source: int, target: int) -> None:
        """Queue the copy."""
        self._queue.append(BlockCopy(source, target))

    def compute(self, step: "FakeStep") -> None:
        """Do what is queued up to a step, that one included."""
        self.require_open()
        while not step.computed:
            self._work()

    def _work(self) -> None:
        work = self._queue.popleft()
        if isinstance(work, FakeStep):
            work.compute()
        else:
            super().copy_block(*work)


@dataclass(eq=False)
class FakeStep:
    """Step `number` of those that were queued; `previous` is the one whose tokens it carries on."""

    executor: FakePipelinedExecutor
    number: int
    batch: ForwardBatch
    draws: SamplingArrays
    carried: Int32Array
    previous: "FakeStep | None"
    chosen: Int64Array | None = None
    error: EngineError | None = None
    asked: bool = False

    @property
    def computed(self) -> bool:
        """Whether the device is done with it."""
        return self.chosen is not None or self.error is not None

    def tokens(self) -> Int64Array:
        """Let the device compute up to here; tokens [R], -1 where logits were not finite."""
        self.asked = True
        self.executor.compute(self)
        if self.error:
            raise self.error
        assert self.chosen is not None
        return self.chosen.copy()

    def compute(self) -> None:
        """What the device does. A failure is kept for `tokens`."""
        batch = replace(self.batch, input_ids=np.where(self.carried >= 0, self._carried_tokens(), self.batch.input_ids))
        self.previous = None
        try:
            self.chosen = _choose(self.executor.logits(batch), self.draws)
        except EngineError as error:
            self.error = error

    def _carried_tokens(self) -> Int64Array:
        """The token [T] that each entry of `carried` names; 0 for one that was never chosen."""
        if self.previous is None or self.previous.chosen is None or not len(self.previous.chosen):
            return np.zeros(len(self.carried), np.int64)
        return np.maximum(self.previous.chosen[self.carried], 0)


def _choose(logits: FloatArray, draws: SamplingArrays) -> Int64Array:
    """A token [R] from each row of logits [R, vocab], as a device chooses it."""
    finite = np.isfinite(logits.max(axis=1))  # the largest of a row that holds a NaN is NaN
    tokens = np.where(finite, logits.argmax(axis=1), -1)
    for row in np.flatnonzero(finite & (draws.temperatures > 0)):
        params = SamplingParams(
            temperature=float(draws.temperatures[row]), top_k=int(draws.top_ks[row]), top_p=float(draws.top_ps[row])
        )
        tokens[row] = draw_token(logits[row], params, float(draws.uniforms[row]))
    return tokens


def _check_draws(draws: SamplingArrays, num_rows: int) -> None:
    expected = {"temperatures": np.float32, "top_ks": np.int32, "top_ps": np.float32, "uniforms": np.float32}
    for name, dtype in expected.items():
        values = getattr(draws, name)
        require(values.shape == (num_rows,) and values.dtype == dtype, f"{name} are not [{num_rows}] {dtype.__name__}")
    require(bool((np.isfinite(draws.temperatures) & (draws.temperatures >= 0)).all()), "a temperature is below 0")
    require(bool((draws.top_ks >= 0).all()), "a top_k is below 0")
    require(bool(((draws.top_ps > 0) & (draws.top_ps <= 1)).all()), "a top_p is outside (0, 1]")
    require(bool(((draws.uniforms >= 0) & (draws.uniforms < 1)).all()), "a uniform number is outside [0, 1)")


def _check_carried(batch: ForwardBatch, carried: Int32Array, previous: FakeStep | None) -> None:
    require(carried.shape == batch.input_ids.shape and carried.dtype == np.int32, "carried is not [T] int32")
    at = np.flatnonzero(carried != -1)
    rows = carried[at]
    indices = previous.batch.logits_indices if previous else np.empty(0, np.int64)
    require(within(rows, len(indices)), "a token is carried from a row that the step before does not have")
    require(len(np.unique(rows)) == len(rows), "a token is carried to two places")
    require(not batch.input_ids[at].any(), "a carried token has a token id already")
    follows = previous is None or np.array_equal(batch.position_ids[at], previous.batch.position_ids[indices[rows]] + 1)
    require(follows, "a carried token does not follow the position that it was chosen at")


def _copied(arrays: _Arrays) -> _Arrays:
    return replace(arrays, **{field.name: getattr(arrays, field.name).copy() for field in fields(arrays)})
