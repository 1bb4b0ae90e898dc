"""Parts whose tasks fail in every way that tasks on a GPU can, without a device."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from benchmarks.gpu.parts import Record, Task
from benchmarks.gpu.worker import LOST

CHILD_FILE = "child"  # in the folder that FAKE_FOLDER names: the process id of a hanging task's child


def fine(order: object) -> list[Task]:
    """Two tasks; the second reports a result beyond its limit if FAKE_WRONG is set."""
    within = not os.environ.get("FAKE_WRONG")
    return [Task("one", lambda: [record(1)]), Task("two", lambda: [record(2), {**record(3), "within": within}])]


def failing(order: object) -> list[Task]:
    """A task that raises, one whose process crashes, one that loses the context, one that hangs, and fine ones."""
    return [
        Task("fine", lambda: [record(1)]),
        Task("raises", raises),
        Task("crashes", crashes),
        Task("loses", lambda: os._exit(LOST)),
        Task("hangs", hangs, seconds=0.2),
        Task("prints", prints),
        Task("last", lambda: [record(5)]),
    ]


def broken(order: object) -> list[Task]:
    """Cannot be listed."""
    raise ModuleNotFoundError("No module named 'pydantic'", name="pydantic")


def empty(order: object) -> list[Task]:
    """Found no files."""
    return []


def slow(order: object) -> list[Task]:
    """More tasks than the part has time for."""
    return [Task(str(number), sleeps) for number in range(100)]


def record(value: int) -> Record:
    return {"figure": "fake", "value": value}


def sleeps() -> Iterator[Record]:
    time.sleep(0.4)
    yield record(0)


def raises() -> Iterator[Record]:
    yield record(2)
    raise ValueError("out of range")


def crashes() -> Iterator[Record]:
    yield record(3)
    os.abort()


def hangs() -> NoReturn:
    """With a child that hangs too."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (Path(os.environ["FAKE_FOLDER"]) / CHILD_FILE).write_text(str(child.pid))
    while True:
        time.sleep(60)


def prints() -> list[Record]:
    """Also other things than events."""
    print("a library says hello")
    print('{"figure": "not an event"}')
    return [record(4)]
