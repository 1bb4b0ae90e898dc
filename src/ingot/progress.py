"""How long work reports on itself: a callable, so that nothing below the command line knows of terminals."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""progress(name, done, total): `done` of `total` units of the work called `name`; done == total ends it."""


def silent(name: str, done: int, total: int) -> None:
    """Report nothing: the default."""
