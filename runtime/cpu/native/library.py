"""The compiled library of the CPU engine, ingot_cpu.so: attention, and the walk of launch programs with its kernels.

It is a plain shared object, not a Python module, loaded by ctypes; hatch_build.py compiles it from the C files of this
folder.
"""

import ctypes
import platform
from ctypes import POINTER, c_char_p, c_int, c_uint64, c_void_p
from functools import cache
from hashlib import sha256
from pathlib import Path

from ingot.errors import EngineError
from ingot.runtime.cpu.native import abi
from ingot.runtime.cpu.native.structures import Layer, NativeStep

LIBRARY = "ingot_cpu.so"


@cache
def native_library() -> ctypes.CDLL | None:
    """Load the library; None when it was not built. Raises EngineError when it exists but does not load."""
    path = library_file(Path(__file__).parent)
    return load_library(path) if path is not None else None


def load_library(path: Path) -> ctypes.CDLL:
    """Load a library that hatch_build.py compiled. Raises EngineError for anything else."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise EngineError(
            f"{path}: does not load ({error}); install Ingot again on this machine ({platform.system()},"
            f" {platform.machine()}), or remove it: the native engine needs it, onnxruntime's does without"
        ) from error
    if not _is_of_this_version(library, path.parent):
        raise EngineError(
            f"{path}: was built from another version of its source; install Ingot again: pip install -e . in a checkout"
        )
    library.paged_attention.argtypes = (POINTER(Layer), POINTER(NativeStep))
    library.paged_attention.restype = c_int
    library.copy_blocks.argtypes = (c_void_p, c_void_p, c_int, c_uint64)
    library.copy_blocks.restype = None
    library.paged_attention_isa.restype = c_char_p
    library.paged_attention_use_isa.argtypes = (c_char_p,)
    return library


def library_file(folder: Path) -> Path | None:
    """Return the library in a folder; None where it was not built."""
    file = folder / LIBRARY
    return file if file.is_file() else None


def _is_of_this_version(library: ctypes.CDLL, folder: Path) -> bool:
    """Whether the library fits the bindings and, in a source tree, was built from the sources that are there."""
    try:
        library.ingot_cpu_source.restype = c_char_p
        built_from = library.ingot_cpu_source().decode()
        library.ingot_cpu_abi.restype = c_char_p
        shared = library.ingot_cpu_abi().decode()
    except AttributeError:
        return False
    return shared == abi.digest() and source_digest(folder) in (None, built_from)


def source_digest(folder: Path) -> str | None:
    """Digest of the C sources in a folder, as the build computes it; None without sources, as in a wheel."""
    sources = sorted([*folder.glob("*.c"), *folder.glob("*.h")])
    return sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16] if sources else None
