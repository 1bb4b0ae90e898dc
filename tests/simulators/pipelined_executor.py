"""The fake executor as an asynchronous device: steps are queued, and computed as late as a device may.

A step is computed when its tokens, or those of a later step, are read. Arrays are copied when a step is submitted,
block copies keep their place in the queue, and the "device" samples with float32 parameters. In addition to what the
fake executor refuses, it refuses tokens carried from the wrong row, sampling parameters out of range, and `forward`
while a step is in flight.
"""

import threading
from collections import deque
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np

from ingot.runtime.adapters import Adapter
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.forward_batch import FloatArray, ForwardBatch, Int32Array, Int64Array, SamplingArrays
from ingot.runtime.kv.blocks import BlockCopy, Copy
from ingot.runtime.truncation_sampling import TokenChoice, choose_token
from tests.simulators.fake_executor import FakeExecutor, require, within

_Arrays = TypeVar("_Arrays", ForwardBatch, SamplingArrays)


class FakePipelinedExecutor(FakeExecutor):
    """Logits and options are those of FakeExecutor."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._queue: deque[FakeStep | Copy] = deque()
        self._working = threading.RLock()  # the thread that passes on saved states lets the device work too
        self._newest: FakeStep | None = None
        self.num_submitted = 0

    def submit(self, batch: ForwardBatch, sampling: SamplingArrays, carried: Int32Array) -> "FakeStep":
        """Queue a step. EngineError for arguments that violate the contract of `PipelinedExecutor`."""
        self.require_open()
        self.check(batch)
        _check_sampling(sampling, len(batch.logits_indices))
        _check_carried(batch, carried, self._newest)
        step = FakeStep(self, self.num_submitted, copied(batch), copied(sampling), carried.copy(), self._newest)
        self._queue.append(step)
        self.num_queued += 1
        self._newest = step
        self.num_submitted += 1
        return step

    def forward(self, batch: ForwardBatch) -> FloatArray:
        """As FakeExecutor's, after all queued work. EngineError while the tokens of a step are unread."""
        require(self._newest is None or self._newest.read, "forward was called while a step is in flight")
        self._newest = None
        with self._working:
            while self._queue:
                self._work()
            return super().forward(batch)

    def copy_block(self, source: int, target: int) -> None:
        """Queue the copy."""
        self._queue.append(BlockCopy(source, target))
        self.num_queued += 1

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """Load an adapter after all queued work."""
        with self._working:
            while self._queue:
                self._work()
            super().load_adapter(slot, adapter)

    def unload_adapter(self, slot: int) -> None:
        """Free a slot after all queued work."""
        with self._working:
            while self._queue:
                self._work()
            super().unload_adapter(slot)

    def has_worked(self, number: int) -> bool:
        """Whether the device has done what was queued before this number. It makes copies that no step follows."""
        with self._working:
            if not any(isinstance(work, FakeStep) for work in self._queue):
                self.work_until(number)
        return self.num_worked >= number

    def work_until(self, number: int) -> bool:
        """Do the work that was queued before this number of steps and copies."""
        with self._working:
            while self._queue and self.num_worked < number:
                self._work()
        return True

    def compute(self, step: "FakeStep") -> None:
        """Do the queued work up to and including a step."""
        self.require_open()
        with self._working:
            while not step.computed:
                self._work()

    def _work(self) -> None:
        work = self._queue.popleft()
        if isinstance(work, FakeStep):
            work.compute()
        else:
            self.move(work)
        self.num_worked += 1


@dataclass(eq=False)
class FakeStep:
    """Queued step `number`; `previous` is the step whose tokens it carries."""

    executor: FakePipelinedExecutor
    number: int
    batch: ForwardBatch
    sampling: SamplingArrays
    carried: Int32Array
    previous: "FakeStep | None"
    sampled: Int64Array | None = None
    error: Exception | None = None
    read: bool = False

    @property
    def computed(self) -> bool:
        """Whether the device has computed it."""
        return self.sampled is not None or self.error is not None

    def tokens(self) -> Int64Array:
        """Compute everything up to this step; tokens [R], -1 where logits are not finite."""
        self.read = True
        self.executor.compute(self)
        if self.error:
            raise self.error
        assert self.sampled is not None
        return self.sampled.copy()

    def compute(self) -> None:
        """The device's work. `tokens` raises its error."""
        batch = replace(self.batch, input_ids=np.where(self.carried >= 0, self._carried_tokens(), self.batch.input_ids))
        self.previous = None
        try:
            self.sampled = _sample(self.executor.logits(batch), self.sampling)
        except Exception as error:  # noqa: BLE001 (`tokens` raises it)
            self.error = error

    def _carried_tokens(self) -> Int64Array:
        """The token [T] that each entry of `carried` refers to; 0 for one that was never sampled."""
        if self.previous is None or self.previous.sampled is None or not len(self.previous.sampled):
            return np.zeros(len(self.carried), np.int64)
        return np.maximum(self.previous.sampled[self.carried], 0)


def _sample(logits: FloatArray, sampling: SamplingArrays) -> Int64Array:
    """A token [R] from each row of logits [R, vocab], as a device samples it."""
    finite = np.isfinite(logits.max(axis=1))  # the maximum of a row with a NaN is NaN
    tokens = np.where(finite, logits.argmax(axis=1), -1)
    for row in np.flatnonzero(finite & (sampling.temperatures > 0)):
        params = SamplingParams(
            temperature=float(sampling.temperatures[row]),
            top_k=int(sampling.top_ks[row]),
            top_p=float(sampling.top_ps[row]),
        )
        tokens[row] = choose_token(logits[row], TokenChoice.of(params), float(sampling.uniforms[row]))
    return tokens


def _check_sampling(sampling: SamplingArrays, num_rows: int) -> None:
    expected = {"temperatures": np.float32, "top_ks": np.int32, "top_ps": np.float32, "uniforms": np.float32}
    for name, dtype in expected.items():
        values = getattr(sampling, name)
        require(values.shape == (num_rows,) and values.dtype == dtype, f"{name} are not [{num_rows}] {dtype.__name__}")
    require(bool((np.isfinite(sampling.temperatures) & (sampling.temperatures >= 0)).all()), "a temperature is below 0")
    require(bool((sampling.top_ks >= 0).all()), "a top_k is below 0")
    require(bool(((sampling.top_ps > 0) & (sampling.top_ps <= 1)).all()), "a top_p is outside (0, 1]")
    require(bool(((sampling.uniforms >= 0) & (sampling.uniforms < 1)).all()), "a uniform number is outside [0, 1)")


def _check_carried(batch: ForwardBatch, carried: Int32Array, previous: FakeStep | None) -> None:
    require(carried.shape == batch.input_ids.shape and carried.dtype == np.int32, "carried is not [T] int32")
    at = np.flatnonzero(carried != -1)
    rows = carried[at]
    indices = previous.batch.logits_indices if previous else np.empty(0, np.int64)
    require(within(rows, len(indices)), "a token is carried from a row that the step before does not have")
    require(len(np.unique(rows)) == len(rows), "a token is carried to two places")
    require(not batch.input_ids[at].any(), "a carried token already has a token id")
    follows = previous is None or np.array_equal(batch.position_ids[at], previous.batch.position_ids[indices[rows]] + 1)
    require(follows, "a carried token does not follow the position that it was sampled at")


def copied(arrays: _Arrays) -> _Arrays:
    values = {field.name: getattr(arrays, field.name) for field in fields(arrays)}
    return replace(arrays, **{name: value.copy() for name, value in values.items() if value is not None})
