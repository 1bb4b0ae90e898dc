"""Metrics for commands: of a server that runs, or of a file."""

from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from ingot.errors import IngotError, UsageError
from ingot.runtime.doctor import Scrape

DEFAULT_URL = "http://127.0.0.1:8000"
_TIMEOUT_SECONDS = 10.0


def is_url(source: str) -> bool:
    """Whether a source is a server."""
    return source.startswith(("http://", "https://"))


def scrape(source: str) -> Scrape:
    """Read the metrics of a server, by its URL with or without /metrics, or of a file. IngotError or UsageError."""
    if not is_url(source):
        try:
            return Scrape.parse(Path(source).read_text(encoding="utf-8"), source)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(
                f"{source} cannot be read as metrics: {reason}; name a file, or a URL with http://"
            ) from error
    url = source.rstrip("/")
    url = url if url.endswith("/metrics") else f"{url}/metrics"
    try:
        with urlopen(url, timeout=_TIMEOUT_SECONDS) as answer:
            return Scrape.parse(answer.read().decode(), url)
    except (URLError, OSError) as error:
        reason = getattr(error, "reason", None) or error
        raise IngotError(f"{url} cannot be read: {reason}; start `ingot serve`, or name a server that runs") from error
