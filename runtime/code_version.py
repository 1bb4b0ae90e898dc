"""Version of the Python code that computes keys and values, for the keys of blocks that outlive a process.

The version of the package alone would not do: a development checkout keeps one for long while its code changes.
"""

from functools import cache
from hashlib import sha256
from pathlib import Path

from ingot.version import __version__

_SHOWN = 16  # hexadecimal digits of a digest


@cache
def code_version(folder: Path) -> str:
    """Version of Ingot, and a digest of the Python sources in a folder: those of an executor, some 30 files."""
    digest = sha256()
    for file in sorted(folder.rglob("*.py")):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(folder).as_posix()}\0{len(content)}\0".encode() + content)
    return f"ingot {__version__} {digest.hexdigest()[:_SHOWN]}"
