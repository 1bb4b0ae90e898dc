"""Where calibration text comes from: a text file, a JSONL file, or a folder of both, as documents and one digest.

What a file is, its ending says: JSONL_ENDINGS hold one record a line (records.py), anything else is one document of
text. Of a folder every file with a known ending is read, in order of its path; hidden ones are left out.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ingot.errors import DataError
from ingot.pipeline.calibrate.records import Document, read_records

Kind = Literal["text", "jsonl", "folder"]

TEXT_ENDINGS = (".markdown", ".md", ".rst", ".text", ".txt")
JSONL_ENDINGS = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class Corpus:
    """Documents in order; sha256 over the file's bytes, or over names, sizes and bytes of a folder's files."""

    name: str
    kind: Kind
    sha256: str
    documents: Sequence[Document]


def read_corpus(path: Path, field: str | None = None) -> Corpus:
    """Read the text at `path`; `field` names the key of a JSONL record, None takes the usual ones.

    DataError when something cannot be read, is not UTF-8, is no such record, or when there is no text at all.
    """
    if not path.is_dir():
        raw, kind = _read(path), _kind(path)
        documents = list(_documents(path, path.name, raw, field))
        corpus = Corpus(path.name, kind, hashlib.sha256(raw).hexdigest(), documents)
    else:
        corpus = _read_folder(path, field)
    if not any(document.is_filled for document in corpus.documents):
        raise DataError(f"{path}: the calibration text is empty; give a file or folder with text in it")
    return corpus


def _read_folder(folder: Path, field: str | None) -> Corpus:
    digest, documents = hashlib.sha256(), list[Document]()
    for file in _usable(folder):
        name, raw = file.relative_to(folder).as_posix(), _read(file)
        digest.update(f"{name}\0{len(raw)}\0".encode() + raw)
        documents += _documents(file, name, raw, field)
    return Corpus(folder.name, "folder", digest.hexdigest(), documents)


def _usable(folder: Path) -> list[Path]:
    """The folder's text files by path; DataError that counts what is there instead when there is none."""
    shown = [path for path in folder.rglob("*") if not any(p.startswith(".") for p in path.relative_to(folder).parts)]
    files = sorted((path for path in shown if path.is_file()), key=lambda path: path.relative_to(folder).as_posix())
    usable = [file for file in files if file.suffix.lower() in TEXT_ENDINGS + JSONL_ENDINGS]
    if usable:
        return usable
    endings = Counter(file.suffix.lower() or "no ending" for file in files)
    found = ", ".join(f"{count} with {ending}" for ending, count in endings.most_common(5)) or "nothing"
    allowed = ", ".join(TEXT_ENDINGS + JSONL_ENDINGS)
    raise DataError(f"{folder}: the folder holds no calibration text; read are files with {allowed}; found: {found}")


def _kind(file: Path) -> Kind:
    return "jsonl" if file.suffix.lower() in JSONL_ENDINGS else "text"


def _documents(file: Path, name: str, raw: bytes, field: str | None) -> Iterator[Document]:
    text = _decode(file, raw)
    if _kind(file) == "jsonl":
        return read_records(name, text, field)
    return iter([Document(name, text=text)])


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(f"{file}: cannot read the calibration text: {error.strerror}; check the path") from error


def _decode(file: Path, raw: bytes) -> str:
    try:
        return raw.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise DataError(
            f"{file}:{line}: byte {error.start} is not UTF-8 ({error.reason}); convert the text to UTF-8"
        ) from error
