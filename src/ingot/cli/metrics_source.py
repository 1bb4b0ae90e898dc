"""Metrics for commands: of a server that runs, or of a file."""

from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

from ingot.errors import IngotError, UsageError, shown_path
from ingot.runtime.doctor import Scrape

DEFAULT_URL = "http://127.0.0.1:8000"
_TIMEOUT_SECONDS = 10.0
_MOST_SECONDS = 86400.0
_MOST_BYTES = 64 << 20  # limit of a text of metrics: a server or a device may send without end


def is_url(source: str) -> bool:
    """Whether a source is a server."""
    return source.startswith(("http://", "https://"))


def require_seconds(seconds: float, least: float) -> None:
    """UsageError unless this is a time to wait between two looks."""
    if not least <= seconds <= _MOST_SECONDS:  # false for nan
        raise UsageError(f"--seconds is {seconds:g}; it must be from {least:g} to {_MOST_SECONDS:g}")


def scrape(source: str) -> Scrape:
    """Read the metrics of a server, by its URL with or without /metrics, or of a file. IngotError or UsageError."""
    name = _metrics_url(source) if is_url(source) else source
    content = _fetch(name) if is_url(source) else _read(name)
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = ""  # metrics are UTF-8: it is something else, and refused as such
    return Scrape.parse(text, name)


def _metrics_url(source: str) -> str:
    try:
        parts = urlsplit(source)
        has_host = bool(parts.hostname and (parts.port is None or parts.port))
    except ValueError:  # a port that cannot be
        has_host = False
    if not has_host:
        raise UsageError(f"{shown_path(source)} is not the URL of a server; give http://HOST:PORT")
    url = source.rstrip("/")
    return url if url.endswith("/metrics") else f"{url}/metrics"


def _read(name: str) -> bytes:
    try:
        with Path(name).open("rb") as file:
            return file.read(_MOST_BYTES)
    except (OSError, ValueError) as error:  # ValueError: no system has such a path
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"{shown_path(name)} cannot be read as metrics: {reason}; name a file, or a URL with http://"
        ) from error


def _fetch(url: str) -> bytes:
    try:
        with urlopen(url, timeout=_TIMEOUT_SECONDS) as answer:
            content: bytes = answer.read(_MOST_BYTES)
            return content
    except (OSError, HTTPException, ValueError) as error:  # ValueError: a host or a port that cannot be
        reason = getattr(error, "reason", None) or str(error) or type(error).__name__
        raise IngotError(f"{url} cannot be read: {reason}; start `ingot serve`, or name a server that runs") from error
