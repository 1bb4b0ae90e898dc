"""Counts of `instructions.py`, before and after, as a table in Markdown, and the floors of a step.

    python -m benchmarks.programs.instruction_table        # of benchmarks/results/instructions.json

A cell is of one SM: kernel, thread instructions of the main loop for each unit of work, registers, spilled bytes,
shared memory in KiB, loads of one turn by width in bits (LDGSTS copies to shared memory), and pipeline depth: stages
asked for, and groups of copies in flight where they were counted (those of prefill_attention end at barriers instead).
Where several weights have one use, the one with most instructions. Floors are in ms; see instructions.py.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.paths import RESULTS

Row = Mapping[str, Any]
NAMES = ("before", "after")
_STEPS = ("decode 1", "decode 64", "prefill 512", "prefill 4096")  # decode 8 has the kernels of decode 1
_POOLS = ("16-bit", "int8", "int4")


def kernel_table(counts: Mapping[str, Any]) -> str:
    """A line for each use of a kernel, a column for each SM and name."""
    kinds = ("matmul", "attention", "sampling")
    rows = {name: [row for kind in kinds for row in counts[name][kind]["rows"]] for name in NAMES}
    sms = sorted({row["sm"] for row in rows["after"]})
    lines = [
        f"| use, unit | {' | '.join(f'SM {sm} {name}' for sm in sms for name in NAMES)} |",
        f"|---|{'---|' * (len(sms) * len(NAMES))}",
    ]
    for use, unit, is_in in uses():
        cells = [_cell([row for row in rows[name] if row["sm"] == sm and is_in(row)]) for sm in sms for name in NAMES]
        lines.append(f"| {use}, {unit} | {' | '.join(cells)} |")
    return "\n".join(lines)


def uses() -> Iterator[tuple[str, str, Callable[[Row], bool]]]:
    """Each use: its name, its unit of work, and whether a row is of it."""
    for step in _STEPS:
        yield f"4-bit matmul, {step}", "weight", _begins(f"{step}, layers.")
    for step in _STEPS[:2]:
        yield f"8-bit head, {step}", "weight", _begins(f"{step}, lm_head,")
    for name, kernels in (("decode attention", ("decode",)), ("attention of prompts", ("ragged", "prefill"))):
        for pool in _POOLS:
            yield f"{name}, {pool} pool", "key", _begins(f"{pool} pool", *(f"{kernel}_attention" for kernel in kernels))
    for name, kernels in (("greedy", ("greedy",)), ("draw", ("bin_logits", "draw"))):
        yield name, "logit", _begins("", *kernels)


def _begins(prefix: str, *kernels: str) -> Callable[[Row], bool]:
    """Whether a row's form begins with a prefix, and its kernel is one of these, if any are given."""
    return lambda row: row["form"].startswith(prefix) and (not kernels or row["kernel"] in kernels)


def _cell(rows: Sequence[Row]) -> str:
    """The kernels of one use on one SM, each at its worst."""
    worst: dict[str, Row] = {}
    for row in rows:
        if row["kernel"] not in worst or row["per_unit"] > worst[row["kernel"]]["per_unit"]:
            worst[row["kernel"]] = row
    return "; ".join(_described(row) for row in worst.values()) or "-"


def _described(row: Row) -> str:
    loads = ", ".join(f"{count} {kind}" for kind, count in row["loads"].items() if kind.startswith("LDG"))
    spilled = f" ({row['spilled_bytes']} B spilled)" if row["spilled_bytes"] else ""
    sizes = f"{row['registers']}{spilled}, {row['shared_bytes'] / 1024:.0f} KiB"
    return f"`{row['kernel']}` {row['per_unit']:g}: {sizes}, {loads}, {row['stages']}/{row.get('in_flight', '-')}"


def floor_table(counts: Mapping[str, Any]) -> str:
    """Milliseconds of all matmuls of a step by issue, bytes and tensor cores, and of attention over a prompt."""
    known = {name: counts[name]["matmul floors"]["rows"] for name in NAMES}
    sms, steps = (list(dict.fromkeys(row[key] for row in known["after"])) for key in ("sm", "step"))
    heads = (f"SM {sm} {name}" for sm in sms for name in NAMES)
    lines = [f"| matmuls of | {' | '.join(heads)} |", f"|---|{'---|' * (len(sms) * len(NAMES))}"]
    for step in steps:
        of = {(name, row["sm"]): row for name in NAMES for row in known[name] if row["step"] == step}
        cells = (", ".join(f"{of[name, sm][f'{kind}_ms']:g}" for kind in ("issue", "bytes", "tensor"))
                 for sm in sms for name in NAMES)  # fmt: skip
        lines.append(f"| {step} | {' | '.join(cells)} |")
    return "\n".join(lines)


@click.command(help=__doc__)
@click.option("--input", "file", type=click.Path(path_type=Path, exists=True), default=RESULTS / "instructions.json")
def main(file: Path) -> None:
    """Print both tables."""
    counts = json.loads(file.read_text("utf-8"))["counts"]
    click.echo(f"{kernel_table(counts)}\n\n{floor_table(counts)}")


if __name__ == "__main__":
    main()
