"""All inputs of a plan as data: sent to the building process, and digested for the cache."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass

from ingot.artifact.reader import file_sha256
from ingot.pipeline.targets.tensorrt.library import LibraryName

BUILD_VERSION = 1  # raised when the same request would give another plan


@dataclass(frozen=True)
class Profile:
    """Rows that a plan is prepared for: one number for a decode bucket, a range for prefill."""

    least: int
    best: int
    most: int

    @classmethod
    def of(cls, rows: int) -> "Profile":
        """Return the profile of exactly so many rows."""
        return cls(rows, rows, rows)


@dataclass(frozen=True)
class PlanRequest:
    """One plan to build.

    onnx         the segment's file; `data` is the file of its constants next to it, or None
    rows         inputs whose first dimension is the rows, with their other dimensions
    vectors      inputs that are weights of at most one dimension above 1
    profiles     in the order of the plan's optimization profiles
    """

    onnx: str
    data: str | None
    rows: Mapping[str, tuple[int, ...]]
    vectors: tuple[str, ...]
    profiles: tuple[Profile, ...]
    sms: tuple[int, ...]
    library: LibraryName
    library_version: str

    def key(self) -> str:
        """Digest of everything that enters the build. Not of the plan, whose bytes differ from build to build."""
        data = self.data and file_sha256(Path(self.data))
        facts = asdict(self) | {"onnx": file_sha256(Path(self.onnx)), "data": data}
        text = json.dumps({**facts, "build": BUILD_VERSION}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> str:
        """Serialize for the building process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "PlanRequest":
        """Parse the text of `to_json`."""
        return TypeAdapter(cls).validate_json(text)
