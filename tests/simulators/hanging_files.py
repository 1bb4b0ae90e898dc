"""A file system that stops to answer: calls on files wait until it is released."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

_CALLS = (
    "fdatasync",
    "fstat",
    "fstatvfs",
    "open",
    "pread",
    "preadv",
    "pwrite",
    "pwritev",
    "rename",
    "scandir",
    "unlink",
)


class HangingFiles:
    """While it `hangs`, the calls of `os` on files wait for `release`; `is_awaited` once one does.

    A call of a thread that must not wait for files, which made this, fails instead and is kept in `misused`.
    """

    def __init__(self) -> None:
        self.misused: list[str] = []
        self.is_awaited = threading.Event()
        self._owner = threading.current_thread()
        self._answers = threading.Event()
        self._answers.set()

    def hang(self) -> None:
        """Answer no more."""
        self._answers.clear()

    def release(self) -> None:
        """Answer again."""
        self._answers.set()

    def call(self, name: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Make a call, once it is answered."""
        if not self._answers.is_set():
            if threading.current_thread() is self._owner:
                self.misused.append(name)
                raise AssertionError(f"a thread that must not wait for files calls os.{name}")
            self.is_awaited.set()
            self._answers.wait()
        return function(*arguments, **options)


@contextmanager
def hanging_files() -> Iterator[HangingFiles]:
    """Put it between all of `os` and its callers. It is released at the end, so that threads can end."""
    files = HangingFiles()
    patches = [mock.patch.object(os, name, partial(files.call, name, getattr(os, name))) for name in _CALLS]
    for patch in patches:
        patch.start()
    try:
        yield files
    finally:
        files.release()
        for patch in patches:
            patch.stop()
