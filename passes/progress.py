"""How a long pass tells how far it is, without an option for it: observing never changes the program.

with progress_to(lambda what, done, total: bar.update(done)):
    manager.run(model)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Progress = Callable[[str, int, int], None]  # what is worked on, done, total; done and total in bytes or elements


def _ignore(what: str, done: int, total: int) -> None:
    """Nobody listens."""


_listener: ContextVar[Progress] = ContextVar("ingot.passes.progress", default=_ignore)


@contextmanager
def progress_to(listener: Progress) -> Iterator[None]:
    """Send what passes report within the block to the listener."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def report_progress(what: str, done: int, total: int) -> None:
    """Called by a pass after each unit of work."""
    _listener.get()(what, done, total)
