"""Settings of the environment: cache folder, threads, attention. Read on use; none of it is global state.

INGOT_CACHE      folder for baselines and other rebuildable things (default: ~/.cache/ingot, else a temporary one)
INGOT_THREADS    threads of the process-wide pool, 1 to 256 (default: the cores this process may run on)
INGOT_ATTENTION  native or numpy: what computes attention on the CPU (default: native where its kernel was built)
INGOT_PROGRESS   auto, plain, bar or none: the default of --progress (default: auto)
ORT_DISABLE_TELEMETRY  onnxruntime's own: `import ingot` sets it to 1 unless it is set; 0 leaves the telemetry on
INGOT_CUBLASLT   0: matmuls stay with Ingot's kernels where cuBLASLt is installed, too (default: 1)
INGOT_DEPENDENT_LAUNCHES  0: kernels compiled for dependent launches are launched in the usual way, too (default: 1)
INGOT_CUDA_BLOCKING  1: kernels on a GPU run one by one, so that a failure names its node; slow (default: 0)
"""

import logging
import os
import stat
import tempfile
from functools import cache
from pathlib import Path

from ingot.errors import UsageError

MAX_THREADS = 256

_log = logging.getLogger(__name__)


def cache_dir() -> Path:
    """Folder for files that can be made again; its users create it.

    Where the home folder is missing or cannot be written, as in many containers, it is a temporary folder of this user.
    """
    given, caches = os.environ.get("INGOT_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if given:
        return Path(given)
    if caches:
        return Path(caches) / "ingot"
    try:
        folder = Path.home() / ".cache" / "ingot"
    except RuntimeError:
        return _temporary_cache("this user has no home folder")
    there = next(place for place in (folder, *folder.parents) if place.exists())
    return folder if os.access(there, os.W_OK | os.X_OK) else _temporary_cache(f"{there} cannot be written")


@cache
def _temporary_cache(reason: str) -> Path:
    """Return a folder that only this user can read and write. UsageError where another user has made it."""
    folder = Path(tempfile.gettempdir()) / f"ingot-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise UsageError(f"{reason}, nor {folder}: {error.strerror}; set INGOT_CACHE to a folder") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise UsageError(f"{reason}, and others may write to {folder}; set INGOT_CACHE to a folder")
    _log.warning("%s: the cache is in %s, which a restart may remove; INGOT_CACHE sets another folder", reason, folder)
    return folder


def make_cache_dir(name: str) -> Path:
    """Create a folder in the cache, where it is not there yet. Raises UsageError when files cannot be written to it."""
    folder = cache_dir() / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        problem = None if os.access(folder, os.W_OK | os.X_OK) else "Permission denied"
    except OSError as error:
        problem = error.strerror
    if problem:
        raise UsageError(f"{folder}: cannot write to the cache: {problem}; set INGOT_CACHE to another folder")
    return folder


def attention() -> str | None:
    """The CPU attention that INGOT_ATTENTION selects, "native" or "numpy"; None if it is not set.

    Raises UsageError for anything else.
    """
    name = os.environ.get("INGOT_ATTENTION")
    if name not in (None, "native", "numpy"):
        raise UsageError(f"INGOT_ATTENTION is {name!r}; it must be native or numpy, or not be set")
    return name


def cublaslt() -> bool:
    """Whether cuBLASLt may multiply where it is installed. Raises UsageError for neither 0 nor 1."""
    return _flag("INGOT_CUBLASLT", "1")


def dependent_launches() -> bool:
    """Whether kernels compiled for it start before the launch before them ends. UsageError for neither 0 nor 1."""
    return _flag("INGOT_DEPENDENT_LAUNCHES", "1")


def cuda_blocking() -> bool:
    """Whether to wait for every kernel on a GPU. Raises UsageError when INGOT_CUDA_BLOCKING is neither 0 nor 1."""
    return _flag("INGOT_CUDA_BLOCKING", "0")


def _flag(name: str, default: str) -> bool:
    text = os.environ.get(name, default)
    if text not in ("0", "1"):
        raise UsageError(f"{name} is {text!r}; it must be 0 or 1, or not be set")
    return text == "1"


def num_threads() -> int:
    """Threads to compute with: INGOT_THREADS, else the cores this process may run on.

    Raises UsageError when INGOT_THREADS is not a whole number from 1 to MAX_THREADS.
    """
    text = os.environ.get("INGOT_THREADS")
    if text is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return min(cores, MAX_THREADS)
    if not text.isdecimal() or not 1 <= int(text) <= MAX_THREADS:
        raise UsageError(f"INGOT_THREADS is {text!r}; it must be a whole number from 1 to {MAX_THREADS}, such as 4")
    return int(text)
