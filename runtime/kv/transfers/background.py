"""The thread that moves blocks while the engine's own computes, or has no steps.

    step        schedule, copies │ executor computes       │ read │ schedule, copies │ executor computes ...
    here                         │ move, note what ended … │                         │ move, note ...

While the executor computes, the engine's thread does not hold the interpreter's lock, and touches no bookkeeping. So
this one does what the tiers have to do in a step, on a core that is left, and the step takes no longer for it. It stops
as soon as the executor is done, at the latest after what it does for a few blocks. What it had no time for, it does in
the next steps. After some that were all too short, the engine's thread does what is left before the next one.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ingot.errors import EngineError
from ingot.runtime.kv.transfers.transfer import TransferGate

GoesOn = Callable[[], bool]
"""Whether there is time to begin something for a few more blocks."""

_LOOK_SECONDS = 0.0001  # until transfers are looked at again in the same step, the first time; doubles
_POLL_SECONDS = 0.002  # the same while the engine has no steps
_MOST_BEHIND = 16  # steps in a row that leave something to the next
_STEP_SECONDS = 0.01  # after which a step is long; before, the thread would only disturb it


def always() -> bool:
    """There is time."""
    return True


class Background:
    """Calls `move` while a step computes, and `pass_on` otherwise, while `is_moving`. Sleeps if nothing moves.

    move      begins and ends what is due, as long as it may go on; returns whether it did all
    pass_on   takes note of what has ended. It may be called at any time
    gate      of the threads that read and write: closed while the engine's thread needs the interpreter

    `has_charge` says whether steps leave all to it: since the first that did, until the engine's thread did it.
    """

    def __init__(
        self,
        move: Callable[[GoesOn], bool],
        pass_on: Callable[[], object],
        is_moving: Callable[[], bool],
        gate: TransferGate,
    ) -> None:
        self._gate = gate
        self._move, self._pass_on, self._is_moving = move, pass_on, is_moving
        self._wake = threading.Event()
        self._woken = 0.0  # when
        self._inside = threading.Lock()  # held while a step's bookkeeping is used
        self._is_computing: GoesOn | None = None  # while a step computes
        self._num_behind = 0  # steps in a row that ended too soon
        self.has_charge = False
        self._failure: BaseException | None = None
        self._has_ended = self._closed = False
        self.thread = threading.Thread(target=self._run, name="ingot-kv-tiers", daemon=True)
        self.thread.start()

    @contextmanager
    def during(self, is_computing: GoesOn) -> Iterator[None]:
        """Use the time of a step: `is_computing` turns False when it ends. Nothing is used any more afterwards."""
        self.has_charge = True
        self._num_behind += 1
        self._is_computing = is_computing
        self._gate.open(is_computing)
        self.wake()
        try:
            yield
        finally:
            self._is_computing = None
            self._gate.close()
            with self._inside:
                pass

    @property
    def is_behind(self) -> bool:
        """Whether too many steps in a row ended too soon."""
        return self._num_behind >= _MOST_BEHIND

    def note_done(self) -> None:
        """Record that the engine's thread did what was left, and will do what comes until `during` is called."""
        self.has_charge, self._num_behind = False, 0

    def wake(self) -> None:
        """Look at the transfers until none is in flight, unless this is called again soon: then the caller does."""
        self._woken = time.monotonic()
        if not self._wake.is_set():
            self._wake.set()

    def check(self) -> None:
        """Raise EngineError if the thread has died."""
        if self._has_ended and not self._closed:
            raise EngineError(f"the thread that passes KV blocks on has died ({self._failure}); load the engine again")

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._wake.set()
        self.thread.join()

    def _run(self) -> None:
        try:
            while True:
                self._wake.wait()
                self._wake.clear()
                if self._closed:
                    return
                self._use_step()
                self._use_pause()
        except BaseException as error:  # noqa: BLE001 (`check` raises it in the engine's thread)
            self._failure = error
        finally:
            self._has_ended = True

    def _goes_on(self) -> bool:
        is_computing = self._is_computing
        return is_computing is not None and is_computing()

    def _use_step(self) -> None:
        """Do what is due in a step; then take note of what ends, as long as the step goes on."""
        seconds = _LOOK_SECONDS
        while self._goes_on():
            with self._inside:
                if self._goes_on() and self._move(self._goes_on):
                    self._num_behind = 0
            if not self._is_moving():
                return
            time.sleep(seconds)
            seconds = min(2 * seconds, _POLL_SECONDS)

    def _use_pause(self) -> None:
        """Pass on what ends until the engine makes a step again."""
        while not self._closed and self._is_moving():
            since = time.monotonic() - self._woken
            if self._wake.wait(max(_POLL_SECONDS, _STEP_SECONDS - since)):
                return
            self._pass_on()
