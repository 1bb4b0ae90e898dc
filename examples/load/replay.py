"""Replay a trace by its timestamps: python examples/load/replay.py TRACE.jsonl [--url URL] [--speed 2]

A line is {"timestamp": seconds or ISO time, "body": {...}}, with the body of a request to /v1/completions or, where it
has "messages", /v1/chat/completions. Requests are sent when they were, whatever has become of those before. Prints a
line of JSON for each answer: when it was due and sent, its status, the seconds to its first byte and to its end.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


def requests_of(trace: Path) -> Iterator[tuple[float, dict[str, Any]]]:
    """Seconds since the first request and the body, of each line."""
    first = None
    for number, line in enumerate(trace.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            given = json.loads(line)
            stamp, body = given["timestamp"], given["body"]
            seconds = datetime.fromisoformat(stamp).timestamp() if isinstance(stamp, str) else float(stamp)
        except (ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"{trace}:{number}: a line must have timestamp and body: {error!r}") from None
        first = seconds if first is None else first
        yield seconds - first, body


async def send(url: str, due: float, started: float, body: dict[str, Any]) -> dict[str, object]:
    """Send one request when it is due."""
    await asyncio.sleep(max(0.0, started + due - time.perf_counter()))
    place, sent = urlsplit(url), time.perf_counter()
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    reader, writer = await asyncio.open_connection(place.hostname, place.port or 80)
    text = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {place.netloc}\r\nConnection: close\r\nContent-Length: {len(text)}\r\n\r\n"
    writer.write(head.encode() + text)
    line = await reader.readline()
    while (await reader.readline()).strip():
        pass  # headers
    first = await reader.read(1)
    begun = time.perf_counter()
    rest = await reader.read()
    writer.close()
    return {
        "due_seconds": round(due, 6),
        "sent_seconds": round(sent - started, 6),
        "status": int(line.split()[1]),
        "first_seconds": round(begun - sent, 6),
        "total_seconds": round(time.perf_counter() - sent, 6),
        "bytes": len(first) + len(rest),
    }


async def main() -> None:
    """Replay the trace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--speed", type=float, default=1.0, help="2 replays it in half the time")
    given = parser.parse_args()
    started = time.perf_counter() + 0.1
    tasks = [send(given.url, due / given.speed, started, body) for due, body in requests_of(given.trace)]
    for task in asyncio.as_completed(tasks):
        print(json.dumps(await task), flush=True)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
