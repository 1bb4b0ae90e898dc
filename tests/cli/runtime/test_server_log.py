"""The log of `ingot serve`: levels, times and tracebacks, as text and as lines of JSON."""

import json
import logging
import re
import time
from collections.abc import Iterator

import pytest

from ingot.cli.runtime.server_log import LogFormat, server_log
from ingot.cli.terminal.console import show_log
from ingot.cli.terminal.output import set_output
from ingot.progress import detail, note
from ingot.runtime.server.http.api_error import ApiError

Captured = pytest.CaptureFixture[str]
_TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


@pytest.fixture(autouse=True)
def _output_as_it_was() -> Iterator[None]:
    show_log()
    yield
    set_output()


def fail_on_a_request() -> None:
    """Log what the server logs when it fails on a request."""
    try:
        raise KeyError("logits")
    except KeyError as error:
        ApiError.of(error)  # a client reads that the log has the details


def log_all(log_format: LogFormat) -> None:
    with server_log(log_format):
        note("ready on http://127.0.0.1:8000")
        detail("gptq", "left out")
        logging.getLogger("ingot.runtime").info("left out")
        logging.getLogger("ingot.runtime").warning("line\n2\x1b[2J")
        logging.getLogger("uvicorn.error").error("not HTTP")
        fail_on_a_request()


def test_text_has_times_levels_names_and_tracebacks(capsys: Captured) -> None:
    log_all("text")
    printed = capsys.readouterr().err
    assert [each.partition(" ")[2] for each in re.split(rf"^(?={_TIME} )", printed, flags=re.MULTILINE)[1:-1]] == [
        "INFO ingot.notes: ready on http://127.0.0.1:8000\n",
        "WARNING ingot.runtime: line\n  2\\x1b[2J\n",
        "ERROR uvicorn.error: not HTTP\n",
    ]
    lines = printed.splitlines()[4:]
    assert lines[0].endswith(" ERROR ingot.runtime.server.http.api_error: a request failed")
    assert lines[1] == "  Traceback (most recent call last):"
    assert "in fail_on_a_request" in lines[2]
    assert lines[-1] == "  KeyError: 'logits'"


def test_json_has_an_object_in_each_line(capsys: Captured) -> None:
    before = time.time()
    log_all("json")
    found = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(each["level"], each["logger"], each["message"]) for each in found] == [
        ("INFO", "ingot.notes", "ready on http://127.0.0.1:8000"),
        ("WARNING", "ingot.runtime", "line\n2\x1b[2J"),
        ("ERROR", "uvicorn.error", "not HTTP"),
        ("ERROR", "ingot.runtime.server.http.api_error", "a request failed"),
    ]
    assert all(before - 1 < each["time"] < time.time() + 1 for each in found)
    assert ["exception" in each for each in found] == [False, False, False, True]
    assert found[-1]["exception"].startswith("Traceback (most recent call last):\n")
    assert found[-1]["exception"].endswith("\nKeyError: 'logits'")


def test_quiet_leaves_errors(capsys: Captured) -> None:
    set_output(quiet=True)
    log_all("json")
    levels = [json.loads(line)["level"] for line in capsys.readouterr().err.splitlines()]
    assert levels == ["ERROR", "ERROR"]


def test_other_commands_print_their_short_lines_afterwards(capsys: Captured) -> None:
    log_all("json")
    capsys.readouterr()
    fail_on_a_request()
    note("resumed")
    assert capsys.readouterr().err == "error: a request failed\nresumed\n"
