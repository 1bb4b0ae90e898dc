"""Reading of replies: generated ones at every split against a slow reader, and the cost of long hostile ones.

python -m benchmarks.structured.replies                                  # 10,000 replies, up to 1 MB
python -m benchmarks.structured.replies --replies 700 --kilobytes 32     # small
python -m benchmarks.structured.replies --output FILE                    # the result as JSON

Exit code 1 when a reply was read wrong, or when the time of any text grew more than twice as fast as its length.
"""

import argparse
import json
import math
import random
import sys
import time
from pathlib import Path

from tests.runtime.replies import generated
from tests.runtime.replies.comparison import parser, problems
from tests.runtime.replies.test_generated import BEGUN, HOSTILE

from benchmarks.device import device_facts
from ingot.runtime.replies import FORMATS

_SHOWN_PROBLEMS, _PIECE_CHARS, _LONGEST_GROWTH = 10, 16, 2.0
_KILOBYTES = (1, 32, 1024)


def main(arguments: list[str]) -> int:
    """Run both parts and print the result."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--replies", type=int, default=10_000)
    options.add_argument(
        "--kilobytes", type=int, default=_KILOBYTES[-1], help="the longest text whose cost is measured"
    )
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--seconds", type=float, default=math.inf, help="after which no reply is begun")
    options.add_argument("--output", type=Path)
    given = options.parse_args(arguments)
    num_replies, num_splits, found = _compare(given.replies, given.seed, given.seconds)
    costs = {name: _costs(name, given.kilobytes) for name in FORMATS} if given.kilobytes else {}
    steep = [name for name, cost in costs.items() if cost["growth"] > _LONGEST_GROWTH]
    record = {
        "device": device_facts(),
        "seed": given.seed,
        "replies": num_replies,
        "splits": num_splits,
        "problems": len(found),
        "costs": costs,
    }
    print(*found[:_SHOWN_PROBLEMS], sep="\n", file=sys.stderr)
    print(json.dumps(record, indent=1))
    if given.output:
        given.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return int(bool(found or steep))


def _compare(num_replies: int, seed: int, seconds: float) -> tuple[int, int, list[str]]:
    """Replies and splits that were read, and what was wrong."""
    names, num_splits, started = list(FORMATS), 0, time.monotonic()
    found: list[str] = []
    for number in range(num_replies):
        if time.monotonic() - started > seconds:
            return number, num_splits, found
        name = names[number % len(names)]
        text = generated.reply(name, random.Random(f"{seed} {number}"))
        # Each place splits the text in two, and the last split is the one into characters.
        num_splits += len(text[1:]) + 1
        found += problems(name, text)
    return num_replies, num_splits, found


def _costs(name: str, most_kilobytes: int) -> dict[str, float]:
    """MB/s of the slowest text by its length, in pieces as of tokens, and how the time per byte grows with the length.

    The growth is that of the worst text, from 32 KB on.
    """
    sizes = [size for size in _KILOBYTES if size <= most_kilobytes]
    slowest, growth = dict.fromkeys(sizes, float("inf")), 0.0
    for begun in ("", BEGUN[name], BEGUN[name] + '"'):
        for piece in HOSTILE:
            speeds = [_megabytes_per_second(name, begun, piece, size) for size in sizes]
            for size, speed in zip(sizes, speeds, strict=True):
                slowest[size] = min(slowest[size], speed)
            if len(speeds) > 2:
                growth = max(growth, speeds[-2] / speeds[-1])
    shown = {f"megabytes_per_second_at_{size}_kilobytes": round(speed, 3) for size, speed in slowest.items()}
    return {**shown, "growth": round(growth, 2)}


def _megabytes_per_second(name: str, begun: str, piece: str, kilobytes: int) -> float:
    text = piece * (kilobytes * 1024 // len(piece))
    reader = parser(name)
    reader.feed(begun)
    started = time.process_time()
    for at in range(0, len(text), _PIECE_CHARS):
        reader.feed(text[at : at + _PIECE_CHARS])
    reader.finish()
    return len(text) / 1e6 / max(time.process_time() - started, 1e-9)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
