"""Comparison of an artifact's folder with the files that its manifest lists.

A program reads whatever it finds: a chat template that was dropped into the folder would be used although no digest
covers it. So a folder holds the manifest and the files that it lists, and nothing else: no further file or folder, and
no symbolic link, whose target can change after it was verified and does not travel with the folder.
"""

import os
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from ingot.errors import ArtifactError, shown

MANIFEST = "manifest.json"
_MAX_NAME = 1024  # characters of a path
_MAX_PART = 255  # bytes of a name on Linux
_SHOWN = 3

# Names of unlisted files, and what to do about them; the first row that matches.
_ADVICE = (
    (
        ("chat_template.jinja",),
        "it would change every prompt; a chat template is sealed with the artifact: build again with `--chat-template "
        "FILE` (set `chat_template` in the recipe)",
    ),
    (
        (".DS_Store", "._*", ".AppleDouble", "Thumbs.db", "desktop.ini", ".directory"),
        "a file manager made it: delete it",
    ),
    (("*~", "*.swp", "*.swo", ".#*", "#*#", "*.bak", "*.orig", "*.tmp", "*.old"), "an editor left it: delete it"),
    ((".git*", ".cache", ".gitattributes", "README.md"), "it came with a download or from git: delete it"),
    (("*.rejected",), "it is the evidence of a build that a gate rejected: move it out of the folder"),
    ((".nfs*",), "a process has a deleted file open: end the process"),
)
_OTHERWISE = "delete it, or build the artifact again"


@dataclass(frozen=True)
class FileStamp:
    """Facts that show whether a file was replaced or written to: its place on the disk, size and times."""

    device: int
    inode: int
    bytes: int
    modified: int
    changed: int

    @classmethod
    def of(cls, file: Path) -> "FileStamp":
        """Take the stamp of a file; a link is not followed."""
        found = file.lstat()
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def check_names(folder: Path, names: Collection[str]) -> None:
    """Raise ArtifactError for a listed path that leaves the folder or is not a possible path of a file."""
    folders = _folders(names)
    for name in names:
        pure, parts = PurePosixPath(name), name.split("/")
        if pure.is_absolute() or ".." in parts or "\\" in name:
            raise ArtifactError(f"{folder}: the manifest's path {shown(name)} leaves the artifact's folder; refused")
        if not _is_file_name(name) or name == MANIFEST or name in folders:
            raise ArtifactError(
                f"{folder}: the manifest lists {shown(name)}, which cannot be a file of an artifact; build it again"
            )


def check_contents(folder: Path, names: Collection[str]) -> None:
    """Raise ArtifactError unless the folder holds exactly MANIFEST, regular files of these names, and their folders."""
    unlisted = sorted(_unlisted(folder, "", {*names, MANIFEST}, _folders(names)))
    if unlisted:
        more = f" and {len(unlisted) - _SHOWN} more" if len(unlisted) > _SHOWN else ""
        text = ", ".join(shown(name) for name in unlisted[:_SHOWN]) + more
        raise ArtifactError(f"{folder}: holds {text}, which the manifest does not list; {_advice(unlisted[0])}")
    missing = sorted(name for name in names if not os.path.lexists(folder / name))
    if missing:
        raise ArtifactError(
            f"{folder}: the file {shown(missing[0])} is missing; build the artifact again or copy it whole"
        )


def _folders(names: Collection[str]) -> set[str]:
    return {parent.as_posix() for name in names for parent in PurePosixPath(name).parents}


def _is_file_name(name: str) -> bool:
    parts = name.split("/")
    try:
        fits = all(0 < len(part.encode()) <= _MAX_PART for part in parts) and len(name) <= _MAX_NAME
    except UnicodeEncodeError:  # half a surrogate pair
        return False
    return fits and "." not in parts and "\0" not in name


def _unlisted(folder: Path, prefix: str, files: Collection[str], folders: Collection[str]) -> Iterator[str]:
    """Yield the paths below `prefix` that are in neither set; ArtifactError for a listed path of another kind."""
    try:
        entries = list(os.scandir(folder / prefix))
    except OSError as error:
        raise ArtifactError(f"{folder / prefix}: cannot be read: {error.strerror}; check its permissions") from error
    for entry in entries:
        name = f"{prefix}{entry.name}"
        if name not in files and name not in folders:
            yield name
            continue
        mode = entry.stat(follow_symlinks=False).st_mode
        if stat.S_ISLNK(mode):
            raise ArtifactError(
                f"{folder}: {name} is a symbolic link, whose target no digest protects; copy the artifact with "
                "its files (cp -RL)"
            )
        if stat.S_ISDIR(mode) and name in folders:
            yield from _unlisted(folder, f"{name}/", files, folders)
        elif not (stat.S_ISREG(mode) and name in files):
            found, wanted = ("a folder", "a file") if stat.S_ISDIR(mode) else ("not a regular file", "one")
            raise ArtifactError(f"{folder}: {name} is {found}, but the manifest needs {wanted}; copy it again")


def _advice(name: str) -> str:
    own = PurePosixPath(name).name
    return next((text for patterns, text in _ADVICE if any(fnmatchcase(own, one) for one in patterns)), _OTHERWISE)
