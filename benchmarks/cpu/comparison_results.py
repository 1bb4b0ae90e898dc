"""The JSON files of the comparison of CPU engines: one for each processor, with a record for each cell."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.device import device_facts, file_stem, processor_name
from benchmarks.paths import RESULTS

DEFAULT_OUTPUT = RESULTS / "cpu" / "processors"


@dataclass
class ProcessorResults:
    """One processor's file.

    Every record has the fields of its cell's key and "processor"; "engines", "failed" in this cell, and "missing":
    engines that could not be prepared; the latter two with their reasons.
    """

    path: Path
    records: list[dict[str, Any]] = field(default_factory=list)
    device: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> "ProcessorResults":
        """The results of a file; none if it does not exist."""
        if not path.is_file():
            return cls(path)
        content = json.loads(path.read_text("utf-8"))
        return cls(path, content["cells"], content["device"])

    @classmethod
    def of_this_machine(cls, folder: Path) -> "ProcessorResults":
        """The results of this machine's processor."""
        return cls.load(folder / f"{file_stem(processor_name())}.json")

    def of(self, *parts: str) -> list[dict[str, Any]]:
        """Records of some parts."""
        return [record for record in self.records if record["part"] in parts]

    def has(self, key: Mapping[str, Any], engines: Iterable[str]) -> bool:
        """Whether all these engines took part in a cell: were measured, or failed in it."""
        return any(
            _matches(record, key) and {*engines} <= {*record["engines"], *record["failed"]} for record in self.records
        )

    def put(self, key: Mapping[str, Any], record: Mapping[str, Any]) -> None:
        """Replace a cell's record and write the file."""
        self.device = device_facts()
        named = {**record, "processor": self.device["processor"]}
        self.records = [each for each in self.records if not _matches(each, key)] + [named]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {"device": self.device, "cells": self.records}
        unfinished = self.path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(content, indent=1, default=str) + "\n", "utf-8")
        unfinished.replace(self.path)


def all_results(folder: Path) -> list[ProcessorResults]:
    """The results of every processor in a folder, by name."""
    return [ProcessorResults.load(path) for path in sorted(folder.glob("*.json"))]


def _matches(record: Mapping[str, Any], key: Mapping[str, Any]) -> bool:
    return all(record.get(name) == value for name, value in key.items())
