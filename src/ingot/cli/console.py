"""Output: results to stdout, progress and errors to stderr; plain text where there is no terminal."""

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

from ingot.progress import DETAILS, NOTES, progress_to

PATIENCE_SECONDS = 2.0  # work that takes longer than this shows a bar


def stdout() -> Console:
    """Console for results. As wide as the terminal; not wrapped when piped."""
    return Console(highlight=False, soft_wrap=not sys.stdout.isatty())


def print_error(message: str) -> None:
    """Print one error to stderr, verbatim: markup in a message is not interpreted."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(Text("error: ", style="bold red") + Text(message))


def print_note(message: str) -> None:
    """Print a remark to stderr, so that piped results stay clean."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(Text(message, style="dim"))


class _LogLines(logging.Handler):
    """Prints warnings and the notes of ingot.progress as lines on stderr; details only with `details`."""

    details = False

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record. The console is made anew each time, because progress bars replace stderr."""
        if record.levelno >= logging.WARNING:
            console = Console(stderr=True, highlight=False, soft_wrap=True)
            console.print(Text("warning: ", style="bold yellow") + Text(record.getMessage()))
        elif record.name == NOTES or (record.name == DETAILS and self.details):
            print_note(record.getMessage())


_lines = _LogLines()


def show_log(details: bool = False) -> None:
    """Print the warnings and notes of all `ingot` loggers to stderr, and their details with `details`."""
    _lines.details = details
    logging.getLogger("ingot").addHandler(_lines)  # adds it once
    for name in (NOTES, DETAILS):
        logging.getLogger(name).setLevel(logging.INFO)


def print_json(value: object) -> None:
    """Print a value for programs: JSON, indented, keys in the order given."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
    """Print a table: the first `left` columns left-aligned, the others (figures) right-aligned."""
    table = Table(title=title or None, title_justify="left", title_style="bold", show_edge=False, pad_edge=False)
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    console.print(table)


@contextmanager
def progress_bars() -> Iterator[None]:
    """Show the progress that is reported within the block as bars with an ETA on stderr.

    Only work that takes longer than two seconds gets a bar. Draws nothing when stderr is not a terminal.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Bars(*columns, console=console, transient=True) as bars:
        reporter = _Reporter(bars)
        logging.getLogger(DETAILS).addHandler(reporter.details)
        logging.getLogger(DETAILS).setLevel(logging.INFO)
        try:
            with progress_to(reporter):
                yield
        finally:
            logging.getLogger(DETAILS).removeHandler(reporter.details)


class _Reporter:
    """Starts a hidden bar at the first report of each name; shows it after PATIENCE_SECONDS."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self.details = _BarDetails(self)
        self._tasks: dict[str, tuple[TaskID, float]] = {}

    def __call__(self, name: str, done: int, total: int) -> None:
        if name not in self._tasks:
            self._tasks[name] = (self._bars.add_task(name, total=total, visible=False), monotonic())
        task, started = self._tasks[name]
        self._bars.update(task, completed=done, total=total, visible=monotonic() - started > PATIENCE_SECONDS)
        if done >= total:
            self._bars.remove_task(task)
            del self._tasks[name]

    def describe(self, name: str, text: str) -> None:
        """Show a detail of the work next to its bar."""
        if name in self._tasks:
            self._bars.update(self._tasks[name][0], description=f"{name}  {text}")


class _BarDetails(logging.Handler):
    """Shows the messages of ingot.progress.detail next to the bar of their work."""

    def __init__(self, reporter: _Reporter) -> None:
        super().__init__()
        self._reporter = reporter

    def emit(self, record: logging.LogRecord) -> None:
        """Show one record, "NAME: TEXT", next to the bar NAME."""
        name, _, text = record.getMessage().partition(": ")
        self._reporter.describe(name, text)
