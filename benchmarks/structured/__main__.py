"""Structured output: constrained generations, masks against brute force, times of masks.

python -m benchmarks.structured                                  # 1,000 schemas with 10 texts each, all parts
python -m benchmarks.structured --schemas 20 --brute-force 5     # small
python -m benchmarks.structured --output FILE                    # the result as JSON

Only the times need a quiet machine. Exit code 1 when a text was invalid or changed, or a mask wrong.
"""

import argparse
import json
import math
import sys
import sysconfig
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks.device import device_facts
from benchmarks.structured import brute_force, generations, mask_times

_SHOWN_PROBLEMS = 10
_TEXT_BYTES = 40_000_000  # of Python sources, to train a vocabulary on


def main(arguments: list[str]) -> int:
    """Run the parts and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=int, default=1000)
    parser.add_argument("--per-schema", type=int, default=10)
    parser.add_argument("--brute-force", type=int, default=100, help="schemas whose masks are compared")
    parser.add_argument("--timed", type=int, default=200, help="schemas whose masks are timed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no schema's texts are begun")
    parser.add_argument("--work", type=Path, default=Path("/tmp/ingot-structured"), help="where the vocabulary is kept")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args(arguments)
    started = time.monotonic()
    outcome, problems = generations.generate(given.schemas, given.per_schema, given.seed, given.seconds)
    compared = brute_force.compare(given.brute_force, given.seed)
    record: dict[str, object] = {
        "device": device_facts(),
        "seed": given.seed,
        "per_schema": given.per_schema,
        "generations": outcome.as_json(),
        "brute_force": asdict(compared),
        "times": _times(given.work, given.timed, given.seed) if given.timed else None,
        "seconds": round(time.monotonic() - started, 1),
    }
    print(*problems[:_SHOWN_PROBLEMS], sep="\n", file=sys.stderr)
    print(json.dumps(record, indent=1))
    if given.output:
        given.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return int(bool(problems) or bool(compared.wrongly_forbidden or compared.wrongly_allowed))


def _times(work: Path, num_schemas: int, seed: int) -> dict[str, object]:
    texts, total = [], 0
    for path in sorted(Path(sysconfig.get_path("purelib")).rglob("*.py")):
        texts.append(path)
        total += path.stat().st_size
        if total > _TEXT_BYTES:
            break
    return mask_times.measure(mask_times.train_tokenizer(work, texts), num_schemas, seed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
