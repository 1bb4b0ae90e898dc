"""What a build that was cut off has done already: a folder of records in the cache, so that the next one goes on there.

    CACHE/calibration/KEY/walk-0.stage-0007-DIGEST.safetensors      what a pass remembered of a stage
    CACHE/calibration/KEY/walk-0.level-0012.activations/            activations before a level: the newest only

KEY is a digest over all that decides the bits of a pass: the checkpoint, the passes up to it with their options, every
calibration token, the versions of the tools and the code of the passes. So a record is either right or not found. Every
file appears whole, by renaming; one that is damaged is left out with a warning. Activations that were not kept are made
again, bit for bit.

    with resumable():
        ...                                     # opens a journal

A build that ends well removes its records; one that fails or is cut off leaves them, for STALE_DAYS at most. A disk
that is full ends the journal and not the build.
"""

import json
import logging
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from ingot.passes.calibration import Arrays
from ingot.passes.manager import passes_so_far
from ingot.pipeline.calibrate.activations import SNAPSHOT_BYTES, SNAPSHOT_SECONDS, Snapshots
from ingot.pipeline.calibrate.data import CalibrationData
from ingot.settings import cache_dir

STALE_DAYS = 14
_CODE = ("ingot.passes", "ingot.pipeline")

_log = logging.getLogger("ingot.pipeline")


@dataclass
class BuildJournal:
    """The records of one build. `root` is the folder of all journals; `build` says what all keys of it have in common.

    resume              whether to go on where an earlier build stopped; else its records are removed
    snapshot_seconds    time between two copies of the activations
    snapshot_bytes      most that such a copy may take on disk
    """

    root: Path
    build: str
    resume: bool = True
    snapshot_seconds: float = SNAPSHOT_SECONDS
    snapshot_bytes: int = SNAPSHOT_BYTES
    _walks: Counter[Path] = field(default_factory=Counter)

    @classmethod
    def open(
        cls, root: Path, checkpoint_digest: str, data: CalibrationData, tools: Mapping[str, str], resume: bool = True
    ) -> "BuildJournal":
        """The journal of a build of this checkpoint on this data; stale ones in `root` are removed."""
        _remove_stale(root)
        parts = [checkpoint_digest, data.digest(), asdict(data.facts), dict(tools), code_digest()]
        return cls(root, sha256(json.dumps(parts).encode()).hexdigest(), resume)

    def begin_walk(self) -> "WalkJournal | None":
        """The records of the pass that runs now; None when none runs within a PassManager."""
        history = passes_so_far()
        if not history:
            return None
        key = sha256(json.dumps([self.build, history]).encode()).hexdigest()[:32]
        folder = self.root / key
        if not self.resume and not self._walks[folder]:
            shutil.rmtree(folder, ignore_errors=True)
        number = self._walks[folder]
        self._walks[folder] += 1
        name = re.split("[^a-z0-9-]", history[-1])[0]
        snapshots = Snapshots(folder, f"walk-{number}", self.snapshot_seconds, self.snapshot_bytes)
        return WalkJournal(folder, f"walk-{number}", name, snapshots)

    def remove(self) -> None:
        """The build ended well: forget what it kept."""
        for folder in self._walks:
            shutil.rmtree(folder, ignore_errors=True)


_opened: ContextVar[tuple[bool, list[BuildJournal]] | None] = ContextVar("ingot.pipeline.journal", default=None)


@contextmanager
def resumable(resume: bool = True) -> Iterator[None]:
    """What is calibrated within the block is journaled, and forgotten when the block ends without an error.

    `resume=False` throws away what an earlier build left, and starts afresh.
    """
    journals: list[BuildJournal] = []
    token = _opened.set((resume, journals))
    try:
        yield
    finally:
        _opened.reset(token)
    for journal in journals:
        journal.remove()


def open_journal(
    checkpoint_digest: Callable[[], str], data: CalibrationData, tools: Mapping[str, str]
) -> BuildJournal | None:
    """The journal of a build of this checkpoint on this data; None outside of `resumable`."""
    opened = _opened.get()
    if opened is None:
        return None
    resume, journals = opened
    journals.append(BuildJournal.open(cache_dir() / "calibration", checkpoint_digest(), data, tools, resume))
    return journals[-1]


@dataclass
class WalkJournal:
    """The records of one way of a pass, called `name`, through the stages."""

    folder: Path
    walk: str
    name: str
    snapshots: Snapshots
    is_writing: bool = True

    def recall(self, stage: int) -> Arrays | None:
        """What was remembered; None when nothing was, or it is damaged."""
        for file in self.folder.glob(f"{self.walk}.stage-{stage:04}-*.safetensors"):
            try:
                content = file.read_bytes()
                if _digest(content) == file.stem.rpartition("-")[2]:
                    return load(content)
            except (OSError, SafetensorError):
                pass
            _log.warning("%s: the calibration record %s is damaged; stage %d is done again", self.name, file, stage)
            file.unlink(missing_ok=True)
        return None

    def remember(self, stage: int, arrays: Arrays) -> None:
        """Keep what a pass decided. A disk that takes no more ends the journal with a warning."""
        if not self.is_writing:
            return
        content = save({name: np.asarray(array, order="C") for name, array in arrays.items()})
        final = self.folder / f"{self.walk}.stage-{stage:04}-{_digest(content)}.safetensors"
        part = final.with_suffix(".part")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            part.write_bytes(content)
            part.replace(final)
        except OSError as error:
            self.is_writing = False
            with suppress(OSError):
                part.unlink()
            _log.warning("%s: %s: %s; this build cannot be resumed from here on", self.name, final, error.strerror)


def code_digest() -> str:
    """SHA-256 over the code of passes and pipeline."""
    digest = sha256()
    for package in _CODE:
        spec = find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        for file in sorted(Path(spec.origin).parent.rglob("*.py")):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _digest(content: bytes) -> str:
    return sha256(content).hexdigest()[:16]


def _remove_stale(root: Path) -> None:
    oldest = time.time() - STALE_DAYS * 86_400
    for folder in root.iterdir() if root.is_dir() else ():
        if folder.stat().st_mtime < oldest:
            shutil.rmtree(folder, ignore_errors=True)
