"""Random problems of every kernel in Triton's interpreter against float64: needs no GPU.

    python -m benchmarks.programs.random_kernels --count 100 --seconds 500

Adds to benchmarks/results/random-kernels.json until every kernel has had `count` problems, or the time is over: run it
again for the rest. `worst` is the largest error over its limit, which fails above 1; kernels without one choose tokens,
or assert their errors (tests/kernels/test_attention_properties.py, test_prefill_attention.py,
test_sampling.py). A kernel starts anew when its source, or that of a kernel it takes functions from, has changed.
"""

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from benchmarks.device import device_facts
from benchmarks.paths import RESULTS, ROOT
from ingot.pipeline.targets.cuda.kernel_signatures import SIGNATURES

_IMPORTS = re.compile(r"^from ingot\.kernels\.(\w+) import", re.MULTILINE)
_FROM_PACKAGE = re.compile(r"^from ingot\.kernels import ([\w, ]+)$", re.MULTILINE)
OUTPUT = RESULTS / "random-kernels.json"
Run = Callable[[int], float | None]  # seed -> error over its limit; AssertionError for a wrong result


def runs() -> Mapping[str, Run]:
    """Every kernel. This process cannot compile afterwards."""
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.simulators.triton_interpreter import use_interpreter

    use_interpreter()
    from tests.kernels import (
        packed_cases,
        random_cases,
        test_attention_properties,
        test_prefill_attention,
        test_sampling,
    )

    def packed(kernel: str, seed: int) -> float:
        return packed_cases.error(kernel, seed) / packed_cases.LIMITS[kernel]

    attention = test_attention_properties
    return {
        **{kernel: partial(random_cases.share_of_limit, kernel) for kernel in random_cases.RUNS},
        **{kernel: partial(packed, kernel) for kernel in packed_cases.RUNS},
        "decode_attention": (attention.test_decode_attention_is_that_of_float64_however_many_programs_share_the_chunks),
        "ragged_attention": attention.test_ragged_attention_is_that_of_float64,
        "prefill_attention": test_prefill_attention.test_prefill_attention_is_that_of_float64,
        **dict.fromkeys(("bin_logits", "draw"), test_sampling.test_random_rows_are_sampled_as_on_the_host),
    }


def source_digest(kernel: str) -> str:
    """Digest of a kernel's source and of all sources in kernels/ that it imports."""
    found, waiting = dict[str, bytes](), [SIGNATURES[kernel].function.partition(".")[0]]
    while waiting:
        module = waiting.pop()
        file = ROOT / "kernels" / f"{module}.py"
        if module not in found and file.is_file():
            found[module] = file.read_bytes()
            waiting += _IMPORTS.findall(found[module].decode())
            waiting += [name for names in _FROM_PACKAGE.findall(found[module].decode()) for name in names.split(", ")]
    return hashlib.sha256(b"".join(found[module] for module in sorted(found))).hexdigest()


def run_one(run: Run, seed: int, row: dict[str, Any]) -> None:
    """Add a problem to a kernel's row."""
    start = time.process_time()
    try:
        share = run(seed)
    except AssertionError:
        share = float("inf")
    row["cases"] += 1
    row["seconds"] = round(row["seconds"] + time.process_time() - start, 4)
    if share is not None:
        row["worst"] = max(row["worst"] or 0.0, share if share < float("inf") else 1e30)
    if share is not None and share > 1:
        row["failed"].append(seed)


def continued(output: Path, kernels: Mapping[str, Run]) -> dict[str, Any]:
    """The record in `output`, with new rows for kernels whose source is not the one that was tried."""
    facts = {"triton": version("triton"), "torch": version("torch")}
    known = json.loads(output.read_text(encoding="utf-8")) if output.is_file() else {}
    kept = known.get("results", {}) if known.get("versions") == facts else {}
    rows: dict[str, Any] = {}
    for kernel in kernels:
        source, row = source_digest(kernel), kept.get(kernel, {})
        new = {"source": source, "cases": 0, "failed": [], "worst": None, "seconds": 0.0}
        rows[kernel] = row if row.get("source") == source else new
    return {"device": device_facts(), "versions": facts, "results": rows}


@click.command(help=__doc__)
@click.option("--count", default=100, help="Problems of each kernel.")
@click.option("--seconds", default=500.0, help="Stop after so long.")
@click.option("--output", type=click.Path(path_type=Path), default=OUTPUT)
def main(count: int, seconds: float, output: Path) -> None:
    """Run, write after every round of one problem each, print a line per kernel; exit status 1 if one failed."""
    end, kernels = time.monotonic() + seconds, runs()
    record = continued(output, kernels)
    for seed in range(count):
        for kernel, run in kernels.items():
            if record["results"][kernel]["cases"] == seed and time.monotonic() < end:
                run_one(run, seed, record["results"][kernel])
        output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for kernel, row in record["results"].items():
        worst = "" if row["worst"] is None else f", worst {row['worst']:.2f} of the limit"
        click.echo(f"{kernel}: {row['cases']} problems, failed {row['failed']}{worst}, {row['seconds']:.1f} s")
    raise SystemExit(any(row["failed"] for row in record["results"].values()))


if __name__ == "__main__":
    main()
