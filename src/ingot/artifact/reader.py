"""Open an artifact; all files are verified before any is used."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import ValidationError

from ingot.artifact.manifest import SCHEMA_VERSION, Manifest
from ingot.errors import ArtifactError

MANIFEST = "manifest.json"
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Artifact:
    """A verified artifact: its folder and its manifest."""

    path: Path
    manifest: Manifest

    def file(self, name: str) -> Path:
        """Return the path of a listed file; ArtifactError for any other name."""
        if name not in self.manifest.files:
            raise ArtifactError(f"{self.path}: the manifest lists no file {name!r}")
        return self.path / name

    def has(self, name: str) -> bool:
        """Whether the manifest lists the file."""
        return name in self.manifest.files

    @property
    def total_bytes(self) -> int:
        """Size of all listed files."""
        return sum(entry.bytes for entry in self.manifest.files.values())


def open_artifact(path: Path | str, verify: bool = True) -> Artifact:
    """Open the artifact in the folder `path`.

    With `verify`, sizes and SHA-256 of all files and the manifest's own digests are checked; without, only sizes.
    Raises ArtifactError with the file and its problem.
    """
    folder = Path(path)
    manifest, digest = _read_manifest(folder)
    for name, entry in sorted(manifest.files.items()):
        _refuse_escape(folder, name)
        file = folder / name
        if not file.is_file():
            raise ArtifactError(f"{folder}: the file {name} is missing; build the artifact again or copy it whole")
        size = file.stat().st_size
        if size != entry.bytes:
            raise ArtifactError(f"{file}: has {size} bytes, the manifest says {entry.bytes}; the copy is incomplete")
        if verify and file_sha256(file) != entry.sha256:
            raise ArtifactError(f"{file}: its SHA-256 is not the manifest's; the file was changed or damaged")
    if verify:
        _check_identity(folder, manifest, digest)
    return Artifact(folder, manifest)


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
    if not folder.is_dir():
        raise ArtifactError(f"{folder}: no such folder; an artifact is a folder that holds {MANIFEST}")
    if not file.is_file():
        raise ArtifactError(f"{folder}: holds no {MANIFEST}, so it is not an artifact; make one with `ingot build`")
    try:
        raw = json.loads(file.read_bytes())
    except ValueError as error:
        raise ArtifactError(f"{file}: is not JSON: {error}") from error
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise ArtifactError(
            f"{file}: schema_version is {version}, this Ingot reads up to {SCHEMA_VERSION}; update Ingot to open it"
        )
    try:
        return Manifest.model_validate(raw), manifest_digest(raw)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise ArtifactError(f"{file}: {place}: {first['msg']}; build the artifact again") from error


def _refuse_escape(folder: Path, name: str) -> None:
    pure = PurePosixPath(name)
    inside = not pure.is_absolute() and ".." not in pure.parts and "\\" not in name
    if not inside or not (folder / name).resolve().is_relative_to(folder.resolve()):
        raise ArtifactError(f"{folder}: the manifest's path {name!r} leaves the artifact's folder; refused")


def _check_identity(folder: Path, manifest: Manifest, digest: str) -> None:
    if identity_digest(manifest) != manifest.identity:
        raise ArtifactError(f"{folder / MANIFEST}: the identity digest does not match what the manifest lists")
    if evidence_digest(manifest) != manifest.evidence:
        raise ArtifactError(f"{folder / MANIFEST}: the evidence digest does not match the files in evidence/")
    if digest != manifest.digest:
        raise ArtifactError(f"{folder / MANIFEST}: its own digest does not match it; the file was changed or damaged")
