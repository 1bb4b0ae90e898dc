"""The log of `ingot serve` on stderr: records with time, level and traceback, as text or as lines of JSON."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Literal

from ingot.cli.terminal.console import hidden_log, is_shown, visible

LogFormat = Literal["text", "json"]


class TextLogFormat(logging.Formatter):
    """A line for each record. What follows the first line of a message, such as a traceback, is indented."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as lines, with control characters as escapes."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        lines = [f"{time} {record.levelname} {record.name}: {record.getMessage()}"]
        if record.exc_info:
            lines.append(self.formatException(record.exc_info))
        return visible("\n".join(lines)).replace("\n", "\n  ")


class JsonLogFormat(logging.Formatter):
    """A line of JSON for each record; `time` is in seconds since 1970, as in the lines of --log-requests."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as an object, with `exception` where it has one."""
        facts: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            facts["exception"] = self.formatException(record.exc_info)
        return json.dumps(facts)


_FORMATS: dict[LogFormat, type[logging.Formatter]] = {"text": TextLogFormat, "json": JsonLogFormat}


@contextmanager
def server_log(log_format: LogFormat) -> Iterator[None]:
    """Log the records of all loggers in this format, instead of the short lines that other commands print.

    Records of uvicorn, asyncio and OpenTelemetry are among them: without a handler Python would print them without a
    time, and lines that are not JSON.
    """
    lines = logging.StreamHandler()
    lines.setFormatter(_FORMATS[log_format]())
    lines.addFilter(is_shown)
    with hidden_log():
        logging.getLogger().addHandler(lines)
        try:
            yield
        finally:
            logging.getLogger().removeHandler(lines)
