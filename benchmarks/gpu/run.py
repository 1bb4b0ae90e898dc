"""Check and measure Ingot's programs on this GPU, next to torch with the same shapes in the same run.

    python -m benchmarks.gpu.programs                                # once, on any machine: programs, cases, demo
    PYTHONPATH=src python3 -m benchmarks.gpu --output $OUT           # on the GPU: under 8 minutes
    PYTHONPATH=src:. python3 -m benchmarks.gpu --dry-run             # anywhere: every part, tiny; times are meaningless

Each part runs in a process of its own, so that one that fails or breaks the CUDA context does not end the others. The
JSON is written after every figure, so that a kill at a time limit loses nothing; a part that does not fit the budget is
marked as skipped.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer

import click

from benchmarks.device import device_facts
from benchmarks.gpu.device import Bench, Gpu, Machine
from benchmarks.gpu.figures import Peaks, Record, goals, peaks_of, summary
from benchmarks.paths import GPU_PROGRAMS, RESULTS, ROOT

PARTS = {
    "hardware": "benchmarks.gpu.hardware:hardware",
    "kernels": "benchmarks.gpu.kernel_cases:kernel_cases",
    "check": "benchmarks.gpu.check:check",
    "demo": "benchmarks.gpu.demo:demo",
    "steps": "benchmarks.gpu.steps:steps",
    "invariance": "benchmarks.gpu.invariance:invariance",
    "torch": "benchmarks.gpu.torch_peer:peers",
    "gap": "benchmarks.gpu.gap:gap",
    "offload": "benchmarks.gpu.offload:offload",
    "torch-compile": "benchmarks.gpu.torch_peer:compiled_peers",
    "tune": "benchmarks.gpu.tune:tune",
    "attention": "benchmarks.gpu.attention:attention",
}
BY_DEFAULT = tuple(
    name for name in PARTS if name not in ("tune", "attention")
)  # these need Triton's compiler on the GPU's machine
_PACKAGES = ("ingot", "numpy", "torch", "triton", "cuda-bindings")
_INTERPRETED = ("kernels", "check")  # launches are caught in Triton's interpreter, or compared with it
_MOST_SECONDS = {"kernels": 60.0, "check": 100.0, "demo": 60.0}  # limits, so that time is left for measurements
_LEAST_SECONDS = 5.0  # with less time left, no part starts
_LAST_LINES = 25


@dataclass
class Report:
    """Everything measured so far, and the file that it is written to."""

    folder: Path
    facts: Record
    parts: dict[str, Record] = field(default_factory=dict)

    @property
    def records(self) -> list[Record]:
        """The figures of all parts."""
        found: list[Record] = []
        for part in self.parts.values():
            records = part["records"]
            assert isinstance(records, list)
            found += records
        return found

    def write(self) -> Path:
        """Write everything; the file is named after the GPU, once that is known."""
        names = [str(record["device"]) for record in self.records if record.get("figure") == "hardware"]
        word = "dry" if self.facts["dry_run"] else names[0] if names else "unknown"
        file = self.folder / f"gpu-{word.lower().replace(' ', '-')}.json"
        content = {**self.facts, "goals": goals(self.records), "parts": self.parts}
        self.folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
        return file


@click.command(help=__doc__)
@click.option("--parts", default=",".join(BY_DEFAULT), show_default=True, help="Which, in this order.")
@click.option("--budget", default=460.0, show_default=True, help="Seconds for all parts.")
@click.option(
    "--programs", type=click.Path(path_type=Path), default=GPU_PROGRAMS, help="What benchmarks.gpu.programs packed."
)
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS, help="Folder for the JSON.")
@click.option("--dry-run", is_flag=True, help="Without a GPU, on tiny shapes; times are meaningless.")
@click.option("--child", hidden=True, help="Run one part: its order as JSON.")
def main(parts: str, budget: float, programs: Path, output: Path, dry_run: bool, child: str | None) -> None:
    """Run the parts and print the summary."""
    if child is not None:
        run_part(**json.loads(child))
        return
    unknown = [name for name in parts.split(",") if name not in PARTS]
    if unknown:
        raise click.UsageError(f"unknown part {unknown[0]!r}; parts: {', '.join(PARTS)}")
    report = Report(output, _facts(budget, dry_run))
    with TemporaryDirectory() as scratch:
        if dry_run:
            programs = Path(scratch) / "programs"
            import_module("benchmarks.gpu.dry_run").write_programs(programs)
        for name in parts.split(","):
            _part(report, name, programs, Path(scratch), dry_run)
    file = report.write()
    click.echo(summary(report.records, goals(report.records)))
    click.echo(f"written to {file}" + (" (a dry run: times mean nothing)" if dry_run else ""))
    failed = [name for name, part in report.parts.items() if part["status"] == "failed"]
    if failed:
        raise click.ClickException(f"parts failed: {', '.join(failed)}; see `stderr` of each in {file}")


def run_part(
    part: str, programs: str, scratch: str, output: str, seconds: float, peaks: dict[str, float], dry_run: bool
) -> None:
    """Run one part in this process; print each record as a line of JSON."""
    machine: Machine = import_module("benchmarks.gpu.dry_run").DryMachine() if dry_run else Gpu()
    paths = (Path(programs), Path(scratch), Path(output))
    bench = Bench(machine, *paths, time.monotonic() + seconds, Peaks(**peaks))
    module, _, name = PARTS[part].partition(":")
    generate: Callable[[Bench], Iterator[Record]] = getattr(import_module(module), name)
    for record in generate(bench):
        print(json.dumps(record), flush=True)


def _part(report: Report, name: str, programs: Path, scratch: Path, dry_run: bool) -> None:
    """Run a part, keep its records as they come, and record how it ended."""
    records: list[Record] = []
    entry: Record = {"status": "running", "records": records}
    report.parts[name] = entry
    left = _budget_left(report)
    if left < _LEAST_SECONDS:
        entry["status"] = "skipped: the budget of seconds is spent"
        return
    begin = time.monotonic()
    paths = {"programs": str(programs), "scratch": str(scratch), "output": str(report.folder)}
    seconds = min(
        left, _MOST_SECONDS.get(name, left)
    )  # the part keeps to these itself; it is killed when none are left
    order = {"part": name, **paths, "seconds": seconds, "dry_run": dry_run}
    for record in _lines(order | {"peaks": asdict(peaks_of(report.records))}, left, entry):
        records.append(record)
        report.write()
    entry["seconds"] = round(time.monotonic() - begin, 1)
    click.echo(f"{name}: {entry['status']}, {len(records)} records, {entry['seconds']} s", err=True)
    report.write()


def _lines(order: Record, seconds: float, entry: Record) -> Iterator[Record]:
    """The records that a child process prints; it is killed when the time is up."""
    command = [sys.executable, "-m", "benchmarks.gpu.run", "--child", json.dumps(order)]
    pipe, environment = subprocess.PIPE, _environment(order)
    with TemporaryDirectory() as folder, (Path(folder) / "stderr").open("w+") as errors:
        with subprocess.Popen(command, stdout=pipe, stderr=errors, text=True, env=environment) as child:
            timer = Timer(seconds, child.kill)
            timer.start()
            assert child.stdout is not None
            try:
                yield from (json.loads(line) for line in child.stdout if line.startswith("{"))
            finally:
                timer.cancel()
                child.kill()
        errors.seek(0)
        said = errors.read().splitlines()[-_LAST_LINES:]
    entry["status"] = "done" if child.returncode == 0 else "failed"
    if child.returncode:
        entry["stderr"] = said
        click.echo("\n".join(said), err=True)


def _environment(order: Record) -> dict[str, str]:
    """The child's environment: import paths, and whether Triton interprets kernels, which it reads at import."""
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    extra = {"TRITON_INTERPRET": "1"} if order["dry_run"] or order["part"] in _INTERPRETED else {}
    if order["part"] == "check":
        extra["INGOT_CUDA_BLOCKING"] = "1"  # launches one by one, none from a graph
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **extra}


def _budget_left(report: Report) -> float:
    begun, budget = report.facts["begun_monotonic"], report.facts["budget_seconds"]
    assert isinstance(begun, float)
    assert isinstance(budget, float)
    return begun + budget - time.monotonic()


def _facts(budget: float, dry_run: bool) -> Record:
    return {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "dry_run": dry_run,
        "commit": _said(["git", "rev-parse", "HEAD"]),
        "driver": _said(["nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm,memory.total", "--format=csv"]),
        "host": device_facts(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "budget_seconds": budget,
        "begun_monotonic": time.monotonic(),
    }


def _said(command: Sequence[str]) -> str | None:
    """Output of a program; None if it is missing or fails."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
