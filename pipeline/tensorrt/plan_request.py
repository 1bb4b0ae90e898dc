"""What a plan is built from, as data: it crosses to the process that builds, and its digest is the cache's key."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ingot.artifact.reader import file_sha256
from ingot.pipeline.tensorrt.library import LibraryName

BUILD_VERSION = 1  # raised when the same request would be built otherwise


@dataclass(frozen=True)
class Profile:
    """Rows that a plan is prepared for: one number for a decode bucket, a range for prefill."""

    least: int
    best: int
    most: int

    @classmethod
    def of(cls, rows: int) -> "Profile":
        """Exactly so many rows."""
        return cls(rows, rows, rows)


@dataclass(frozen=True)
class PlanRequest:
    """One plan to build.

    onnx         file of the segment; `data` is the file of its constants beside it, or None
    rows         inputs whose first dimension is the rows, with their other dimensions
    vectors      inputs that are weights, and no matrices
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
        """A digest of all that goes into the build; not of the plan, whose bytes differ from build to build."""
        data = self.data and file_sha256(Path(self.data))
        facts = asdict(self) | {"onnx": file_sha256(Path(self.onnx)), "data": data}
        text = json.dumps({**facts, "build": BUILD_VERSION}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> str:
        """As text, for another process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "PlanRequest":
        """What `to_json` wrote."""
        facts = json.loads(text)
        rows = {name: tuple(sizes) for name, sizes in facts["rows"].items()}
        profiles = tuple(Profile(**profile) for profile in facts["profiles"])
        lists = {name: tuple(facts[name]) for name in ("vectors", "sms")}
        return cls(**{**facts, **lists, "rows": rows, "profiles": profiles})
