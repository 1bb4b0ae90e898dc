"""A new folder that appears whole or not at all: written under another name beside its place, flushed, renamed."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ingot.errors import BuildError, UsageError


@contextmanager
def staging_folder(target: Path) -> Iterator[Path]:
    """Give a temporary folder that becomes `target` when the block ends without an error, and disappears otherwise.

    UsageError when `target` is there and not empty; BuildError when nothing can be written there.
    """
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UsageError(f"{target}: exists already, and is not replaced; name a new folder")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".ingot-export-{target.name}-", dir=target.parent))
    except OSError as error:
        raise BuildError(f"{target}: cannot write there: {error.strerror}; choose another output folder") from error
    try:
        yield staging
        for file in [*staging.iterdir(), staging]:
            _flush(file)
        staging.chmod(0o755)
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
