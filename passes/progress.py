"""How a long pass tells how far it is, without an option for it: observing never changes the program.

with progress_to(callback):
    manager.run(model)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ingot.progress import Progress, silent

_listener: ContextVar[Progress] = ContextVar("ingot.passes.progress", default=silent)


@contextmanager
def progress_to(listener: Progress) -> Iterator[None]:
    """Send what passes report within the block to the listener."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def report_progress(name: str, done: int, total: int) -> None:
    """Called by a pass after each unit of work; name, done and total as ingot.progress has them."""
    _listener.get()(name, done, total)
