"""Where output goes: results to stdout, progress and errors to stderr; plain when nobody watches."""

import json
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from ingot.progress import NOTES, Progress, silent

PATIENCE_SECONDS = 2.0  # work that takes longer than this shows a bar


def stdout() -> Console:
    """Console for results. As wide as the terminal; not wrapped when piped."""
    return Console(highlight=False, soft_wrap=not sys.stdout.isatty())


def print_error(message: str) -> None:
    """Print one error to stderr, as it is: no markup is read from a message."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(Text("error: ", style="bold red") + Text(message))


def print_note(message: str) -> None:
    """Print a remark to stderr, so that piped results stay clean."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(Text(message, style="dim"))


class _LogLines(logging.Handler):
    """Warnings, and what ingot.progress.note tells, as lines on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        """One record. Looked up anew each time, because bars put a stderr of their own in place."""
        if record.levelno >= logging.WARNING:
            console = Console(stderr=True, highlight=False, soft_wrap=True)
            console.print(Text("warning: ", style="bold yellow") + Text(record.getMessage()))
        elif record.name == NOTES:
            print_note(record.getMessage())


def show_log() -> None:
    """Show warnings and notes of everything that is ours; called again it changes nothing."""
    logger = logging.getLogger("ingot")
    if not any(isinstance(handler, _LogLines) for handler in logger.handlers):
        logger.addHandler(_LogLines())
        logging.getLogger(NOTES).setLevel(logging.INFO)


def print_json(value: object) -> None:
    """Print a value for programs: JSON, indented, keys in the order given."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
    """Print a table: the first `left` columns to the left, the others, figures, to the right."""
    table = Table(title=title or None, title_justify="left", title_style="bold", show_edge=False, pad_edge=False)
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    console.print(table)


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """A Progress callable that draws bars with an ETA on stderr for work that takes longer than two seconds.

    Draws nothing when stderr is no terminal.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield silent
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Bars(*columns, console=console, transient=True) as bars:
        yield _Reporter(bars)


class _Reporter:
    """Starts a bar for each name at its first report; shows it once the work proves to be long."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._tasks: dict[str, tuple[TaskID, float]] = {}

    def __call__(self, name: str, done: int, total: int) -> None:
        if name not in self._tasks:
            self._tasks[name] = (self._bars.add_task(name, total=total, visible=False), monotonic())
        task, started = self._tasks[name]
        self._bars.update(task, completed=done, total=total, visible=monotonic() - started > PATIENCE_SECONDS)
        if done >= total:
            self._bars.remove_task(task)
            del self._tasks[name]


def human_bytes(count: float) -> str:
    """A byte count for people: 11.5 MB. Powers of 1000, as disks and networks count."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
