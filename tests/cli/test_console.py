"""Where output goes, and the bars that show how far long work is."""

import io
import logging

import pytest
from rich.console import Console

from ingot.cli import console
from ingot.cli.console import PATIENCE_SECONDS, print_table, progress_bars, show_log
from ingot.passes.calibration import report_error
from ingot.progress import note, report_progress


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """stderr as a terminal of 100 columns, and a clock that each look at it moves on by 1.5 seconds."""
    stream, clock = Terminal(), iter(range(1000))
    made = Console(file=stream, force_terminal=True, width=100)
    monkeypatch.setattr(console, "Console", lambda **options: made)
    monkeypatch.setattr(console, "monotonic", lambda: 1.5 * next(clock))
    return stream


def test_work_that_takes_long_shows_a_bar_with_what_is_left(terminal: Terminal) -> None:
    with progress_bars():
        for done in range(5):
            report_progress("quantize-weights", done, 10)
    shown = terminal.getvalue()
    assert "quantize-weights" in shown
    assert "40%" in shown
    assert ":" in shown.split("40%")[1]  # the time that is left


def test_work_that_is_soon_done_shows_nothing(terminal: Terminal) -> None:
    assert PATIENCE_SECONDS > 1.5
    with progress_bars():
        for name in ("one", "two", "three"):
            report_progress(name, 1, 1)
    assert "%" not in terminal.getvalue()


def test_without_a_terminal_nothing_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bars():
        report_progress("work", 1, 2)
    assert capsys.readouterr() == ("", "")


def test_a_piped_table_is_plain_and_as_wide_as_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("Title", ("name", "figure"), [("x" * 150, "[red]1[/red]")])
    shown = capsys.readouterr().out
    assert "x" * 150 in shown
    assert "[red]1[/red]" in shown
    assert "\x1b" not in shown


def test_what_came_out_of_the_last_layer_stands_beside_the_bar(terminal: Terminal) -> None:
    with progress_bars():
        for done in range(4):
            report_progress("gptq", done, 10)
            report_error("gptq", f"layers.{done}.mlp.down_proj", 0.1234, 0.0567)
    assert "layers.3.mlp.down_proj 12.34% -> 5.67%" in terminal.getvalue()


def test_warnings_and_notes_are_shown_and_details_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    for details in (False, True, False):
        show_log(details)
        report_error("gptq", "layers.0.q_proj", 0.1, 0.05)
    note("gptq: resumed at stage 7 of 19")
    logging.getLogger("ingot.pipeline").warning("calibration: %d tokens", 5)
    logging.getLogger("ingot.passes").info("left alone")
    assert capsys.readouterr().err.splitlines() == [
        "gptq: layers.0.q_proj 10.00% -> 5.00%",
        "gptq: resumed at stage 7 of 19",
        "warning: calibration: 5 tokens",
    ]
