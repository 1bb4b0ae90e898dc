"""Everything that happened, one line of JSON per event, on disk before the next event: a kill at any moment loses none.

    {"part": "kernels", "event": "tasks", "names": [...]}
    {"part": "kernels", "event": "begin", "task": "rms_norm-...", "seconds": 30}
    {"part": "kernels", "event": "record", "task": "rms_norm-...", "record": {...}}
    {"part": "kernels", "event": "end", "task": "rms_norm-...", "took": 0.01, "error": null, "skipped": null}
    {"part": "kernels", "event": "broken", "error": "..."}        the part cannot go on
    {"part": "kernels", "event": "done", "took": 12.5}

A journal is also what a later run resumes from.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import Record

Event = dict[str, Any]
FILE = "journal.jsonl"


@dataclass
class PartLog:
    """Tasks, records and errors of one part."""

    names: list[str] = field(default_factory=list)
    records: dict[str, list[Record]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)  # of tasks
    skipped: dict[str, str] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    running: str | None = None
    broken: str | None = None
    seconds: float = 0.0
    is_listed: bool = False

    @property
    def all_records(self) -> list[Record]:
        """The records of all tasks."""
        return [record for records in self.records.values() for record in records]

    @property
    def wrong(self) -> list[str]:
        """Tasks with a record beyond its limit."""
        return [name for name, found in self.records.items() if any(one.get("within") is False for one in found)]

    @property
    def left(self) -> list[str]:
        """Tasks that have not run."""
        return [name for name in self.names if name not in self.ended or name in self.skipped]

    @property
    def status(self) -> str:
        """done: every task ran, and nothing is beyond its limit; else failed, wrong or incomplete, in this order."""
        if self.broken or self.errors:
            return "failed"
        if self.wrong:
            return "wrong"
        return "done" if self.is_listed and not self.left else "incomplete"

    def add(self, event: Event) -> None:
        """Take an event in."""
        task, kind = event.get("task", ""), event["event"]
        if kind == "tasks":
            self.names, self.is_listed = event["names"], True
        elif kind == "begin":
            self.running = task
            self.records[task] = []
            self.skipped.pop(task, None)
        elif kind == "record":
            self.records.setdefault(task, []).append(event["record"])
        elif kind == "end":
            self._end(task, event)
        elif kind == "broken":
            self.broken = event["error"]
        elif kind == "done":
            self.seconds += event["took"]

    def _end(self, task: str, event: Event) -> None:
        self.running = None
        self.ended.add(task)
        for held, said in ((self.errors, event["error"]), (self.skipped, event["skipped"])):
            if said:
                held[task] = said

    def summary(self) -> Record:
        """For the report."""
        return {
            "status": self.status,
            "seconds": round(self.seconds, 1),
            "tasks": len(self.names),
            "done": len(self.names) - len(self.left) - len(self.errors),
            "broken": self.broken,
            "failed": self.errors,
            "wrong": self.wrong,
            "left": self.left,
            "skipped": self.skipped,
            "records": self.all_records,
        }


class Journal:
    """The events of all parts, in memory and in a file."""

    def __init__(self, file: Path, resumed: Path | None = None) -> None:
        self.parts: dict[str, PartLog] = {}
        lines = resumed.read_text("utf-8").splitlines() if resumed else []
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("", "utf-8")
        self._file = file
        for event in _events(lines):
            self.write(event["part"], event)
        for log in self.parts.values():  # a task that was cut off, and a part that broke, run again
            log.running = log.broken = None

    def write(self, part: str, event: Event) -> PartLog:
        """Add an event; it is on disk when this returns."""
        log = self.parts.setdefault(part, PartLog())
        log.add(event)
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"part": part, **event}) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        return log

    @property
    def records(self) -> list[Record]:
        """The records of all parts."""
        return [record for log in self.parts.values() for record in log.all_records]

    def summaries(self) -> Mapping[str, Record]:
        """The report's section of parts."""
        return {name: log.summary() for name, log in self.parts.items()}


def _events(lines: Iterable[str]) -> Iterable[Event]:
    """The events of a journal whose last line may be cut off."""
    for line in lines:
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return
