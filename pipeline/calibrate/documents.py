"""Reads calibration text as documents: a text file, a JSONL file, or a folder of both, with one digest.

A file whose name ends in one of JSONL_ENDINGS holds one record per line; any other file is one document of text. In a
folder, every file with a known ending is read, in order of its path; hidden ones are skipped. A record is a JSON
object:

    {"text": "..."}                                                     a document
    {"messages": [{"role": "user", "content": "..."}, ...]}             a conversation, for the chat template
    {"prompt": "...", "completion": "..."}                              both concatenated; with a chat template, a
                                                                        question and its answer

Other keys are ignored. The recipe's `calibration.field` names a different key; its value, a string or a list of
messages, decides between the first two.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ingot.errors import DataError, did_you_mean, one_of

Kind = Literal["text", "jsonl", "folder"]
Message = Mapping[str, object]

TEXT_ENDINGS = (".markdown", ".md", ".rst", ".text", ".txt")
JSONL_ENDINGS = (".jsonl", ".ndjson")
KEYS = ("text", "messages", "prompt", "completion")


@dataclass(frozen=True)
class Document:
    """A text, a conversation, or both for a prompt with its completion; `place` is file or file:line."""

    place: str
    text: str | None = None
    messages: Sequence[Message] | None = None

    @property
    def is_filled(self) -> bool:
        """Whether it contains more than white space."""
        return bool(self.messages) or bool(self.text and not self.text.isspace())


@dataclass(frozen=True)
class Corpus:
    """Documents in order; sha256 over the file's bytes, or over names, sizes and bytes of a folder's files."""

    name: str
    kind: Kind
    sha256: str
    documents: Sequence[Document]


def read_corpus(path: Path, field: str | None = None) -> Corpus:
    """Read the text at `path`; `field` names the key of a JSONL record, None accepts the default keys.

    DataError for a file that cannot be read or is not UTF-8, for an invalid record, and for a corpus without text.
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
    """The folder's text files by path; DataError, with a count of other files, when it has none."""
    shown = [path for path in folder.rglob("*") if not any(p.startswith(".") for p in path.relative_to(folder).parts)]
    files = sorted((path for path in shown if path.is_file()), key=lambda path: path.relative_to(folder).as_posix())
    usable = [file for file in files if file.suffix.lower() in TEXT_ENDINGS + JSONL_ENDINGS]
    if usable:
        return usable
    endings = Counter(file.suffix.lower() or "no ending" for file in files)
    found = ", ".join(f"{count} with {ending}" for ending, count in endings.most_common(5)) or "nothing"
    allowed = ", ".join(TEXT_ENDINGS + JSONL_ENDINGS)
    raise DataError(f"{folder}: the folder has no calibration text; files with {allowed} are read; found: {found}")


def is_jsonl(file: Path) -> bool:
    """Whether the file's name says that it holds a record per line."""
    return file.suffix.lower() in JSONL_ENDINGS


def _kind(file: Path) -> Kind:
    return "jsonl" if is_jsonl(file) else "text"


def _documents(file: Path, name: str, raw: bytes, field: str | None) -> Iterator[Document]:
    text = _decode(file, raw)
    if _kind(file) == "jsonl":
        return _read_records(name, text, field)
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


def _read_records(name: str, text: str, field: str | None = None) -> Iterator[Document]:
    """Documents of a JSONL file; blank lines are skipped. DataError with file and line for an invalid record."""
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _document(f"{name}:{number}", line, field)


def _document(place: str, line: str, field: str | None) -> Document:
    record = _parse(place, line)
    if field is not None:
        return _single(place, record, _present_key(place, record, (field,), "calibration.field names it"))
    if "prompt" in record or "completion" in record:
        return _pair(place, record)
    return _single(place, record, _present_key(place, record, KEYS, "set calibration.field to the key of the text"))


def _parse(place: str, line: str) -> Mapping[str, object]:
    try:
        record: object = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        where = f", column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        what = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
        raise DataError(f"{place}{where}: invalid JSON: {what}; a JSONL file has one object per line") from error
    if not isinstance(record, dict):
        raise DataError(f'{place}: a record is a JSON object such as {{"text": "..."}}; this is {_shown(record)}')
    return record


def _present_key(place: str, record: Mapping[str, object], wanted: Sequence[str], advice: str) -> str:
    """The first wanted key that the record has; DataError with its keys and the nearest one."""
    found = next((key for key in wanted if key in record), None)
    if found is None:
        near = next(filter(None, (did_you_mean(key, record) for key in wanted)), "")
        lacking = f"no key {wanted[0]!r}" if len(wanted) == 1 else f"none of the keys {', '.join(wanted)}"
        keys = one_of(record) or "none"
        raise DataError(f"{place}: the record has {lacking}; its keys: {keys}.{near} ({advice})")
    return found


def _single(place: str, record: Mapping[str, object], key: str) -> Document:
    """A text or a conversation, depending on the key's value."""
    value = record[key]
    if key != "messages" and isinstance(value, str):
        return Document(place, text=value)
    if key != "text" and isinstance(value, list):
        return Document(place, messages=_messages(place, key, value))
    allowed = {"text": "a string", "messages": "a list of messages"}.get(key, "a string or a list of messages")
    raise DataError(f"{place}: {key} is {_shown(value)}; it must be {allowed}")


def _pair(place: str, record: Mapping[str, object]) -> Document:
    """A prompt and its completion: two strings, or two lists of messages."""
    prompt, completion = (
        record[_present_key(place, record, (key,), "both are required")] for key in ("prompt", "completion")
    )
    if isinstance(prompt, str) and isinstance(completion, str):
        turns = ({"role": "user", "content": prompt}, {"role": "assistant", "content": completion})
        return Document(place, text=prompt + completion, messages=turns)
    if isinstance(prompt, list) and isinstance(completion, list):
        return Document(place, messages=_messages(place, "prompt and completion", [*prompt, *completion]))
    raise DataError(
        f"{place}: prompt is {_shown(prompt)}, completion is {_shown(completion)}; "
        "both must be strings, or both lists of messages"
    )


def _messages(place: str, key: str, values: Sequence[object]) -> Sequence[Message]:
    messages = [value for value in values if isinstance(value, dict) and isinstance(value.get("role"), str)]
    if len(messages) < len(values):
        wrong = next(value for value in values if value not in messages)
        example = '{"role": "user", "content": "..."}'
        raise DataError(f"{place}: {key} contains {_shown(wrong)}; a message is an object such as {example}")
    return messages


def _shown(value: object) -> str:
    """A value as JSON, truncated to 60 characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
