"""Cores of the process's team of threads (native/thread_team.h), which its engines share.

An engine that names cores holds the team on them until it is closed; others may name the same cores meanwhile, and no
different ones. Engines that name none use the team as it is.
"""

import os
import sys
import threading
import weakref
from collections.abc import Sequence
from ctypes import CDLL, c_int, c_int32

from ingot.cores import cores_in_words
from ingot.errors import EngineError

_lock = threading.Lock()
_pinned: tuple[int, ...] = ()
_holders = 0  # engines that named them


def check_cores(cores: Sequence[int]) -> None:
    """Raise EngineError for cores that this process may not run on, and on systems that do not pin threads."""
    given = f"cpu_affinity is {cores_in_words(cores)}"
    if not hasattr(os, "sched_getaffinity"):
        raise EngineError(f"{given}; only Linux pins threads to cores, and this is {sys.platform}; leave it out")
    allowed = os.sched_getaffinity(0)
    others = [core for core in cores if core not in allowed]
    if others:
        raise EngineError(
            f"{given}; this process may not run on {cores_in_words(others)}: choose from "
            f"{cores_in_words(sorted(allowed))}, or leave it out"
        )


def hold_cores(library: CDLL, cores: tuple[int, ...], owner: object) -> "weakref.finalize[..., object]":
    """Pin thread i of the team to cores[i]. Call what is returned to let go; the end of `owner` does so too.

    EngineError when another engine holds different cores, or the system refuses these.
    """
    global _pinned, _holders  # the team is the process's
    with _lock:
        if _holders and _pinned != cores:
            raise EngineError(
                f"cpu_affinity is {cores_in_words(cores)}, and another engine of this process has pinned the threads, "
                f"which all engines share, to {cores_in_words(_pinned)}; name the same cores, leave it out, or close "
                "that engine first"
            )
        if not _holders:
            _pin(library, cores)
        _pinned, _holders = cores, _holders + 1
    holding = weakref.finalize(owner, _let_go, library)
    holding.atexit = False
    return holding


def _let_go(library: CDLL) -> None:
    global _pinned, _holders
    with _lock:
        _holders -= 1
        if not _holders:
            _pinned = ()
            _pin(library, ())


def _pin(library: CDLL, cores: tuple[int, ...]) -> None:
    library.team_pin.restype = c_int
    problem = library.team_pin((c_int32 * max(1, len(cores)))(*cores), len(cores))
    if problem:
        raise EngineError(
            f"cpu_affinity is {cores_in_words(cores)}, and the system refused to pin a thread: {os.strerror(problem)}; "
            "leave it out"
        )
