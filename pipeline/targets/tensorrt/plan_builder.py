"""Builds plans, one after the other in processes of their own, and caches them: the largest plan bounds the memory.

    <cache>/plans/<key>.plan       the plan
    <cache>/plans/<key>.sha256     its digest, written last: a plan without it is incomplete

A plan with another digest is built again. INGOT_CACHE moves the cache; to empty it, remove the folder.
"""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory, mkstemp

from ingot.artifact.reader import file_sha256
from ingot.errors import BuildError
from ingot.pipeline.targets.tensorrt.build_worker import PEAK_KEY, REFUSED
from ingot.pipeline.targets.tensorrt.plan_request import PlanRequest
from ingot.settings import cache_dir

WORK = "building TensorRT plans"
_WORKER = "ingot.pipeline.targets.tensorrt.build_worker"
_LAST_LINES = 5
_KEY_CHARACTERS = 32

_log = logging.getLogger("ingot.tensorrt")


@dataclass(frozen=True)
class BuiltPlan:
    """A plan's file in the cache, and the peak memory of its build; None if the cache held it already."""

    file: Path
    peak_bytes: int | None


def _default_folder() -> Path:
    return cache_dir() / "plans"


@dataclass(frozen=True)
class PlanCache:
    """A folder of plans."""

    folder: Path = field(default_factory=_default_folder)

    def path(self, key: str) -> Path:
        """Return the file of that key's plan, whether it exists or not."""
        return self.folder / f"{key[:_KEY_CHARACTERS]}.plan"

    def find(self, key: str) -> Path | None:
        """Return the file of a complete plan, or None."""
        plan, digest = self.path(key), self._digest_file(key)
        if not plan.is_file() or not digest.is_file():
            return None
        return plan if digest.read_text(encoding="utf-8").strip() == file_sha256(plan) else None

    @contextmanager
    def new_entry(self, key: str) -> Iterator[Path]:
        """Yield a file to write the plan into; it joins the cache when the block ends without an error."""
        self.folder.mkdir(parents=True, exist_ok=True)
        handle, name = mkstemp(prefix=f"{key[:_KEY_CHARACTERS]}.", suffix=".part", dir=self.folder)
        os.close(handle)
        part = Path(name)
        try:
            yield part
            digest = file_sha256(part)
            self._digest_file(key).unlink(missing_ok=True)
            part.replace(self.path(key))
            self._digest_file(key).write_text(digest, encoding="utf-8")
        finally:
            part.unlink(missing_ok=True)

    def forget(self, key: str) -> None:
        """Remove an entry."""
        self._digest_file(key).unlink(missing_ok=True)
        self.path(key).unlink(missing_ok=True)

    def _digest_file(self, key: str) -> Path:
        return self.path(key).with_suffix(".sha256")


def build_or_recall(request: PlanRequest, cache: PlanCache) -> BuiltPlan:
    """Return the plan from the cache, or build it there. BuildError: what TensorRT refuses, or how it crashed."""
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
    """Run the worker; return its peak memory in bytes where the system reports it."""
    command = [sys.executable, "-m", _WORKER, str(request), str(plan)]
    ended = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    records = [_record(line) for line in ended.stderr.splitlines()]
    for level, message in records:
        _log.log(level, "%s", message)
    if ended.returncode == 0:
        peak: int | None = json.loads(ended.stdout)[PEAK_KEY]
        return peak
    problems = [message for level, message in records if level >= logging.WARNING]
    if ended.returncode == REFUSED and problems:
        raise BuildError("; ".join(dict.fromkeys([problems[-1], *problems[-3:-1]])))
    last = " / ".join(problems[-_LAST_LINES:])
    how = f"exit code {ended.returncode}" if ended.returncode > 0 else f"signal {-ended.returncode}"
    raise BuildError(f"the process that builds a TensorRT plan ended with {how}: {last or 'no message'}")


def _record(line: str) -> tuple[int, str]:
    """Parse level and message of a log line; a line that the worker did not log is a warning."""
    try:
        record = json.loads(line)
        return int(record["level"]), str(record["message"])
    except (ValueError, KeyError, TypeError):
        return logging.WARNING, line
