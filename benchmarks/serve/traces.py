"""Traces replayed by their timestamps against `ingot serve`, by the tool of examples/load.

    python -m benchmarks.serve.traces [ARTIFACT] --traces ../shared/data/traces [--output FILE]

Each trace is replayed against a server of its own, with lengths scaled to the demo model's context and a speed that the
server bears. The sender is on the same processors: `late_seconds` says how late it was. `load_average_before` counts
the processes that ran before the benchmark.
"""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from benchmarks.cpu.serve import server
from benchmarks.device import device_facts
from benchmarks.paths import ROOT


@dataclass(frozen=True)
class Trace:
    """A file, and how it is replayed."""

    file: str
    scale: float
    speed: float

    def arguments(self, seconds: float) -> list[str]:
        """Options of the replay; refused requests return once."""
        options = ("--scale", self.scale, "--speed", self.speed, "--duration", seconds, "--retry", 1)
        return [f"{each:g}" if isinstance(each, float) else str(each) for each in options]


TRACES = (
    Trace("conversation_trace.jsonl", scale=1 / 32, speed=1.0),  # 16 tokens of a block: one of the engine's
    Trace("azure2023-code.csv", scale=1 / 16, speed=3.0),
)


def replay(artifact: str, folder: Path, trace: Trace, seconds: float) -> dict[str, Any]:
    """The command lines and the report of one trace. RuntimeError when the replay wrote no report."""
    with TemporaryDirectory() as scratch, server(artifact) as url:
        report = Path(scratch) / "report.json"
        options = [*trace.arguments(seconds), "--url", url, "--json", str(report)]
        command = [sys.executable, "-m", "examples.load.replay", str(folder / trace.file), *options]
        done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE)
        if not report.is_file():
            raise RuntimeError(f"the replay of {folder / trace.file} ended with {done.returncode} and no report")
        click.echo(done.stdout)
        return {"commands": commands(artifact, trace, seconds), **json.loads(report.read_text("utf-8"))}


def commands(artifact: str, trace: Trace, seconds: float) -> list[str]:
    """The command lines, as a reader would type them."""
    shown = [trace.file, *trace.arguments(seconds)]
    return [f"ingot serve {Path(artifact).name}", f"python -m examples.load.replay {shlex.join(shown)}"]


@click.command(help=__doc__)
@click.argument("artifact", default=str(ROOT / "artifacts/demo"))
@click.option("--traces", "folder", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True)
@click.option("--seconds", default=90.0, show_default=True, help="Length of each replay.")
@click.option("--output", type=click.Path(path_type=Path), default=ROOT / "benchmarks/results/serve-traces.json")
def main(artifact: str, folder: Path, seconds: float, output: Path) -> None:
    """Replay, print and write."""
    load = os.getloadavg()[0]
    runs = {trace.file: replay(artifact, folder.resolve(), trace, seconds) for trace in TRACES}
    facts = {"device": device_facts(), "artifact": Path(artifact).name, "load_average_before": round(load, 1)}
    output.write_text(json.dumps({**facts, "runs": runs}, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
