"""Output: results to stdout, progress, notes and errors to stderr; plain text where there is no terminal.

Names of files and values of others' files are printed with their control characters as escapes, so that none of them
can move the cursor, change colours or hide text.
"""

import json
import logging
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from ingot.cli.output import output
from ingot.progress import DETAILS, NOTES


def stdout() -> Console:
    """Console for results. As wide as the terminal; not wrapped when piped."""
    return Console(highlight=False, soft_wrap=not sys.stdout.isatty())


def stderr() -> Console:
    """Console for errors and notes. Made anew for each line, because progress bars replace stderr."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def visible(text: str) -> str:
    """Write control characters, invisible marks of direction and undecodable bytes as escapes; keep line breaks."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    is_hidden = unicodedata.category(character) in ("Cc", "Cs") or character in _DIRECTIONS
    if not is_hidden or character in "\n\t":
        return character
    return character.encode("unicode_escape", "surrogatepass").decode()


_DIRECTIONS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u061c"


def print_line(text: str | Text) -> None:
    """Print one line of a result, verbatim and not wrapped."""
    stdout().print(Text(visible(text)) if isinstance(text, str) else text, soft_wrap=True)


def print_text(text: str) -> None:
    """Print a sentence of a result, at a terminal wrapped between words."""
    stdout().print(Text(visible(text)))


def print_error(message: str) -> None:
    """Print one error to stderr, verbatim: markup in a message is not interpreted."""
    stderr().print(Text("error: ", style="bold red") + Text(visible(message)))


def print_warning(message: str) -> None:
    """Print one warning to stderr, unless it is quiet."""
    if not output.quiet:
        stderr().print(Text("warning: ", style="bold yellow") + Text(visible(message)))


def print_note(message: str) -> None:
    """Print a remark to stderr, so that piped results stay clean; nothing with --quiet."""
    if not output.quiet:
        stderr().print(Text(visible(message), style="dim"))


def print_json(value: object) -> None:
    """Print a value for programs: JSON, indented, keys in the order given."""
    print(json.dumps(value, indent=2, ensure_ascii=False))
    output.printed_json = True


def is_shown(record: logging.LogRecord) -> bool:
    """Whether a record of a logger is printed: errors always, warnings, notes and details by `output`."""
    if record.levelno >= logging.ERROR:
        return True
    is_note = record.name == NOTES or (record.name == DETAILS and output.details)
    return not output.quiet and (record.levelno >= logging.WARNING or is_note)


class _LogLines(logging.Handler):
    """Prints messages of loggers as lines on stderr, each by its level."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the message of one record. A traceback does not help with a user's mistake."""
        if record.levelno >= logging.ERROR:
            print_error(record.getMessage())
        elif record.levelno >= logging.WARNING:
            print_warning(record.getMessage())
        else:
            print_note(record.getMessage())


_log = logging.getLogger("ingot")
_lines = _LogLines()
_lines.addFilter(is_shown)


def show_log(details: bool = False) -> None:
    """Print errors, warnings and notes of all `ingot` loggers to stderr, and their details with `details`."""
    output.details = details
    _log.addHandler(_lines)  # adds it once
    for name in (NOTES, DETAILS):
        logging.getLogger(name).setLevel(logging.INFO)


@contextmanager
def hidden_log() -> Iterator[None]:
    """Leave the records within the block to another handler."""
    _log.removeHandler(_lines)
    try:
        yield
    finally:
        _log.addHandler(_lines)
