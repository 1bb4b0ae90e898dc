"""Keep the files of an artifact open, so that what is served can be loaded again after its folder was replaced.

A build into the same folder, `rm -r` and a copy leave other files there, and a reload may refuse them. On Linux a file
that is open can be opened once more by its number below /proc, also where it has no name any more.
"""

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable
from pathlib import Path

from ingot.artifact.reader import Artifact, file_sha256, reopen_artifact
from ingot.errors import ArtifactError


class HeldArtifact:
    """An open artifact and its open files; they are closed with this object."""

    def __init__(self, artifact: Artifact) -> None:
        """Open the files. Where that fails, as with too few descriptors, only its path is left to open it again."""
        self.artifact = artifact
        self._files: dict[str, int] = {}
        self._folder: Path | None = None
        try:
            for name in artifact.manifest.files:
                self._files[name] = os.open(artifact.path / name, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            _close(self._files.values())
            self._files = {}
        weakref.finalize(self, _close, tuple(self._files.values()))

    def reopened(self) -> Artifact:
        """The artifact: in its folder, or else by its open files. ArtifactError where these were written to, too."""
        try:
            return reopen_artifact(self.artifact)
        except ArtifactError:
            if not self._are_whole():
                raise
        return Artifact(self._linked(), self.artifact.manifest)

    def by_open_files(self) -> Artifact:
        """The artifact by its open files, without a look at what its folder has by now."""
        return Artifact(self._linked(), self.artifact.manifest) if self._files else self.artifact

    def _are_whole(self) -> bool:
        try:
            return bool(self._files) and all(
                file_sha256(_path(self._files[name])) == entry.sha256
                for name, entry in self.artifact.manifest.files.items()
            )
        except OSError:
            return False

    def _linked(self) -> Path:
        """A folder with links to the open files, which the engine's process can follow."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="ingot-served-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
            for name, number in self._files.items():
                link = self._folder / name
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(_path(number))
        return self._folder


def _path(number: int) -> Path:
    return Path(f"/proc/{os.getpid()}/fd/{number}")


def _close(numbers: Iterable[int]) -> None:
    for number in numbers:
        os.close(number)
