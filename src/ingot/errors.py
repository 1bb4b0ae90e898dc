"""Every error that Ingot raises on purpose, in one tree.

    IngotError                    exit code 1
    ├── UsageError                exit code 2: the caller asked for something impossible
    │   ├── RecipeError           a recipe, with every problem in it, each with file and line
    │   └── RequestError          a generation request: prompt, sampling parameters
    ├── CheckpointError           a checkpoint folder: files, tensors
    │   └── ConfigError           its config.json: unknown or contradicting values
    ├── DataError                 a calibration or evaluation text
    ├── PassError                 a pass refused or failed; names the pass
    ├── BuildError                lowering, packing, disk
    ├── ArtifactError             an artifact: digest, schema, paths, missing files
    ├── EngineError               the engine cannot be made or cannot go on
    └── GateError                 the artifact was measured and not let through
        ├── GateFailed            exit code 3
        └── GateUndecided         exit code 4

A message says what is wrong, the value, what is allowed, and what to do. `did_you_mean` adds the nearest
name. The command line prints the message alone: no traceback for a user's mistake.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches


class IngotError(Exception):
    """Base of the tree. `exit_code` is what the command line ends with."""

    exit_code = 1


class UsageError(IngotError):
    """The caller asked for something impossible."""

    exit_code = 2


@dataclass(frozen=True)
class Problem:
    """One mistake in a file: its place and its message. `line` counts from 1; 0 means the whole file."""

    file: str
    line: int
    message: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.message}"


class RecipeError(UsageError):
    """A recipe that cannot be built; `problems` holds every mistake found, in file order."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class RequestError(UsageError):
    """A generation request that cannot be served: prompt or sampling parameters."""


class CheckpointError(IngotError):
    """A checkpoint that cannot be read: missing, truncated or contradicting files, bad tensors."""


class ConfigError(CheckpointError):
    """A config.json with an unknown, missing or contradicting value."""


class DataError(IngotError):
    """A text for calibration or evaluation that cannot serve."""


class PassError(IngotError):
    """A pass refused its input or failed; the message starts with the pass's name."""


class BuildError(IngotError):
    """The program could not be made or written."""


class ArtifactError(IngotError):
    """An artifact that must not be loaded: wrong digest, missing file, newer schema, path outside."""


class EngineError(IngotError):
    """The engine cannot be made or cannot continue."""


class GateError(IngotError):
    """The artifact was built and measured, and its gates did not let it through."""


class GateFailed(GateError):
    """A gate failed: the message names it, the measured value and the limit."""

    exit_code = 3


class GateUndecided(GateError):
    """A gate could not be decided from the sample, and so does not pass."""

    exit_code = 4


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the nearest allowed name, or an empty string when none is near."""
    near = get_close_matches(name, list(allowed), n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""


def one_of(allowed: Iterable[str]) -> str:
    """Return the allowed names as a sorted, comma-separated list for a message."""
    return ", ".join(sorted(allowed))
