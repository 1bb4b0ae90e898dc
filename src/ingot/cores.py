"""CPU cores by number, as options name them: a list such as [0, 2, 3], or text such as "0-3,8"."""

import re
from collections.abc import Sequence

from ingot.errors import shown
from ingot.settings import MAX_THREADS

MOST_CORE = 8191  # MAX_CORES of runtime/cpu/native/thread_team.h
CORES_PATTERN = r"^[0-9]{1,4}(-[0-9]{1,4})?(,[0-9]{1,4}(-[0-9]{1,4})?)*$"


def parse_cores(value: object) -> tuple[int, ...]:
    """Return the cores in the order given. Raises ValueError for anything else than up to 256 different cores."""
    if isinstance(value, str):
        cores = _of_text(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        cores = (value,)
    elif isinstance(value, list | tuple) and all(type(core) is int for core in value):
        cores = tuple(value)
    else:
        raise ValueError(_refusal(value))
    if not cores or max(cores) > MOST_CORE or min(cores) < 0:
        raise ValueError(_refusal(value))
    if len(set(cores)) < len(cores):
        twice = next(core for core in cores if cores.count(core) > 1)
        raise ValueError(f"{shown(value)} names core {twice} twice; each thread has a core of its own")
    if len(cores) > MAX_THREADS:
        raise ValueError(f"{shown(value)} names {len(cores)} cores; there are up to {MAX_THREADS} threads")
    return cores


def cores_in_words(cores: Sequence[int]) -> str:
    """The cores as text that `parse_cores` reads: 0-3,8."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _of_text(text: str) -> tuple[int, ...]:
    if not re.fullmatch(CORES_PATTERN, text.strip()):
        raise ValueError(_refusal(text))
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def _refusal(value: object) -> str:
    return f"{shown(value)} names no cores; write numbers from 0 to {MOST_CORE}, such as [0, 2] or 0-3,8"
