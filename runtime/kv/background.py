"""The thread that passes on what has moved while the engine has no steps."""

import threading
import time
from collections.abc import Callable

from ingot.errors import EngineError

_POLL_SECONDS = 0.002  # while something moves


class Background:
    """Calls `pass_on` while `is_moving`, after each `wake`. Sleeps otherwise."""

    def __init__(self, pass_on: Callable[[], object], is_moving: Callable[[], bool]) -> None:
        self._pass_on, self._is_moving = pass_on, is_moving
        self._wake = threading.Event()
        self._failure: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="ingot-kv-tiers", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Look at the transfers until none is in flight."""
        self._wake.set()

    def check(self) -> None:
        """Raise EngineError if the thread has died."""
        if self._failure or not (self._closed or self._thread.is_alive()):
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
                self._wake.clear()
                while not self._closed and self._is_moving():
                    self._pass_on()
                    time.sleep(_POLL_SECONDS)
                if self._closed:
                    return
        except BaseException as error:  # noqa: BLE001 (`check` raises it in the engine's thread)
            self._failure = error
