"""Outputs of a step: logits [rows, vocab] or chosen tokens, copied to the host through pinned memory."""

import numpy as np

from ingot.artifact.programs.launch_program import CudaProgram
from ingot.errors import EngineError
from ingot.runtime.cuda.driver.device import Bytes, Device, Event, Stream
from ingot.runtime.forward_batch import FloatArray, Int64Array

_STEPS = 4  # whose tokens may be unread in pinned memory
_LOGIT_BYTES, _TOKEN_BYTES = 4, 8


class CudaStep:
    """A queued step. Implements `ingot.runtime.scheduling.batch_builder.SubmittedStep`."""

    def __init__(self, device: Device, event: Event, pinned: Int64Array, what: str) -> None:
        self._device, self._event, self._what = device, event, what
        self._pinned: Int64Array | None = pinned
        self._tokens: Int64Array | EngineError | None = None

    def tokens(self) -> Int64Array:
        """Wait for the step; return the token chosen from each row [R], -1 where a row's logits were not finite."""
        self.keep()
        if isinstance(self._tokens, EngineError):
            raise self._tokens
        assert self._tokens is not None
        return self._tokens

    def keep(self) -> None:
        """Wait for the step and copy its tokens out of pinned memory, which another step needs. Never raises."""
        if self._pinned is None:
            return
        try:
            self._device.activate()
            self._device.wait_on_host(self._event, self._what)
            self._tokens = self._pinned.copy()
        except EngineError as error:
            self._tokens = error
        self._pinned = None


class StepOutputs:
    """Device memory for logits and tokens of any bucket, and the pinned memory that they are copied to."""

    def __init__(self, device: Device, stream: Stream, program: CudaProgram) -> None:
        rows = max(one.logits_rows for one in program.programs)
        self._device, self._stream, self._vocabulary = device, stream, program.vocab_size
        size = rows * program.vocab_size * _LOGIT_BYTES
        what = f"logits of {rows} rows"
        self.addresses = {"logits": device.allocate(size, what), "tokens": device.allocate(rows * _TOKEN_BYTES, what)}
        device.clear(self.addresses["tokens"], rows * _TOKEN_BYTES, stream)  # no tokens were chosen yet
        self._rows, self._logits = rows, device.allocate_pinned(size, what)
        self._many: FloatArray = np.empty((0, program.vocab_size), np.float32)
        most = max(one.rows for one in program.programs)  # where every token of a step gets logits
        pinned = device.allocate_pinned(_STEPS * most * _TOKEN_BYTES, "tokens of steps")
        self._tokens = pinned.view(np.int64).reshape(_STEPS, most)
        self._events = [device.make_event() for _ in range(_STEPS)]
        self._steps: list[CudaStep | None] = [None] * _STEPS
        self._next = 0
        self._copied = device.make_event()

    def logits(self, rows: int) -> FloatArray:
        """Return host memory [rows, vocab] for the step's logits, valid until the next call."""
        if rows <= self._rows:
            return self._pinned(rows)
        if rows > len(self._many):
            self._many = np.empty((rows, self._vocabulary), np.float32)
        return self._many[:rows]

    def read_logits(self, target: FloatArray, what: str) -> None:
        """Wait for the first len(target) rows of logits and copy them to `target`, which `logits` returned."""
        pinned = self._pinned(len(target))
        raw: Bytes = pinned.reshape(-1).view(np.uint8)
        self._device.copy_out(raw, self.addresses["logits"], self._stream)
        self._device.record(self._copied, self._stream)
        self._device.wait_on_host(self._copied, what)
        if not np.may_share_memory(target, pinned):
            target[:] = pinned

    def tokens(self, rows: int) -> Int64Array:
        """Pinned memory [rows] for the tokens of the next step, to be filled by `queue_tokens` and given to `step`."""
        before = self._steps[self._next % _STEPS]
        if before is not None:
            before.keep()
        pinned: Int64Array = self._tokens[self._next % _STEPS, :rows]
        return pinned

    def queue_tokens(self, target: Int64Array) -> None:
        """Queue the copy of the tokens that the sampling kernels chose last to a part of what `tokens` returned."""
        self._device.copy_out(target.view(np.uint8), self.addresses["tokens"], self._stream)

    def step(self, tokens: Int64Array, what: str) -> CudaStep:
        """The step whose tokens are complete with what is queued now."""
        at = self._next % _STEPS
        self._next += 1
        self._device.record(self._events[at], self._stream)
        step = self._steps[at] = CudaStep(self._device, self._events[at], tokens, what)
        return step

    def close(self) -> None:
        """Copy unread tokens out of pinned memory before it is freed."""
        for step in self._steps:
            if step is not None:
                step.keep()

    def _pinned(self, rows: int) -> FloatArray:
        size = rows * self._vocabulary * _LOGIT_BYTES
        return self._logits[:size].view(np.float32).reshape(rows, self._vocabulary)
