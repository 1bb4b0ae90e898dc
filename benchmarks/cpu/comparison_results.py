"""The JSON files of the comparison of CPU engines: one for each part, with a record for each cell."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.device import device_facts
from benchmarks.paths import RESULTS

DEFAULT_OUTPUT = RESULTS / "cpu"


@dataclass
class PartResults:
    """One part's file. Every record has the fields of its cell's key, "engines" and "failed"."""

    path: Path
    records: list[dict[str, Any]] = field(default_factory=list)
    device: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path, part: str) -> "PartResults":
        """The file of a part; without records if it does not exist."""
        path = folder / f"{part}.json"
        if not path.is_file():
            return cls(path)
        content = json.loads(path.read_text("utf-8"))
        return cls(path, content["cells"], content["device"])

    def has(self, key: Mapping[str, Any], engines: Iterable[str]) -> bool:
        """Whether a cell was measured with all these engines."""
        return any(_matches(record, key) and {*engines} <= {*record["engines"]} for record in self.records)

    def put(self, key: Mapping[str, Any], record: dict[str, Any]) -> None:
        """Replace a cell's record and write the file."""
        self.records = [each for each in self.records if not _matches(each, key)] + [record]
        self.device = device_facts()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {"device": self.device, "cells": self.records}
        unfinished = self.path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(content, indent=1, default=str) + "\n", "utf-8")
        unfinished.replace(self.path)


def _matches(record: Mapping[str, Any], key: Mapping[str, Any]) -> bool:
    return all(record.get(name) == value for name, value in key.items())
