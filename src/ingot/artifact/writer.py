"""Seal an artifact: write to a staging folder, flush, rename, so that readers never see a partial artifact."""

import ctypes
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from ingot.artifact.contents import MANIFEST
from ingot.artifact.kv_geometry import KVGeometry
from ingot.artifact.manifest import EngineKind, FileEntry, GateOutcome, Manifest, ModelFacts, Program
from ingot.artifact.reader import evidence_digest, file_sha256, identity_digest, manifest_digest
from ingot.artifact.serving import ServingOptions
from ingot.errors import BuildError

_PREFIX = ".ingot-build-"
_REPLACED = "replaced"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def explain_full_disk(path: Path, what: str, num_bytes: int) -> Iterator[None]:
    """Turn a full disk, or a limit of file sizes, within the block into a BuildError with the bytes needed and free."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise BuildError(
                f"{path}: {num_bytes:,} bytes are needed for {what}, more than this process or file system "
                "allows for a file; raise the limit (ulimit -f unlimited), or name a folder on another file system"
            ) from error
        if error.errno not in _DISK_FULL:
            raise
        free = shutil.disk_usage(path.parent).free
        raise BuildError(
            f"{path}: no disk space for {what} ({error.strerror}): {num_bytes:,} bytes are needed, {free:,} are free; "
            "free some, or name another output folder"
        ) from error


class ArtifactWriter:
    """A staging folder that `seal` turns into the artifact.

        with ArtifactWriter(Path("artifacts/demo")) as writer:
            (writer.path / "program").mkdir()
            ...
            writer.describe(name=..., model=..., ...)
            writer.seal()

    Leaving the block without `seal` removes the staging folder; a new writer removes those of killed builds of the same
    target. If the target is a symbolic link, the link stays and the artifact replaces the folder it points to.
    """

    def __init__(self, target: Path) -> None:
        self._entries: dict[tuple[Path, int, int], FileEntry] = {}
        with _explained(target):
            target = target.resolve() if target.is_symlink() else target
            target.parent.mkdir(parents=True, exist_ok=True)
            _clear_stale(target)
            _refuse_foreign(target)
            prefix = f"{_PREFIX}{target.name}-{os.getpid()}-"
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
            try:
                self.path.chmod(0o755)
            except BaseException:
                _remove(self.path)
                raise
        self.target = target

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _remove(self.path)

    def describe(
        self,
        *,
        name: str,
        model: ModelFacts,
        kv: KVGeometry,
        target: str,
        program: Program,
        versions: Mapping[str, str],
        engine: EngineKind = "onnxruntime",
        max_batch_tokens: int = 512,
        serving: ServingOptions | None = None,
        gates: tuple[GateOutcome, ...] = (),
    ) -> Manifest:
        """Digest every file in the staging folder, write manifest.json and return it. May be called repeatedly."""
        with _explained(self.target):
            files = {
                file.relative_to(self.path).as_posix(): self._entry(file)
                for file in sorted(_files(self.path))
                if file != self.path / MANIFEST
            }
        draft = Manifest(
            name=name,
            identity="0" * 64,
            model=model,
            kv=kv,
            target=target,
            engine=engine,
            max_batch_tokens=max_batch_tokens,
            serving=serving,
            program=program,
            files=files,
            versions=dict(versions),
            gates=gates,
        )
        digests = {"identity": identity_digest(draft), "evidence": evidence_digest(draft)}
        manifest = draft.model_copy(update=digests)
        manifest = manifest.model_copy(update={"digest": manifest_digest(manifest.model_dump(mode="json"))})
        with _explained(self.target):
            (self.path / MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n")
        return manifest

    def _entry(self, file: Path) -> FileEntry:
        """Return size and digest; an unchanged file is not read again."""
        status = file.stat()
        key = (file, status.st_size, status.st_mtime_ns)
        if key not in self._entries:
            self._entries[key] = FileEntry(bytes=status.st_size, sha256=file_sha256(file))
        return self._entries[key]

    def seal(self) -> Path:
        """Flush everything to disk and move the staging folder to its final name, replacing an older artifact."""
        with _explained(self.target):
            files = list(_files(self.path))
            folders = {folder for file in files for folder in file.parents if folder.is_relative_to(self.path)}
            for path in (*files, *folders):
                flush_to_disk(path)
            aside = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{self.target.name}-{os.getpid()}-", dir=self.target.parent))
            try:
                self._replace_target(aside / _REPLACED)
                flush_to_disk(self.target.parent)
            finally:
                self._end_replacing(aside)
        return self.target

    def _end_replacing(self, aside: Path) -> None:
        """Put the older artifact back if the place is empty, and remove it if another is there.

        If neither can be done, it stays, and the next writer puts it back.
        """
        with suppress(OSError):  # fails where an artifact is there
            (aside / _REPLACED).rename(self.target)
        if os.path.exists(self.target):
            _remove(aside)
        else:
            with suppress(OSError):
                aside.rmdir()

    def _replace_target(self, aside: Path) -> None:
        """Rename to the final name; an older artifact there is moved aside first."""
        while True:
            if self.target.is_dir() and _exchange(self.path, self.target):
                _remove(self.path)
                return
            if self.target.exists() and not aside.exists():
                self.target.rename(aside)
            try:
                self.path.rename(self.target)
                return
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                _remove(aside)  # another build sealed here meanwhile


@contextmanager
def _explained(target: Path) -> Iterator[None]:
    """Turn an error of the system within the block into a BuildError."""
    try:
        yield
    except OSError as error:
        raise BuildError(f"{target}: cannot write there: {error.strerror}; choose another output folder") from error


def _files(folder: Path) -> Iterator[Path]:
    """All files in a folder. Raises OSError, which Path.rglob passes over: a file would be missing in the manifest."""

    def fail(error: OSError) -> None:
        raise error

    for path, _, names in os.walk(folder, onerror=fail):
        yield from (Path(path, name) for name in names)


def _remove(folder: Path) -> None:
    """Remove a folder, if it is there; a second try is for what the system refused once."""
    for _ in range(2):
        with suppress(OSError):  # rmtree of Python 3.11 raises some errors in spite of `ignore_errors`
            shutil.rmtree(folder, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders atomically with renameat2, so that a reader always finds one; False without that system call."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return call is not None and call(_AT_FDCWD, bytes(one), _AT_FDCWD, bytes(other), _RENAME_EXCHANGE) == 0


def flush_to_disk(path: Path) -> None:
    """Force a file or folder to disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _refuse_foreign(target: Path) -> None:
    if not target.exists() or (target / MANIFEST).is_file():
        return
    if target.is_dir() and not any(target.iterdir()):
        return
    raise BuildError(f"{target}: exists and is not an artifact, so it is not replaced; name another output folder")


def _clear_stale(target: Path) -> None:
    """Remove staging folders of killed builds; restore an artifact that was moved aside and not replaced."""
    staging = re.compile(rf"{re.escape(_PREFIX + target.name)}-(\d+)-[^-]+")
    for folder in list(target.parent.iterdir()):
        found = staging.fullmatch(folder.name)  # `demo` does not match `demo-int4-7-x`
        if found is None or Path(f"/proc/{found[1]}").exists():
            continue
        if (folder / _REPLACED / MANIFEST).is_file() and not target.exists():
            (folder / _REPLACED).rename(target)
        shutil.rmtree(folder, ignore_errors=True)
