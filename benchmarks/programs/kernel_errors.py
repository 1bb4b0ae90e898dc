"""The table of kernels: errors in Triton's interpreter against float64, and registers and sizes of the cubins per SM.

    python -m benchmarks.programs.kernel_errors               # 15 minutes
    python -m benchmarks.programs.kernel_errors --only errors # minutes
    python -m benchmarks.programs.kernel_errors --only 80 90  # the cubins of these SMs

Needs no GPU. The cases are those of tests/kernels; bfloat16 is not among them, because the interpreter lacks it. What
is left out with --only stays as it was in the file.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.device import device_facts
from benchmarks.paths import RESULTS
from ingot.pipeline.targets.table import SMS

Row = dict[str, Any]
ERRORS = "errors"
LONG_BLOCK = 128  # tokens of a block of the KV pool, in rows of kernel_cubins.py whose forms end with this:
LONG_BLOCKS = f", blocks of {LONG_BLOCK}"
OUTPUT = RESULTS / "kernel-errors.json"


def errors() -> list[Row]:
    """Run every case in the interpreter. This process cannot compile kernels afterwards."""
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.kernels.all_cases import all_cases  # reads the variable above
    from tests.simulators.triton_interpreter import patch_language_once

    patch_language_once()
    rows = []
    for case in all_cases():
        absolute, relative = case.errors()
        facts = {"kernel": case.kernel, "shape": case.shape, "precision": case.precision, "limit": case.limit}
        rows.append({**facts, "absolute_error": absolute, "relative_error": relative})
    return rows


def cubins(sms: Iterable[str]) -> list[Row]:
    """Run benchmarks.programs.kernel_cubins, in a process that compiles."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.programs.kernel_cubins", "--sm", *sms]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    rows: list[Row] = json.loads(done.stdout)
    return rows


def error_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """The worst case of each kernel and precision, in Markdown."""
    worst: dict[tuple[str, str], Mapping[str, Any]] = {}
    counts: dict[tuple[str, str], int] = {}
    for row in rows:
        key = row["kernel"], row["precision"]
        counts[key] = counts.get(key, 0) + 1
        if key not in worst or row["relative_error"] > worst[key]["relative_error"]:
            worst[key] = row
    lines = [
        "| kernel | precision | cases | worst case | absolute | relative | limit |",
        "|---|---|---|---|---|---|---|",
    ]
    for (kernel, precision), row in worst.items():
        numbers = (f"{row[name]:.1e}" for name in ("absolute_error", "relative_error", "limit"))
        lines.append(
            f"| {kernel} | {precision} | {counts[kernel, precision]} | {row['shape']} | {' | '.join(numbers)} |"
        )
    return "\n".join(lines)


def cubin_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Registers, shared KiB and cubin KiB of each form, a column per SM, in Markdown; long blocks in a sentence."""
    sms = sorted({row["sm"] for row in rows})
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for row in (row for row in rows if LONG_BLOCKS not in row["form"]):
        spilled = f" ({row['spilled_bytes']} B spilled)" if row["spilled_bytes"] else ""
        size = f"{row['registers']}{spilled}, {row['shared_bytes'] / 1024:.0f}, {row['cubin_bytes'] / 1024:.0f}"
        cells.setdefault((row["kernel"], row["form"]), {})[row["sm"]] = size
    lines = [f"| kernel | form | {' | '.join(f'SM {sm}' for sm in sms)} |", "|---|---|" + "---|" * len(sms)]
    for (kernel, form), found in cells.items():
        lines.append(f"| {kernel} | {form} | {' | '.join(found.get(sm, '-') for sm in sms)} |")
    return "\n".join([*lines, "", _long_blocks([row for row in rows if LONG_BLOCKS in row["form"]])])


def _long_blocks(rows: Sequence[Mapping[str, Any]]) -> str:
    """Which cubins for long blocks spill registers."""
    spilling = [
        f"{row['kernel']} ({row['form'].removesuffix(LONG_BLOCKS)}) for SM {row['sm']} {row['spilled_bytes']} bytes"
        for row in rows
        if row["spilled_bytes"]
    ]
    outcome = f"{len(spilling)} spill: {', '.join(spilling)}" if spilling else "none spills"
    return f"Of {len(rows)} cubins for blocks of {LONG_BLOCK} tokens {outcome}."


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--only", choices=[ERRORS, *map(str, SMS)], nargs="+", default=[ERRORS, *map(str, SMS)])
    given = parser.parse_args()
    output: Path = given.output
    sms = [name for name in given.only if name != ERRORS]
    before = json.loads(output.read_text("utf-8")) if output.is_file() else {"errors": [], "cubins": []}
    kept = [row for row in before["cubins"] if str(row["sm"]) not in sms]
    compiled = sorted([*kept, *(cubins(sms) if sms else [])], key=lambda row: int(row["sm"]))
    found = errors() if ERRORS in given.only else before["errors"]
    print(error_table(found), cubin_table(compiled), sep="\n\n")
    versions = {name: version(name) for name in ("triton", "torch", "numpy")}
    report = {"device": device_facts(), "versions": versions, "errors": found, "cubins": compiled}
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if any(row["relative_error"] > row["limit"] for row in found):
        sys.exit("a kernel is further from float64 than its limit")


if __name__ == "__main__":
    main()
