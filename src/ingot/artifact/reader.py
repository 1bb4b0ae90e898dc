"""Open an artifact; all files are verified before any is used.

Every reader takes its paths from `Artifact.file`, which refuses what the manifest does not list, and files that were
replaced or written to since they were verified. Programs map large files into memory: a process that may write to the
folder can still change a file while a program uses it, so keep artifacts where only their owner writes.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ingot.artifact.contents import MANIFEST, FileStamp, check_contents, check_names
from ingot.artifact.json_text import first_problem, parse_json, read_limited
from ingot.artifact.manifest import SCHEMA_VERSION, Manifest
from ingot.artifact.program_checks import check_program
from ingot.errors import ArtifactError, UsageError, shown

_CHUNK_BYTES = 1 << 20
_SHOWN_DIGITS = 12


@dataclass(frozen=True)
class Artifact:
    """A verified artifact: its folder and its manifest. stamps: of its files, from before they were verified."""

    path: Path
    manifest: Manifest
    stamps: Mapping[str, FileStamp] = field(default_factory=dict, repr=False)

    def file(self, name: str) -> Path:
        """Return the path of a listed file; ArtifactError for any other name, and for a file that has changed."""
        if name not in self.manifest.files:
            raise ArtifactError(f"{self.path}: the manifest lists no file {shown(name)}")
        file = self.path / name
        if name in self.stamps and _stamp(file) != self.stamps[name]:
            raise ArtifactError(f"{file}: was replaced or written to after it was verified; open the artifact again")
        return file

    def files_below(self, folder: str) -> dict[str, Path]:
        """Return the listed files in `folder`, by their names in it."""
        prefix = f"{folder}/"
        return {name.removeprefix(prefix): self.file(name) for name in self.manifest.files if name.startswith(prefix)}

    def has(self, name: str) -> bool:
        """Whether the manifest lists the file."""
        return name in self.manifest.files

    def json_object(self, name: str) -> dict[str, Any]:
        """Return the JSON object in a listed file; ArtifactError when it holds something else."""
        file = self.file(name)
        try:
            value = parse_json(read_limited(file))
        except (OSError, ValueError) as error:
            raise ArtifactError(f"{file}: is not JSON ({error}); build the artifact again") from error
        if not isinstance(value, dict):
            kind = type(value).__name__
            raise ArtifactError(f"{file}: is a JSON {kind}, it must be an object; build the artifact again")
        return value

    @property
    def total_bytes(self) -> int:
        """Size of all listed files."""
        return sum(entry.bytes for entry in self.manifest.files.values())


def open_artifact(path: Path | str, verify: bool = True) -> Artifact:
    """Open the artifact in the folder `path`.

    The manifest, and names and sizes of all files are always checked: the folder must hold the listed files and nothing
    else. With `verify`, SHA-256 of the files and the manifest's own digests are checked too.
    Raises ArtifactError with the file and its problem.
    """
    if not isinstance(path, str | os.PathLike):
        raise UsageError(f"the artifact is {path!r}; it must be the path of its folder, or an Artifact that is open")
    folder = Path(path)
    manifest, digest = _read_manifest(folder)
    check_names(folder, manifest.files)
    _check_program(folder, manifest)
    check_contents(folder, manifest.files)
    stamps = {name: _stamp(folder / name) for name in manifest.files}
    for name, entry in sorted(manifest.files.items()):
        file, size = folder / name, stamps[name].bytes
        if size != entry.bytes:
            what = "the copy is incomplete" if size < entry.bytes else "the file was changed or damaged"
            raise ArtifactError(f"{file}: has {size} bytes, the manifest says {entry.bytes}; {what}")
        if verify and _sha256(file) != entry.sha256:
            raise ArtifactError(f"{file}: its SHA-256 is not the manifest's; the file was changed or damaged")
    if verify:
        _check_identity(folder, manifest, digest)
    return Artifact(folder, manifest, stamps)


def reopen_artifact(artifact: Artifact) -> Artifact:
    """Open an artifact again that was open before: the same one, whatever is in its folder by now.

    Files that were not touched since then are not read again. Raises ArtifactError when the folder has another artifact
    or a damaged one.
    """
    try:
        if all(FileStamp.of(artifact.path / name) == stamp for name, stamp in artifact.stamps.items()):
            return artifact
    except OSError:
        pass  # `open_artifact` says which file it is
    found = open_artifact(artifact.path)
    if found.manifest.identity != artifact.manifest.identity:
        raise ArtifactError(
            f"{artifact.path}: has the artifact {found.manifest.identity[:_SHOWN_DIGITS]} now, and"
            f" {artifact.manifest.identity[:_SHOWN_DIGITS]} was open"
        )
    return found


def _check_program(folder: Path, manifest: Manifest) -> None:
    try:
        check_program(manifest)
    except ArtifactError as error:
        raise ArtifactError(f"{folder / MANIFEST}: {error}; build the artifact again") from error


def _stamp(file: Path) -> FileStamp:
    try:
        return FileStamp.of(file)
    except OSError as error:
        raise ArtifactError(f"{file}: cannot be read: {error.strerror}; copy the artifact again") from error


def _sha256(file: Path) -> str:
    try:
        return file_sha256(file)
    except OSError as error:
        raise ArtifactError(f"{file}: cannot be read: {error.strerror}; copy the artifact again") from error


def file_sha256(file: Path) -> str:
    """Compute the SHA-256 of a file, reading it in chunks."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def identity_digest(manifest: Manifest) -> str:
    """Digest model, program, tokenizer, recipe and their files, but not the evidence."""
    fields = manifest.model_dump(mode="json", include={"schema_version", "model", "kv", "target", "engine", "program"})
    fields["files"] = {name: e.sha256 for name, e in manifest.files.items() if not is_evidence(name)}
    return _digest(fields)


def evidence_digest(manifest: Manifest) -> str | None:
    """Digest the files below evidence/; None without any."""
    files = {name: entry.sha256 for name, entry in manifest.files.items() if is_evidence(name)}
    return _digest(files) if files else None


def manifest_digest(values: Mapping[str, Any]) -> str:
    """Digest the JSON values of a whole manifest, names, versions and verdicts included, without its own `digest`.

    The file's values count, not the defaults of keys that it does not have: a later version may add keys.
    """
    return _digest({key: value for key, value in values.items() if key != "digest"})


def is_evidence(name: str) -> bool:
    """Whether a file is evidence, which the identity does not cover."""
    return name.startswith("evidence/")


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _read_manifest(folder: Path) -> tuple[Manifest, str]:
    """Return the manifest, and the digest of what the file states."""
    file = folder / MANIFEST
    try:
        if not folder.is_dir():
            raise ArtifactError(f"{folder}: no such folder; an artifact is a folder that holds {MANIFEST}")
        if not file.is_file():
            raise ArtifactError(f"{folder}: holds no {MANIFEST}, so it is not an artifact; {_other_folder(folder)}")
        raw = parse_json(read_limited(file))
    except OSError as error:
        raise ArtifactError(f"{file}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ArtifactError(f"{file}: is not JSON: {error}; build the artifact again, or copy it whole") from error
    if not isinstance(raw, dict):
        kind = type(raw).__name__
        raise ArtifactError(f"{file}: the file: is a JSON {kind}, it must be an object; build the artifact again")
    _check_version(file, raw)
    fields = {key: value for key, value in raw.items() if key != "verdict"}  # derived from gates and files
    try:
        manifest = Manifest.model_validate_json(json.dumps(fields), strict=True)
    except ValidationError as error:
        raise ArtifactError(f"{file}: {first_problem(error)}; build the artifact again") from error
    stated = raw.get("verdict", manifest.verdict)  # manifests of older versions state none
    if stated != manifest.verdict:
        raise ArtifactError(
            f"{file}: verdict is {shown(stated)}, but gates and files say {manifest.verdict!r}; build it again"
        )
    return manifest, manifest_digest(raw)


def _check_version(file: Path, raw: Mapping[str, Any]) -> None:
    version = raw.get("schema_version")
    if type(version) is int and version > SCHEMA_VERSION:
        raise ArtifactError(
            f"{file}: schema_version is {shown(version)}, this Ingot reads up to {SCHEMA_VERSION}; update Ingot to "
            "open it"
        )


def _other_folder(folder: Path) -> str:
    """Return advice on a folder that is not an artifact."""
    if (folder / "evidence").is_dir():
        return "it is the evidence of a build that a gate rejected; see evidence/report.md, and build again"
    return "make one with `ingot build`"


def _check_identity(folder: Path, manifest: Manifest, digest: str) -> None:
    if identity_digest(manifest) != manifest.identity:
        raise ArtifactError(f"{folder / MANIFEST}: the identity digest does not match what the manifest lists")
    if evidence_digest(manifest) != manifest.evidence:
        raise ArtifactError(f"{folder / MANIFEST}: the evidence digest does not match the files in evidence/")
    if digest != manifest.digest:
        raise ArtifactError(f"{folder / MANIFEST}: its own digest does not match it; the file was changed or damaged")
