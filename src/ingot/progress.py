"""How long work reports on itself: a callable, so that nothing below the command line knows of terminals."""

import logging
from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""progress(name, done, total): `done` of `total` units of the work called `name`; done == total ends it."""


NOTES = "ingot.notes"  # the logger behind `note`
DETAILS = "ingot.details"  # the logger behind `detail`


def note(text: str) -> None:
    """Tell the user something that is no warning: the command line shows it, other programs find it in the log."""
    logging.getLogger(NOTES).info("%s", text)


def detail(name: str, text: str) -> None:
    """What came out of the last unit of the work called `name`: stands beside its bar, and in the log."""
    logging.getLogger(DETAILS).info("%s: %s", name, text)


def silent(name: str, done: int, total: int) -> None:
    """Report nothing: the default."""
