"""Random problems of every kernel in Triton's interpreter against float64: needs no GPU.

    python -m benchmarks.programs.random_kernels --count 100 --seconds 500

Adds to benchmarks/results/random-kernels.json until every kernel has had `count` problems, or the time is over: run it
again for the rest. `worst` is the largest error over its limit, which fails above 1; kernels without one choose tokens,
or assert their errors (tests/kernels/test_attention_properties.py, test_prefill_attention.py,
test_sampling.py). A changed kernel starts anew.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from benchmarks.device import device_facts
from benchmarks.paths import RESULTS, ROOT

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


def kernels_digest() -> str:
    """Digest of the kernels' sources."""
    texts = (file.read_bytes() for file in sorted((ROOT / "kernels").glob("*.py")))
    return hashlib.sha256(b"".join(texts)).hexdigest()


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
    """The record in `output` if it is of the present kernels, else a new one."""
    facts = {"kernels": kernels_digest(), "triton": version("triton"), "torch": version("torch")}
    known = json.loads(output.read_text(encoding="utf-8")) if output.is_file() else {}
    if known.get("versions") == facts:
        return dict(known)
    rows: dict[str, Any] = {kernel: {"cases": 0, "failed": [], "worst": None, "seconds": 0.0} for kernel in kernels}
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
