"""NVIDIA's compute-sanitizer on what failed: each failed task again, alone, under memcheck and racecheck."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from benchmarks.gpu.parts import PARTS, Record, Task

PROGRAM = "compute-sanitizer"
TOOLS = ("memcheck", "racecheck")
_MOST_TASKS = 4
_SECONDS = 60.0
_SAID = "========="  # begins its lines
_MOST_LINES = 40


def sanitizer(order: Mapping[str, Any]) -> list[Task]:
    """Every tool on the first failed tasks; nothing where none failed. `order` is the worker's."""
    failed = order["failed"][:_MOST_TASKS]
    return [
        Task(f"{tool}: {part}: {task}", partial(_checked, order, tool, part, task), _SECONDS, _SECONDS / 4)
        for part, task in failed
        for tool in TOOLS
    ]


def _checked(order: Mapping[str, Any], tool: str, part: str, task: str) -> Iterator[Record]:
    facts: Record = {"figure": "sanitizer", "tool": tool, "part": part, "task": task}
    program = shutil.which(PROGRAM)
    if program is None:
        yield {**facts, "absent": f"{PROGRAM} is not on the PATH"}
        return
    again = {**order, "part": part, "function": PARTS[part].function, "needs_device": True, "ended": [], "only": task}
    worker = [sys.executable, "-m", "benchmarks.gpu.worker", json.dumps(again)]
    environment = {**os.environ, **PARTS[part].environment}
    try:
        done = subprocess.run(
            [program, "--tool", tool, *worker],
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS - 5,
            check=False,
        )
    except subprocess.TimeoutExpired:
        yield {**facts, "absent": f"took longer than {_SECONDS - 5:.0f} s"}
        return
    said = [line for line in done.stdout.splitlines() if line.startswith(_SAID)]
    yield {**facts, "returncode": done.returncode, "said": said[:_MOST_LINES]}
