"""Plans that were built before, by the digest of what they were built from.

    <cache>/plans/<key>.plan       the plan
    <cache>/plans/<key>.sha256     its digest: written last, so that a plan without it is not whole

A plan whose digest is another is built again. INGOT_CACHE moves the cache; to empty it, remove the folder.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkstemp

from ingot.artifact.reader import file_sha256
from ingot.settings import cache_dir

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
