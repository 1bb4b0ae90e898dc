"""What a plan is built from, as data: it crosses to the process that builds, and its digest is the cache's key.

Plans that were built before, by the digest of what they were built from.

    <cache>/plans/<key>.plan       the plan
    <cache>/plans/<key>.sha256     its digest: written last, so that a plan without it is not whole

A plan whose digest is another is built again. INGOT_CACHE moves the cache; to empty it, remove the folder.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import mkstemp

from ingot.artifact.reader import file_sha256
from ingot.pipeline.targets.tensorrt.library import LibraryName
from ingot.settings import cache_dir

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


_KEY_CHARACTERS = 32


def _default_folder() -> Path:
    return cache_dir() / "plans"


@dataclass(frozen=True)
class PlanCache:
    """A folder of plans."""

    folder: Path = field(default_factory=_default_folder)

    def path(self, key: str) -> Path:
        """Where the plan of that key lies, if it is there."""
        return self.folder / f"{key[:_KEY_CHARACTERS]}.plan"

    def find(self, key: str) -> Path | None:
        """The plan's file, where it is whole; None where it must be built."""
        plan, digest = self.path(key), self._digest_file(key)
        if not plan.is_file() or not digest.is_file():
            return None
        return plan if digest.read_text(encoding="utf-8").strip() == file_sha256(plan) else None

    @contextmanager
    def new_entry(self, key: str) -> Iterator[Path]:
        """A file to write the plan of that key into; it joins the cache when the block ends without an error."""
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
