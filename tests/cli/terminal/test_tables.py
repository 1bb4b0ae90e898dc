"""Tables fit the terminal: columns, a wrapped text column, or blocks of lines; no word and no number is broken."""

import re
import sys
from io import StringIO

import pytest
from rich.text import Text

from ingot.cli.terminal.tables import print_table

Captured = pytest.CaptureFixture[str]
HEADER = ("metric", "baseline", "int4", "ratio (paired)", "95 % interval")
ROWS = [("Time to first token, 1 in flight", "230.3 tokens/s", "353 tokens/s", "1.5655", "1.1657 to 2.1023")]


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> Terminal:
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.delenv("NO_COLOR", raising=False)
    return stream


def test_a_piped_table_is_plain_and_as_wide_as_it_needs(capsys: Captured) -> None:
    print_table("Title", ("name", "figure"), [("x" * 150, "[red]1[/red]")])
    shown = capsys.readouterr().out
    assert "x" * 150 in shown
    assert "[red]1[/red]" in shown
    assert "\x1b" not in shown


def test_control_characters_of_a_cell_are_shown(capsys: Captured) -> None:
    print_table("", ("name", "figure"), [("\x1b[2J\u202e", "1")])
    assert "\\x1b[2J\\u202e" in capsys.readouterr().out


@pytest.mark.parametrize("columns", [1, 20, 60, 70])
def test_what_does_not_fit_in_columns_becomes_a_block_of_lines(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    shown = terminal(monkeypatch, columns)
    print_table("Evidence", HEADER, ROWS)
    lines = shown.getvalue().splitlines()
    assert lines[1:] == [
        "Time to first token, 1 in flight",
        "    baseline        230.3 tokens/s",
        "    int4            353 tokens/s",
        "    ratio (paired)  1.5655",
        "    95 % interval   1.1657 to 2.1023",
    ]


def test_what_fits_stays_in_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = terminal(monkeypatch, 110)
    print_table("", HEADER, ROWS)
    assert [line for line in shown.getvalue().splitlines() if "230.3 tokens/s" in line and "2.1023" in line]


def test_a_header_is_wrapped_only_where_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns, is_wrapped in ((30, False), (21, True)):
        shown = terminal(monkeypatch, columns)
        print_table("", ("metric", "ratio (paired)"), [("End-to-end", "0.5")])
        assert ("ratio (paired)" not in shown.getvalue()) == is_wrapped
        assert "0.5" in shown.getvalue().splitlines()[-1]


def test_a_text_column_is_wrapped_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = terminal(monkeypatch, 60)
    text = "Rounds weight matrices to 2 to 8 bits for the inputs they get on calibration data."
    print_table("", ("pass", "what it does"), [("gptq", text)], left=2)
    lines = [line.removeprefix("gptq").strip() for line in shown.getvalue().splitlines()[2:]]
    assert len(lines) == 2
    assert " ".join(lines) == text


def test_a_style_of_a_cell_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in (30, 100):
        shown = terminal(monkeypatch, columns)
        print_table("", ("a long name of a column", "change"), [("b", Text("worse", style="red"))])
        assert re.search(r"\x1b\[31m *worse\x1b\[0m", shown.getvalue())


@pytest.mark.parametrize(("columns", "kept"), [(70, {"baseline", "change"}), (66, {"baseline"}), (55, set())])
def test_columns_are_left_out_one_after_another(monkeypatch: pytest.MonkeyPatch, columns: int, kept: set[str]) -> None:
    shown = terminal(monkeypatch, columns)
    header = ("metric", "", "baseline", "candidate", "change", "95 % interval")
    rows = [("End-to-end time", "worse", "19.4 ms", "18.5 ms", "-5 %", "0.7356 to 1.2710")]
    print_table("", header, rows, left=2, optional=("change", "baseline"))
    first = shown.getvalue().splitlines()[0]
    assert {name for name in ("baseline", "change") if name in first} == kept
    assert "0.7356 to 1.2710" in shown.getvalue()


def test_a_row_of_one_cell_is_a_heading(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in (20, 100):
        shown = terminal(monkeypatch, columns)
        rows = [("Accuracy",), ("  KL", "worse", "0.01"), ("  top-1", "", "-")]
        print_table("", ("metric", "", "value"), rows, left=2)
        lines = [re.sub(r"\x1b\[\d*m", "", line).rstrip() for line in shown.getvalue().splitlines()]
        assert "Accuracy" in lines
    assert [line.split() for line in lines[-2:]] == [["KL", "worse", "0.01"], ["top-1", "-"]]
