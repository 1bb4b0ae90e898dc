"""The file that keeps a history of outputs between engines: one for each artifact, in a folder of the caller's.

    header    magic, version, SHA-256 of the artifact's identity, number of outputs, number of tokens
    outputs   for each: the root of its scope (artifact, engine, cache salt, adapter, hashed), and its number of tokens
    tokens    int32, those of one output after those of the other
    checksum  SHA-256 of all of this

The texts are other people's, so the file is readable by its owner alone; and a salt is in it as a hash. It is written
when the engine is closed, to another name first; what another engine has written since is kept, too, as far as the
window reaches. What cannot be read costs drafts, never the engine: the log says why.
"""

import hashlib
import logging
import os
import secrets
import stat
import struct
import time
from array import array
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ingot.errors import shown_path
from ingot.runtime.kv.keys import PrefixScope
from ingot.runtime.speculation.output_history import OutputHistory

_log = logging.getLogger(__name__)

_MAGIC, _VERSION = b"ingot-hs", 1
_HEADER = struct.Struct("<8sI32sIQ")
_OUTPUT = struct.Struct("<32sI")
_CHECKSUM_BYTES = 32
# A window of 2^24 tokens has less.
_MOST_BYTES = 1 << 28
_ABANDONED_SECONDS = 3600  # after which a file that was not renamed is a dead process's
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # O_NONBLOCK: a named pipe does not block open
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


_Output = tuple[bytes, NDArray[np.int32]]
"""The root of a scope, and tokens [n]."""


class _UnusableError(Exception):
    """The file cannot be used; the message says why."""


class HistoryFile:
    """The history of one artifact in a folder.

    identity     of the artifact
    vocab_size   of its model
    """

    def __init__(self, folder: str | os.PathLike[str], *, identity: str, vocab_size: int) -> None:
        self._folder = Path(folder)
        self._identity = hashlib.sha256(identity.encode()).digest()
        self._vocab_size = vocab_size
        self._is_newer = False  # written by a newer version, which keeps it
        self._seen: tuple[int, int] | None = None  # inode and time of change of the file that was loaded last
        self.path = self._folder / f"suffix-{self._identity.hex()[:16]}.bin"

    def load(self, history: OutputHistory) -> None:
        """Add the outputs of the file. One that is missing adds none, and neither does one that cannot be used."""
        try:
            self._parse(self._read(), history)
        except FileNotFoundError:
            return
        except (OSError, _UnusableError) as error:
            _log.warning("%s: suffix decoding begins without a history: %s", shown_path(self.path), error)
            return
        _log.info("suffix decoding begins with %d tokens of %s", len(history), shown_path(self.path))

    def save(self, history: OutputHistory) -> None:
        """Replace the file by what is kept now; it stays as it is without any, or if a newer version wrote it."""
        outputs = [*history.outputs()]
        try:
            outputs = self._newest([*self._of_others(history.window), *outputs], history.window)
            if outputs and not self._is_newer:
                self._write(self._content(outputs))
        except OSError as error:
            _log.warning("%s: the history of suffix decoding was not kept: %s", shown_path(self.path), error)

    def _of_others(self, window: int) -> list[_Output]:
        """The outputs that other engines have written since this one read the file."""
        if self._is_newer or not self.path.exists() or _state(self.path.stat()) == self._seen:
            return []
        history = OutputHistory(window)
        self.load(history)
        return [*history.outputs()]

    def _newest(self, outputs: Sequence[_Output], window: int) -> list[_Output]:
        """The last outputs that a window has room for, each once."""
        kept: dict[tuple[bytes, bytes], _Output] = {}
        for root, tokens in reversed(outputs):
            window -= len(tokens) + 1
            if window < 0:
                break
            kept.setdefault((root, tokens.tobytes()), (root, tokens))
        return [*kept.values()][::-1]

    def _read(self) -> bytes:
        file = os.open(self.path, _READ)
        with os.fdopen(file, "rb") as opened:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                raise _UnusableError("it is not a file of this user")
            self._seen = _state(status)
            if status.st_size > _MOST_BYTES:
                raise _UnusableError(f"it has {status.st_size} bytes, and at most {_MOST_BYTES} are read")
            return opened.read(_MOST_BYTES)

    def _parse(self, content: bytes, history: OutputHistory) -> None:
        body = memoryview(content)[:-_CHECKSUM_BYTES]
        if len(body) < _HEADER.size:
            raise _UnusableError("it is cut short")
        magic, version, identity, num_outputs, num_tokens = _HEADER.unpack_from(body)
        if magic != _MAGIC:
            raise _UnusableError("it is not a history")
        if version != _VERSION:
            self._is_newer = version > _VERSION
            kept = ", and stays as it is" if self._is_newer else ""
            raise _UnusableError(f"it has version {version}, this engine reads version {_VERSION}{kept}")
        if hashlib.sha256(body).digest() != content[-_CHECKSUM_BYTES:]:
            raise _UnusableError("it is damaged, its checksum differs")
        if identity != self._identity:
            raise _UnusableError("it is of another artifact")
        start = _HEADER.size + num_outputs * _OUTPUT.size
        if len(body) != start + 4 * num_tokens:
            raise _UnusableError("it is damaged, its size contradicts its numbers")
        outputs = [*_OUTPUT.iter_unpack(body[_HEADER.size : start])]
        tokens = np.frombuffer(body, "<i4", offset=start)
        if sum(count for _, count in outputs) != num_tokens or not self._are_tokens(tokens):
            raise _UnusableError("it is damaged, its tokens are not the model's")
        for root, count in outputs:
            history.add(array("q", tokens[:count].tolist()), PrefixScope(root))
            tokens = tokens[count:]
        history.settle(num_tokens)

    def _are_tokens(self, tokens: NDArray[np.int32]) -> bool:
        return not len(tokens) or bool(tokens.min() >= 0 and tokens.max() < self._vocab_size)

    def _content(self, outputs: Sequence[_Output]) -> bytes:
        counts = [len(tokens) for _, tokens in outputs]
        parts = [_HEADER.pack(_MAGIC, _VERSION, self._identity, len(outputs), sum(counts))]
        parts += [_OUTPUT.pack(root, count) for (root, _), count in zip(outputs, counts, strict=True)]
        parts += [tokens.astype("<i4").tobytes() for _, tokens in outputs]
        body = b"".join(parts)
        return body + hashlib.sha256(body).digest()

    def _write(self, content: bytes) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._remove_abandoned()
        temporary = self.path.with_suffix(f".{secrets.token_hex(8)}.tmp")
        file = os.open(temporary, _NEW, 0o600)
        try:
            with os.fdopen(file, "wb") as opened:
                opened.write(content)
                opened.flush()
                os.fsync(file)
            temporary.replace(self.path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise

    def _remove_abandoned(self) -> None:
        """Delete what processes that died while they wrote have left."""
        for each in self._folder.glob(f"{self.path.stem}.*.tmp"):
            with suppress(OSError):
                if time.time() - each.lstat().st_mtime > _ABANDONED_SECONDS:
                    each.unlink()


def _state(status: os.stat_result) -> tuple[int, int]:
    return status.st_ino, status.st_mtime_ns
