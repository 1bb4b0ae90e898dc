"""Progress, notes and details of long work: reported by the code that does it, shown by a listener.

    with progress_to(listener):
        build(...)

The listener is a context variable, not an argument: reporting never changes a result. A thread that reports must run
in a copy of its starter's context (`contextvars.copy_context`).
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

Progress = Callable[[str, int, int], None]
"""progress(name, done, total): `done` of `total` units of the work called `name`; done == total ends it."""


NOTES = "ingot.notes"  # the logger of `note`
DETAILS = "ingot.details"  # the logger of `detail`


def silent(name: str, done: int, total: int) -> None:
    """Report nothing: the default listener."""


_listener: ContextVar[Progress] = ContextVar("ingot.progress", default=silent)


@contextmanager
def progress_to(listener: Progress) -> Iterator[None]:
    """Send the progress that is reported within the block to the listener."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def report_progress(name: str, done: int, total: int) -> None:
    """Report that `done` of `total` units of the work called `name` are finished."""
    _listener.get()(name, done, total)


@dataclass
class Stage:
    """Counts the steps of one piece of work, and reports its start and every step."""

    name: str
    total: int
    done: int = 0

    def __post_init__(self) -> None:
        self.advance(0)

    def advance(self, steps: int = 1) -> None:
        """Report that `steps` more are done."""
        self.done += steps
        report_progress(self.name, self.done, self.total)


def note(text: str) -> None:
    """Tell the user something less than a warning: the command line shows it, other programs find it in the log."""
    logging.getLogger(NOTES).info("%s", text)


def detail(name: str, text: str) -> None:
    """Report the result of the last unit of the work called `name`: shown next to its progress bar, and logged."""
    logging.getLogger(DETAILS).info("%s: %s", name, text)
