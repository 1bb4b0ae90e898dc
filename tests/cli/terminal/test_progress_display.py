"""Progress of long work: bars at a terminal, lines elsewhere, nothing if it is turned off."""

import io
import threading
from collections.abc import Iterator

import pytest
from rich.console import Console

from ingot.cli.terminal import progress_display
from ingot.cli.terminal.output import ProgressKind, set_output
from ingot.cli.terminal.progress_display import LINE_SECONDS, PATIENCE_SECONDS, PlainLines, progress_shown
from ingot.passes.calibration import report_error
from ingot.progress import report_progress

Captured = pytest.CaptureFixture[str]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _output_as_it_was() -> Iterator[None]:
    yield
    set_output()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """stderr as a terminal of 100 columns, and a clock that each look at it moves on by 1.5 seconds."""
    stream, clock = Terminal(), iter(range(1000))
    made = Console(file=stream, force_terminal=True, width=100)
    monkeypatch.setattr(progress_display, "Console", lambda **options: made)
    monkeypatch.setattr(progress_display, "monotonic", lambda: 1.5 * next(clock))
    return stream


class Clock:
    """Seconds that a test sets, and the lines that were printed."""

    def __init__(self) -> None:
        self.now = 0.0
        self.lines: list[str] = []
        self.progress = PlainLines(self.lines.append, lambda: self.now)

    def report(self, now: float, name: str, done: int, total: int) -> None:
        self.now = now
        self.progress(name, done, total)


def test_work_that_takes_long_shows_a_bar_with_what_is_left(terminal: Terminal) -> None:
    with progress_shown():
        for done in range(5):
            report_progress("quantize-weights", done, 10)
    shown = terminal.getvalue()
    assert "quantize-weights" in shown
    assert "40%" in shown
    assert ":" in shown.split("40%")[1]  # the time that is left


def test_work_that_is_soon_done_shows_nothing(terminal: Terminal) -> None:
    assert PATIENCE_SECONDS > 1.5
    with progress_shown():
        for name in ("one", "two", "three"):
            report_progress(name, 1, 1)
    assert "%" not in terminal.getvalue()


def test_what_came_out_of_the_last_layer_is_shown_next_to_the_bar(terminal: Terminal) -> None:
    with progress_shown():
        for done in range(4):
            report_progress("gptq", done, 10)
            report_error("gptq", f"layers.{done}.mlp.down_proj", 0.1234, 0.0567)
    assert "layers.3.mlp.down_proj 12.34% -> 5.67%" in terminal.getvalue()


def test_lines_are_printed_at_the_start_every_ten_seconds_and_at_the_end() -> None:
    clock = Clock()
    for second in range(31):
        clock.report(second, "latency", second, 30)
    assert clock.lines == [
        "latency: 10 %, about 27 s left",
        "latency: 43 %, about 17 s left",
        "latency: 76 %, about 7 s left",
        "latency: done in 30 s",
    ]


def test_short_work_prints_no_line() -> None:
    clock = Clock()
    for second in range(0, 200, 2):
        clock.report(second, "pass", 0, 1)
        clock.report(second + PATIENCE_SECONDS, "pass", 1, 1)
    assert clock.lines == []


def test_work_that_does_not_report_is_announced_all_the_same() -> None:
    clock = Clock()
    clock.report(0, "plan", 0, 4)
    for clock.now in (1.0, 3.0, 4.0, 3.0 + LINE_SECONDS, 4000.0):
        clock.progress.look()
    assert clock.lines == ["plan: 0 %, after 3 s", "plan: 0 %, after 13 s", "plan: 0 %, after 1 h 06 min"]


def test_what_was_done_before_does_not_count_as_pace() -> None:
    clock = Clock()
    clock.report(0, "gptq", 50, 100)  # resumed
    clock.report(60, "gptq", 60, 100)
    assert clock.lines == ["gptq: 60 %, about 4 min 00 s left"]


@pytest.mark.parametrize(("kind", "quiet"), [("none", False), ("plain", True), ("bar", True)])
def test_nothing_is_shown_if_it_is_turned_off(kind: ProgressKind, quiet: bool, capsys: Captured) -> None:
    set_output(quiet=quiet, progress=kind)
    with progress_shown():
        report_progress("work", 1, 2)
        assert not [thread for thread in threading.enumerate() if thread.name == "ingot-progress"]
    assert capsys.readouterr() == ("", "")


def test_without_a_terminal_lines_go_to_stderr(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_display, "PATIENCE_SECONDS", -1.0)
    with progress_shown():
        report_progress("wor\x1b[2Jk", 1, 2)
        assert [thread for thread in threading.enumerate() if thread.name == "ingot-progress"]
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("wor\\x1b[2Jk: 50 %")
    assert not [thread for thread in threading.enumerate() if thread.name == "ingot-progress"]


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_display, "Console", lambda **options: Console(file=Terminal()))
    monkeypatch.setenv("TERM", "xterm")
    assert progress_display._kind("auto") == "bar"
    monkeypatch.setenv("TERM", "dumb")
    assert progress_display._kind("auto") == "plain"
