"""The threads that call a disk store, so that nothing else waits for a file system that is slow, or hangs.

Two read, one writes and removes, and one looks for what other processes stored. A call that takes longer than
`HANG_SECONDS` means that the file system hangs. Its thread cannot be ended; it is given up until the call returns.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from ingot.errors import EngineError
from ingot.runtime.kv.transfers.transfer import TaskQueue

MakeThreads = Callable[[str, int], TaskQueue]
"""Makes threads from their name and number."""

HANG_SECONDS = 5.0
_LOOK_SECONDS = 0.02  # between two looks
_READERS = 2
_log = logging.getLogger(__name__)


class Answers:
    """Whether the file system answers: how long the calls in flight have taken."""

    def __init__(self) -> None:
        self._begun: dict[int, float] = {}  # by thread
        self._was_logged = False

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Note that this thread calls the store."""
        self._begun[threading.get_ident()] = time.monotonic()
        try:
            yield
        finally:
            del self._begun[threading.get_ident()]

    @property
    def are_missing(self) -> bool:
        """Whether a call has taken longer than `HANG_SECONDS`, which is logged once."""
        begun = list(self._begun.values())
        if not begun or time.monotonic() - min(begun) < HANG_SECONDS:
            return False
        if not self._was_logged:
            self._was_logged = True
            _log.warning(
                "the file system of the KV folder has not answered for %g seconds: until it does, blocks on disk are"
                " computed again, and none is written",
                HANG_SECONDS,
            )
        return True


class _Watch:
    """A thread that calls `look` again and again."""

    def __init__(self, look: Callable[[], object], answers: Answers, admit: Callable[[], object]) -> None:
        self._look, self._answers, self._admit = look, answers, admit
        self._closed = threading.Event()
        self._failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="ingot-kv-look", daemon=True)
        self.thread.start()

    def check(self) -> None:
        """Raise EngineError if the thread has died."""
        if self._failure:
            raise EngineError(f"the thread that looks for KV blocks has died ({self._failure}); load the engine again")

    def close(self, seconds: float) -> bool:
        """End the thread; returns whether it ended within `seconds`."""
        self._closed.set()
        self.thread.join(seconds)
        return not self.thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._closed.wait(_LOOK_SECONDS):
                self._admit()
                with self._answers.awaited():
                    self._look()
        except BaseException as error:  # noqa: BLE001 (`check` raises it in the engine's thread)
            self._failure = error


class DiskThreads:
    """Threads for one store.

    look    takes note of what other processes stored; None: nothing does so, as in tests without threads
    admit   called before what can wait, a write or a look, in its thread: returns when that may begin
    """

    def __init__(
        self, make: MakeThreads, look: Callable[[], object] | None, admit: Callable[[], object] = lambda: None
    ) -> None:
        self.answers = Answers()
        self.admit = admit
        with ExitStack() as begun:
            self.readers = make("ingot-kv-read", _READERS)
            begun.callback(self.readers.close)
            self.writer = make("ingot-kv-write", 1)
            begun.callback(self.writer.close)
            self._watch = _Watch(look, self.answers, admit) if look else None
            begun.pop_all()

    @property
    def threads(self) -> list[threading.Thread]:
        """All of them."""
        watch = [self._watch.thread] if self._watch else []
        return [*self.readers.threads, *self.writer.threads, *watch]

    def check(self) -> None:
        """Raise EngineError if a thread has died."""
        self.readers.check()
        self.writer.check()
        if self._watch:
            self._watch.check()

    def close(self) -> bool:
        """Run what is queued, and end the threads; returns whether they ended. One that hangs is left."""
        ended = [threads.close(HANG_SECONDS) for threads in (self.readers, self.writer)]
        return all(ended) and (self._watch is None or self._watch.close(HANG_SECONDS))
