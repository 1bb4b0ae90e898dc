"""Where output goes, and what of a text is printed."""

import logging
from collections.abc import Iterator

import pytest

from ingot.cli.terminal.console import print_error, print_json, print_line, print_note, show_log, visible
from ingot.cli.terminal.output import set_output
from ingot.passes.calibration import report_error
from ingot.progress import note

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _output_as_it_was() -> Iterator[None]:
    yield
    set_output()


def test_warnings_and_notes_are_shown_and_details_when_they_are_requested(capsys: Captured) -> None:
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


def test_errors_are_not_called_warnings_and_have_no_traceback(capsys: Captured) -> None:
    show_log()
    log = logging.getLogger("ingot.runtime")
    log.error("a block is lost", exc_info=ValueError("checksum"))
    log.critical("no room")
    set_output(quiet=True)
    log.error("also with --quiet")
    assert capsys.readouterr().err.splitlines() == [
        "error: a block is lost",
        "error: no room",
        "error: also with --quiet",
    ]


def test_quiet_leaves_results_and_errors(capsys: Captured) -> None:
    show_log()
    set_output(quiet=True)
    note("gptq: resumed")
    logging.getLogger("ingot.pipeline").warning("few tokens")
    print_note("generate more")
    print_line("sealed")
    print_error("no room")
    assert capsys.readouterr() == ("sealed\n", "error: no room\n")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a/ü/模型.yaml", "a/ü/模型.yaml"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        ("\x1b[2J\x07\r\x7f\x9b", "\\x1b[2J\\x07\\r\\x7f\\x9b"),
        ("\udcff", "\\udcff"),
        ("exe.\u202egpj", "exe.\\u202egpj"),
    ],
)
def test_what_could_change_the_terminal_is_written_as_an_escape(text: str, shown: str, capsys: Captured) -> None:
    assert visible(text) == shown
    print_error(text)
    print_line(text)
    expected = shown.expandtabs(8)
    printed = capsys.readouterr()
    assert (printed.out, printed.err.removeprefix("error: ")) == (f"{expected}\n", f"{expected}\n")


def test_markup_is_printed_as_it_is_and_long_lines_are_not_cut(capsys: Captured) -> None:
    print_line("[bold]x[/bold] " + "word " * 100)
    assert capsys.readouterr().out == "[bold]x[/bold] " + "word " * 100 + "\n"


def test_json_is_indented_and_in_order(capsys: Captured) -> None:
    print_json({"b": "ü", "a": [1]})
    assert capsys.readouterr().out == '{\n  "b": "ü",\n  "a": [\n    1\n  ]\n}\n'
