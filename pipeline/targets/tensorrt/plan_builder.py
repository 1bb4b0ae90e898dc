"""A request -> its plan, built in a process of its own, one after the other: memory is bounded by the largest."""

import json
import logging
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from ingot.errors import BuildError
from ingot.pipeline.targets.tensorrt.build_worker import PEAK_KEY, REFUSED
from ingot.pipeline.targets.tensorrt.plan_request import PlanCache, PlanRequest

WORK = "building TensorRT plans"
_WORKER = "ingot.pipeline.targets.tensorrt.build_worker"
_LAST_LINES = 5

_log = logging.getLogger("ingot.tensorrt")


@dataclass(frozen=True)
class BuiltPlan:
    """A plan's file in the cache, and what its build took; nothing where the cache held it."""

    file: Path
    peak_bytes: int | None


def build_or_recall(request: PlanRequest, cache: PlanCache) -> BuiltPlan:
    """The plan from the cache, or built into it. BuildError says what TensorRT refuses, or how it ended."""
    key = request.key()
    known = cache.find(key)
    if known is not None:
        return BuiltPlan(known, None)
    with TemporaryDirectory(prefix="ingot-plan-") as folder, cache.new_entry(key) as plan:
        text = Path(folder) / "request.json"
        text.write_text(request.to_json(), encoding="utf-8")
        peak = _run(text, plan)
    return BuiltPlan(cache.path(key), peak)


def _run(request: Path, plan: Path) -> int | None:
    """Run the worker; return the most bytes of memory that it held, where the system tells."""
    command = [sys.executable, "-m", _WORKER, str(request), str(plan)]
    ended = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    records = [_record(line) for line in ended.stderr.splitlines()]
    for level, message in records:
        _log.log(level, "%s", message)
    if ended.returncode == 0:
        peak: int | None = json.loads(ended.stdout)[PEAK_KEY]
        return peak
    said = [message for level, message in records if level >= logging.WARNING]
    if ended.returncode == REFUSED and said:
        raise BuildError("; ".join(dict.fromkeys([said[-1], *said[-3:-1]])))
    last = " / ".join(said[-_LAST_LINES:])
    how = f"exit code {ended.returncode}" if ended.returncode > 0 else f"signal {-ended.returncode}"
    raise BuildError(f"the process that builds a TensorRT plan ended with {how}: {last or 'no message'}")


def _record(line: str) -> tuple[int, str]:
    """Level and message of a line of the worker's log; what is no record of it is a warning."""
    try:
        record = json.loads(line)
        return int(record["level"]), str(record["message"])
    except (ValueError, KeyError, TypeError):
        return logging.WARNING, line
