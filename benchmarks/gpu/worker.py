"""The process of one part: runs its tasks one after the other and prints every event as a line of JSON.

    python -m benchmarks.gpu.worker '{"part": "kernels", ...}'

A task that raises is recorded, and the next one runs. After an error that spoiled the GPU's context nothing can run in
the process: it ends with LOST, and run.py starts another for the tasks that are left.
"""

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.parts import OutOfTimeError, Task
from benchmarks.paths import ROOT

if TYPE_CHECKING:
    from benchmarks.gpu.device import Bench

LOST = 17  # exit status: the GPU's context is lost
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_LAST_LINES = 12


def main(text: str) -> None:
    """Run what the order says; see run.py for its fields."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    order: dict[str, Any] = json.loads(text)
    bench = _bench(order) if order["needs_device"] else None
    module, _, name = order["function"].partition(":")
    tasks = list(getattr(import_module(module), name)(bench or order))
    run_tasks(tasks, order["ended"], order["only"], bench, say)


def run_tasks(
    tasks: Sequence[Task],
    ended: Sequence[str],
    only: str | None,
    bench: "Bench | None",
    tell: Callable[..., object],
) -> None:
    """Run all tasks but those that ended in an earlier process, or one alone."""
    names = [task.name for task in tasks]
    assert len(set(names)) == len(names), "tasks have distinct names"
    if only is None:
        tell(event="tasks", names=names)
    for task in tasks:
        if task.name in ended or only not in (None, task.name):
            continue
        if bench is not None and not bench.room(task.least):
            tell(event="end", task=task.name, took=0.0, error=None, skipped="no time left")
            continue
        _run(task, bench, tell)


def _run(task: Task, bench: "Bench | None", tell: Callable[..., object]) -> None:
    tell(event="begin", task=task.name, seconds=task.seconds)
    begin, error, skipped = time.monotonic(), None, None
    try:
        for record in task.run():
            tell(event="record", task=task.name, record=record)
    except OutOfTimeError as stopped:
        skipped = str(stopped)
    except Exception:  # noqa: BLE001  # of any kind: it is recorded, and the next task runs
        text = traceback.format_exc().replace(f"{ROOT}{os.sep}", "")  # results name no folder of a machine
        error = "\n".join(text.splitlines()[-_LAST_LINES:])
    tell(event="end", task=task.name, took=round(time.monotonic() - begin, 3), error=error, skipped=skipped)
    if error is not None and bench is not None and not bench.machine.is_alive():
        os._exit(LOST)


def say(**event: object) -> None:
    """Print an event."""
    print(json.dumps(event), flush=True)


def _bench(order: dict[str, Any]) -> "Bench":
    from benchmarks.gpu.device import Bench, Gpu, Machine
    from benchmarks.gpu.figures import Peaks

    machine: Machine = Gpu()
    if order["dry_run"]:
        machine = import_module("benchmarks.gpu.dry_machine").DryMachine(order["part"], order["plant"])
    programs, scratch, output = (Path(order[name]) for name in ("programs", "scratch", "output"))
    failed = [(part, task) for part, task in order["failed"]]
    return Bench(machine, programs, scratch, output, order["deadline"], Peaks(**order["peaks"]), failed)


if __name__ == "__main__":
    main(sys.argv[1])
