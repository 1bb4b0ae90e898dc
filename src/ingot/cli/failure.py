"""Meaning of an exception for the user: a message, an exit code, and both as JSON for --json.

0 done, all gates pass    1 error    2 usage    3 a gate failed    4 a gate is undecided
130 interrupted    141 the reader of the output is gone    143 terminated
"""

import errno
from dataclasses import asdict, dataclass
from typing import Any

import click

from ingot.errors import IngotError, RecipeError, UsageError, shown_path
from ingot.version import install_command

INTERRUPTED, READER_GONE, TERMINATED = 130, 141, 143
# package -> the extra of Ingot that installs it, and what it is for
_COMPILER, _SERVER = ("compiler", "compiler"), ("serve", "server")
EXTRAS = {
    **dict.fromkeys(("onnx", "onnx_ir", "threadpoolctl"), _COMPILER),
    **dict.fromkeys(("starlette", "uvicorn", "prometheus_client", "regex", "httptools", "uvloop"), _SERVER),
    "opentelemetry": ("trace", "tracing"),
}


class Terminated(BaseException):
    """SIGTERM: ends the command as Ctrl-C does, so that nothing half-written is left."""


class ReaderGone(Exception):
    """The reader of the output has ended. click would turn the BrokenPipeError into an exit code of its own."""


@dataclass(frozen=True)
class Failure:
    """One error as the command line reports it. `problems` are those of a recipe, each with file and line."""

    type: str
    message: str
    exit_code: int
    problems: tuple[dict[str, Any], ...] = ()

    def as_json(self) -> dict[str, object]:
        """The value of the key `error`."""
        facts: dict[str, object] = {"type": self.type, "message": self.message, "exit_code": self.exit_code}
        return {**facts, "problems": list(self.problems)} if self.problems else facts


def failure_of(error: BaseException) -> Failure | None:
    """Return what to report for an exception; None for a mistake of Ingot's own, whose traceback is of use."""
    error = _interruption(error) or error
    match error:
        case IngotError():
            problems = tuple(map(asdict, error.problems)) if isinstance(error, RecipeError) else ()
            return Failure(type(error).__name__, str(error), error.exit_code, problems)
        case click.ClickException():
            has_help = isinstance(error, click.UsageError) and error.ctx is not None
            where = f" (see `{error.ctx.command_path} --help`)" if has_help else ""  # type: ignore[attr-defined]
            return Failure(UsageError.__name__, f"{_click_message(error)}{where}", UsageError.exit_code)
        case click.Abort() | KeyboardInterrupt():
            return Failure("Interrupted", "interrupted", INTERRUPTED)
        case Terminated():
            return Failure("Terminated", "terminated", TERMINATED)
        case ModuleNotFoundError():
            return _missing_package(error)
        case OSError():
            return Failure("OSError", _os_message(error), 1)
        case MemoryError():
            return Failure("MemoryError", "not enough memory", 1)
        case RuntimeError() if "home directory" in str(error):  # pathlib's, for a ~ that it cannot expand
            return Failure("UsageError", "the home folder of ~ is not known; write the whole path", 2)
    return None


def error_facts(error: IngotError) -> dict[str, object]:
    """Return the value of the key `error` for one of Ingot's own exceptions."""
    failure = failure_of(error)
    assert failure is not None, "every IngotError is reported"
    return failure.as_json()


def _interruption(error: BaseException) -> BaseException | None:
    """The interruption from which another exception followed, as when it ends the import of a native module."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, KeyboardInterrupt | Terminated):
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return seen


def _missing_package(error: ModuleNotFoundError) -> Failure | None:
    found = EXTRAS.get((error.name or "").partition(".")[0])
    if found is None:
        return None
    extra, part = found
    message = f"this command needs {error.name}, part of the {part}; {install_command(extra)}"
    return Failure("MissingPackage", message, 1)


def _click_message(error: click.ClickException) -> str:
    """The message, and of an option that is missing what it takes."""
    option = error.param if isinstance(error, click.MissingParameter) else None
    meaning = option.help if isinstance(option, click.Option) else None
    return f"{error.format_message()} {meaning}" if meaning else error.format_message()


def _os_message(error: OSError) -> str:
    """The file and the system's reason."""
    reason = error.strerror or str(error)
    if error.filename is None:
        return f"the output cannot be written: {reason}" if error.errno in (errno.ENOSPC, errno.EIO) else reason
    return f"{shown_path(error.filename)}: {reason}"
