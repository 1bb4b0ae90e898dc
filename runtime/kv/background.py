"""The thread that passes on what has moved while the engine has no steps, or long ones."""

import threading
import time
from collections.abc import Callable

from ingot.errors import EngineError

_POLL_SECONDS = 0.002  # while something moves
_STEP_SECONDS = 0.01  # after which a step is long; before, the thread would only disturb it


class Background:
    """Calls `pass_on` while `is_moving`, from a while after the last `wake`. Sleeps otherwise."""

    def __init__(self, pass_on: Callable[[], object], is_moving: Callable[[], bool]) -> None:
        self._pass_on, self._is_moving = pass_on, is_moving
        self._wake = threading.Event()
        self._woken = 0.0  # when
        self._failure: BaseException | None = None
        self._has_ended = self._closed = False
        self._thread = threading.Thread(target=self._run, name="ingot-kv-tiers", daemon=True)
        self._thread.start()

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
        self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                self._wake.wait()
                while not self._closed and self._is_moving():
                    since = time.monotonic() - self._woken
                    if since >= _STEP_SECONDS:
                        self._pass_on()
                    time.sleep(max(_POLL_SECONDS, _STEP_SECONDS - since))
                if self._closed:
                    return
                self._wake.clear()
                if self._is_moving():  # since it was looked at
                    self._wake.set()
        except BaseException as error:  # noqa: BLE001 (`check` raises it in the engine's thread)
            self._failure = error
        finally:
            self._has_ended = True
