"""Shows the progress of long work on stderr: bars at a terminal, elsewhere a line now and then."""

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from ingot.cli.console import visible
from ingot.cli.output import ProgressKind, output
from ingot.progress import DETAILS, progress_to

PATIENCE_SECONDS = 2.0  # work that takes longer than this is shown
LINE_SECONDS = 10.0  # least time between two lines about one piece of work


@contextmanager
def progress_shown() -> Iterator[None]:
    """Show the progress that is reported within the block on stderr, as --progress and --quiet say.

    Only work that takes longer than two seconds is shown.
    """
    kind = _kind(output.progress)
    if kind == "none" or output.quiet:
        yield
    elif kind == "bar":
        with _bars():
            yield
    else:
        with _lines():
            yield


def _kind(chosen: ProgressKind) -> ProgressKind:
    """Bars at a terminal that can move its cursor, else lines."""
    if chosen != "auto":
        return chosen
    console = Console(stderr=True)
    return "bar" if console.is_terminal and not console.is_dumb_terminal else "plain"


@contextmanager
def _bars() -> Iterator[None]:
    console = Console(stderr=True, force_terminal=True)
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


@contextmanager
def _lines() -> Iterator[None]:
    """Print lines; a thread looks every second, so that work is announced that does not report for long."""
    lines = PlainLines(lambda line: print(visible(line), file=sys.stderr, flush=True))
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(1.0):
            lines.look()

    watcher = threading.Thread(target=watch, name="ingot-progress", daemon=True)
    watcher.start()
    try:
        with progress_to(lines):
            yield
    finally:
        ended.set()
        watcher.join()


@dataclass
class _Work:
    """One piece of work: how far it was when it was first seen, and when a line about it was printed last."""

    started: float
    first: int
    done: int
    total: int
    printed: float | None = None


class PlainLines:
    """A listener that prints a line when work turns out to be long, at most every ten seconds, and at its end."""

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = monotonic) -> None:
        self._write, self._clock = write, clock
        self._works: dict[str, _Work] = {}
        self._lock = threading.Lock()

    def __call__(self, name: str, done: int, total: int) -> None:
        with self._lock:
            now = self._clock()
            work = self._works.setdefault(name, _Work(now, done, done, total))
            work.done, work.total = done, total
            if done >= total:
                del self._works[name]
                if work.printed is not None:
                    self._write(f"{name}: done in {_time(now - work.started)}")
            else:
                self._show(name, work, now)

    def look(self) -> None:
        """Print what is due, without a report."""
        with self._lock:
            now = self._clock()
            for name, work in self._works.items():
                self._show(name, work, now)

    def _show(self, name: str, work: _Work, now: float) -> None:
        is_first = work.printed is None and now - work.started > PATIENCE_SECONDS
        if is_first or (work.printed is not None and now - work.printed >= LINE_SECONDS):
            work.printed = now
            self._write(f"{name}: {100 * work.done // max(1, work.total)} %{_left(work, now)}")


def _left(work: _Work, now: float) -> str:
    """Return the time for the rest at the pace so far; the time until now if nothing is done yet."""
    if work.done <= work.first:
        return f", after {_time(now - work.started)}"
    seconds = (now - work.started) / (work.done - work.first) * (work.total - work.done)
    return f", about {_time(seconds)} left"


def _time(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{max(1, whole)} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"
