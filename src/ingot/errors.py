"""Ingot's exceptions.

    IngotError                    exit code 1
    ├── UsageError                exit code 2: a request that cannot be fulfilled
    │   ├── RecipeError           a recipe: all its problems, each with file and line
    │   ├── RequestError          a generation request: prompt, sampling parameters
    │   └── AdapterError          a LoRA adapter that the engine cannot load, or does not have
    ├── CheckpointError           a checkpoint folder: files, tensors
    │   └── ConfigError           its config.json: unknown or contradicting values
    ├── DataError                 an unusable calibration or evaluation text
    ├── PassError                 a pass refused its input or failed
    ├── BuildError                the program cannot be compiled or written
    ├── ArtifactError             an artifact that must not be loaded
    ├── EngineError               the engine cannot start or continue
    │   ├── EngineBusy            the engine takes no more requests for now
    │   │   └── Overloaded        its limits are reached; when to try again
    │   └── RequestFailed         one request failed while it was served; the engine and the other requests go on
    └── GateError                 a gate rejected the artifact
        ├── GateFailed            exit code 3
        └── GateUndecided         exit code 4

A message says what is wrong, the value, what is allowed, and what to do; `unknown` words an unknown name, with the
nearest names or, where none is near, all. The command line prints the message without a traceback. `shown` cuts a long
value, so that no message is as long as a file.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

_NEAR = 0.6  # least similarity of a name that is suggested
_NEARLY_AS_NEAR = 0.1  # a name that is less similar than the nearest by more than this is not suggested
_SUGGESTED = 3
_LONGEST_NAME = 200  # longer input is not compared

_SHOWN_PROBLEMS = 50

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"  # names of recipes, models and artifacts
LONGEST_PATH = 400  # characters of a path in a message: longer ones are cut


class IngotError(Exception):
    """Base class. `exit_code` is the exit code of the command line."""

    exit_code = 1


class UsageError(IngotError):
    """A request that cannot be fulfilled, such as an unknown name or contradicting options."""

    exit_code = 2


@dataclass(frozen=True)
class Problem:
    """A mistake in a file. `line` and `column` count from 1; 0 means the whole file, or the whole line."""

    file: str
    line: int
    message: str
    column: int = 0

    def __str__(self) -> str:
        place = ":".join([self.file, *(str(number) for number in (self.line, self.column) if number)])
        return f"{place}: {self.message}"


class RecipeError(UsageError):
    """A recipe that cannot be built; `problems` holds every mistake found, in file order.

    The message counts them if there are several, and shows the first 50.
    """

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        count, files = len(self.problems), dict.fromkeys(problem.file for problem in self.problems)
        head = [f"{count} problems in {', '.join(files)}:"] if count > 1 else []
        more = [f"... and {count - _SHOWN_PROBLEMS} more"] if count > _SHOWN_PROBLEMS else []
        super().__init__("\n".join([*head, *map(str, self.problems[:_SHOWN_PROBLEMS]), *more]))


class RequestError(UsageError):
    """A generation request that cannot be served: prompt or sampling parameters.

    `field` is the name of the parameter or option that is to blame; None where it is the prompt.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class AdapterError(UsageError):
    """A LoRA adapter that the engine cannot load or unload, or that is not loaded."""


class CheckpointError(IngotError):
    """A checkpoint that cannot be read: missing, truncated or contradicting files, bad tensors."""


class ConfigError(CheckpointError):
    """A config.json with an unknown, missing or contradicting value."""


class DataError(IngotError):
    """An unusable calibration or evaluation text: missing, too short, or not text."""


class PassError(IngotError):
    """A pass refused its input or failed; the message starts with the pass's name."""


class BuildError(IngotError):
    """The program cannot be compiled or written."""


class ArtifactError(IngotError):
    """An artifact that must not be loaded: wrong digest, missing file, newer schema, path that leaves the folder."""


class EngineError(IngotError):
    """The engine cannot start or continue."""


class EngineBusy(EngineError):
    """The engine takes no more requests for now; the same request may succeed later."""


class Overloaded(EngineBusy):
    """The engine has as much work as its options allow, or too much for the request's timeout.

    `retry_after_seconds` is when there should be room, by the rates at which the engine served so far: above 0, and at
    most 10 minutes. An HTTP service sends it, rounded up, as Retry-After.
    """

    def __init__(self, message: str, retry_after_seconds: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class RequestFailed(EngineError):
    """A request failed while it was served, for a reason of its own: the engine and the other requests go on.

    `completions` has what the call that raised this generated: one `Completion` for each of its prompts, in order.
    Those that failed have `finish_reason` "error", their `error`, and the output before it; the others are complete.
    `field` is the parameter that is the reason, such as a constraint that cannot be followed further, or None.
    """

    def __init__(self, message: str, completions: Sequence[Any] = (), field: str | None = None) -> None:
        super().__init__(message)
        self.completions = tuple(completions)
        self.field = field


class GateError(IngotError):
    """A gate rejected the measured artifact."""


class GateFailed(GateError):
    """A gate failed; the message names gate, measured value and limit."""

    exit_code = 3


class GateUndecided(GateError):
    """A gate is undecided: its limit is inside the confidence interval. An undecided gate does not pass."""

    exit_code = 4


def shown(value: object, limit: int = 80) -> str:
    """Return the value as Python writes it, cut after `limit` characters; a cut string is followed by its length."""
    if isinstance(value, str) and len(value) > limit:
        return f"{value[:limit]!r}... ({len(value):,} characters)"
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deeply, or an integer of thousands of digits
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= limit or isinstance(value, str) else f"{text[:limit]}..."


def shown_path(path: object) -> str:
    """Return a path as it is; one that no system could have is cut."""
    text = str(path)
    return text if len(text) <= LONGEST_PATH else shown(text)


def unknown(kind: str, name: object, allowed: Iterable[str], label: str = "known") -> str:
    """Return "unknown KIND NAME" with the nearest allowed names, or with all of them after `label` if none is near."""
    return f"unknown {kind} {shown(name)}{near_or_all(name, allowed, label)}"


def near_or_all(name: object, allowed: Iterable[str], label: str = "known") -> str:
    """Return ". Did you mean 'x' or 'y'?", or "; LABEL: " and all allowed names if none is near."""
    names = list(allowed)
    near = did_you_mean(name, names)
    return f".{near}" if near else f"; {label}: {one_of(names) or 'none'}."


def did_you_mean(name: object, allowed: Iterable[str]) -> str:
    """Return " Did you mean 'x', 'y' or 'z'?" for the nearest allowed names, or an empty string when none is near."""
    near = [repr(found) for found in near_names(name, allowed)]
    *first, last = near or [""]
    return f" Did you mean {', '.join(first)}{' or ' if first else ''}{last}?" if near else ""


def near_names(name: object, allowed: Iterable[str]) -> list[str]:
    """Return up to three allowed names that are similar to `name`, the nearest first; else those that contain it."""
    if not isinstance(name, str) or not name or len(name) > _LONGEST_NAME:
        return []
    names = sorted(set(allowed))
    similar = _similarity(name, names)
    least = max(similar.values(), default=0.0) - _NEARLY_AS_NEAR
    near = sorted((found for found, ratio in similar.items() if ratio >= least), key=lambda found: -similar[found])
    return (near or [found for found in names if len(name) > 2 and name.lower() in found.lower()])[:_SUGGESTED]


def _similarity(name: str, allowed: Iterable[str]) -> dict[str, float]:
    """Similarity of the allowed names that are near, between _NEAR and 1; letter case does not count."""
    matcher = SequenceMatcher(b=name.lower(), autojunk=False)
    found = {}
    for other in allowed:
        matcher.set_seq1(other.lower())
        if matcher.real_quick_ratio() >= _NEAR and matcher.quick_ratio() >= _NEAR and matcher.ratio() >= _NEAR:
            found[other] = matcher.ratio()
    return found


def one_of(allowed: Iterable[str]) -> str:
    """Return the allowed names as a sorted, comma-separated list for a message."""
    return ", ".join(sorted(allowed))


def in_columns(names: Iterable[str], width: int = 100) -> str:
    """Return the sorted names as lines of columns, for a list that is too long for a sentence."""
    found = sorted(names)
    column = max(map(len, found), default=0) + 2
    per_line = max(1, (width - 2) // column)
    lines = [found[start : start + per_line] for start in range(0, len(found), per_line)]
    return "\n".join("  " + "".join(name.ljust(column) for name in line).rstrip() for line in lines)


@contextmanager
def naming_file(file: object) -> Iterator[None]:
    """Name a file in an OSError that names none: those of reads and writes of an open file."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(file)
        raise


@contextmanager
def explain_threads(what: str) -> Iterator[None]:
    """Turn the system's refusal to start a thread within the block into an EngineError."""
    try:
        yield
    except RuntimeError as error:
        if "start new thread" not in str(error):
            raise
        raise EngineError(
            f"{what} needs a thread, and the system starts no more; end other processes, or raise their limit (ulimit"
            " -u, or pids.max of the control group), and try again"
        ) from error
