"""Journals a build's calibration in the cache, so that the next build resumes where an interrupted one stopped.

    CACHE/calibration/KEY/run-0.stage-0007-DIGEST.safetensors      what a pass recorded for one stage
    CACHE/calibration/KEY/run-0.step-0012.activations/             snapshot of the activations before a step: the newest

KEY is a digest of everything that determines the bits of a pass: the checkpoint, the passes up to it with their
options, every calibration token, the versions of the tools and the code of the passes. So a record is either valid or
not found. Files are written under another name and renamed; a damaged one is ignored with a warning. Activations
without a snapshot are recomputed, bit for bit.

    with resumable():
        ...                                     # open_journal() returns a journal

A build that succeeds removes its records; one that fails or is interrupted leaves them, for at most STALE_DAYS. On a
full disk the build continues without a journal.
"""

import json
import logging
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from ingot.artifact.safetensors import read_header
from ingot.errors import CheckpointError
from ingot.passes.calibration import Arrays
from ingot.passes.manager import passes_so_far
from ingot.passes.registry import third_party_modules
from ingot.pipeline.calibrate.activations import SNAPSHOT_BYTES, SNAPSHOT_SECONDS, Snapshots
from ingot.pipeline.calibrate.data import CalibrationData
from ingot.pipeline.checkpoint.safetensors_writer import arrays_as_safetensors
from ingot.settings import cache_dir

STALE_DAYS = 14
_CODE = ("ingot.passes", "ingot.pipeline")

_log = logging.getLogger("ingot.pipeline")


@dataclass
class _Resumable:
    """The block of a `resumable`, and the journals opened in it."""

    resume: bool
    journals: "list[BuildJournal]" = field(default_factory=list)


_block: ContextVar[_Resumable | None] = ContextVar("ingot.pipeline.journal", default=None)


@contextmanager
def resumable(resume: bool = True) -> Iterator[None]:
    """Journal every calibration within the block, and remove the records when it ends without an error.

    `resume=False` discards the records of an earlier build and starts over.
    """
    block = _Resumable(resume)
    token = _block.set(block)
    try:
        yield
    finally:
        _block.reset(token)
    for journal in block.journals:
        journal.remove()


def open_journal(
    checkpoint_digest: Callable[[], str], data: CalibrationData, tools: Mapping[str, str]
) -> "BuildJournal | None":
    """Open the journal of a build of this checkpoint on this data; None outside of `resumable`."""
    block = _block.get()
    if block is None:
        return None
    root = cache_dir() / "calibration"
    block.journals.append(BuildJournal.open(root, checkpoint_digest(), data, tools, block.resume))
    return block.journals[-1]


@dataclass
class BuildJournal:
    """The records of one build. `root` is the folder of all journals; `build` is the part that its keys share.

    resume              whether to use the records of an earlier build; otherwise they are removed
    snapshot_seconds    minimum time between two snapshots
    snapshot_bytes      maximum size of a snapshot
    """

    root: Path
    build: str
    resume: bool = True
    snapshot_seconds: float = SNAPSHOT_SECONDS
    snapshot_bytes: int = SNAPSHOT_BYTES
    _num_runs: Counter[Path] = field(default_factory=Counter)

    @classmethod
    def open(
        cls, root: Path, checkpoint_digest: str, data: CalibrationData, tools: Mapping[str, str], resume: bool = True
    ) -> "BuildJournal":
        """Open the journal of a build of this checkpoint on this data, and remove stale journals in `root`."""
        _remove_stale(root)
        parts = [checkpoint_digest, data.digest(), asdict(data.facts), dict(tools), code_digest()]
        return cls(root, sha256(json.dumps(parts).encode()).hexdigest(), resume)

    def begin_run(self) -> "RunJournal | None":
        """The records of the next run of the current pass over the model; None outside of a PassManager."""
        history = passes_so_far()
        if not history:
            return None
        key = sha256(json.dumps([self.build, history]).encode()).hexdigest()[:32]
        folder = self.root / key
        if not self.resume and not self._num_runs[folder]:
            shutil.rmtree(folder, ignore_errors=True)
        run = f"run-{self._num_runs[folder]}"
        self._num_runs[folder] += 1
        name = re.split("[^a-z0-9-]", history[-1])[0]
        return RunJournal(folder, run, name, Snapshots(folder, run, self.snapshot_seconds, self.snapshot_bytes))

    def remove(self) -> None:
        """Remove the records of a build that succeeded."""
        for folder in self._num_runs:
            shutil.rmtree(folder, ignore_errors=True)


@dataclass
class RunJournal:
    """The records of one run of the pass `name` over the stages."""

    folder: Path
    run: str
    name: str
    snapshots: Snapshots
    is_writing: bool = True

    def load(self, stage: int) -> Arrays | None:
        """The saved results of a stage; None if nothing was saved or it is damaged."""
        for file in self.folder.glob(f"{self.run}.stage-{stage:04}-*.safetensors"):
            try:
                if _digest(file.read_bytes()) == file.stem.rpartition("-")[2]:
                    return {name: stored.array() for name, stored in read_header(file).items()}
            except (OSError, CheckpointError):
                pass
            _log.warning("%s: the calibration record %s is damaged; stage %d is computed again", self.name, file, stage)
            file.unlink(missing_ok=True)
        return None

    def save(self, stage: int, arrays: Arrays) -> None:
        """Save the results of a stage. When the disk refuses, warn and save nothing more."""
        if not self.is_writing:
            return
        content = arrays_as_safetensors({name: np.asarray(array) for name, array in arrays.items()})
        final = self.folder / f"{self.run}.stage-{stage:04}-{_digest(content)}.safetensors"
        part = final.with_suffix(".part")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            part.write_bytes(content)
            part.replace(final)
        except OSError as error:
            self.is_writing = self.snapshots.is_writing = False
            with suppress(OSError):
                part.unlink()
            _log.warning(
                "%s: %s: %s; the build continues, but cannot be resumed after this point",
                self.name,
                final,
                error.strerror,
            )


def code_digest(packages: Iterable[str] = _CODE) -> str:
    """Return the SHA-256 of the code of packages (default: passes and pipeline) and of other distributions' passes."""
    return sha256(_own_code(tuple(packages)) + _digest_of(third_party_modules())).hexdigest()


@cache
def _own_code(packages: tuple[str, ...]) -> bytes:
    """The digest of Ingot's own code, read once: a process runs what it has imported."""
    return _digest_of(packages)


def _digest_of(modules: Iterable[str]) -> bytes:
    digest = sha256()
    for module in modules:
        for file in _source_files(module):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.digest()


def _source_files(module: str) -> list[Path]:
    """The files of a package with its subpackages, or of a single module; none where it is not installed."""
    spec = find_spec(module)
    if spec is None:
        return []
    if folders := spec.submodule_search_locations:
        return sorted(file for folder in folders for file in Path(folder).rglob("*.py"))
    return [Path(spec.origin)] if spec.origin else []


def _digest(content: bytes) -> str:
    return sha256(content).hexdigest()[:16]


def _remove_stale(root: Path) -> None:
    oldest = time.time() - STALE_DAYS * 86_400
    for folder in root.iterdir() if root.is_dir() else ():
        if folder.stat().st_mtime < oldest:
            shutil.rmtree(folder, ignore_errors=True)
