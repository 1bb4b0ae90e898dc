"""Check and measure Ingot's programs on this GPU, next to torch with the same shapes in the same run.

    python -m benchmarks.gpu.programs                                # once, on any machine: programs, cases, demo
    PYTHONPATH=src python3 -m benchmarks.gpu --output $OUT           # on the GPU: under 10 minutes
    PYTHONPATH=src python3 -m benchmarks.gpu --output $OUT --resume journal.jsonl      # what was left
    PYTHONPATH=src:. python3 -m benchmarks.gpu --dry-run             # anywhere: every part, tiny; times are meaningless

Each part runs in a process of its own, killed with its children when it, or one of its tasks, takes too long. After a
crash, a hang or a lost context the part goes on with its next task in a new process. Every event is on disk in
journal.jsonl before the next one; the report is written after every part.

Exit status: 0 when every task of every part ran and nothing is beyond its limit; 1 when a task failed or a result is
wrong; 3 when something did not run.
"""

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from benchmarks.device import device_facts
from benchmarks.gpu.figures import goals, peaks_of, summary
from benchmarks.gpu.journal import FILE, Event, Journal, PartLog
from benchmarks.gpu.parts import BY_DEFAULT, COMMIT_FILE, PARTS, WHEELS, Part, Record
from benchmarks.gpu.watchdog import Watched
from benchmarks.gpu.worker import LOST
from benchmarks.paths import GPU_PROGRAMS, RESULTS, ROOT

_PACKAGES = ("ingot-llm", "numpy", "torch", "triton", "cuda-bindings")
_LEAST_SECONDS = 5.0  # with less time left, no process starts
_START_SECONDS = 90.0  # for imports, and to list the tasks
GRACE_SECONDS = 10.0  # beyond a limit, before the process is killed
_INCOMPLETE = 3
SITE = "site"  # folder of unpacked wheels


@dataclass
class Bout:
    """One run of the benchmark: where things are, what happened, and until when it may go on."""

    journal: Journal
    facts: Record
    programs: Path
    scratch: Path
    output: Path
    deadline: float  # time.monotonic()
    dry_run: bool = False
    plant: Sequence[str] = ()
    parts: Mapping[str, Part] = field(default_factory=lambda: PARTS)

    def run(self, name: str) -> PartLog:
        """Run what is left of a part, in as many processes as it takes, and write the report."""
        log = self.journal.parts.setdefault(name, PartLog())
        if log.is_listed and not log.left and not log.broken:
            return log  # by the run that this one resumes
        begin = time.monotonic()
        limit = min(self.deadline, begin + self.parts[name].seconds)
        while limit - time.monotonic() > _LEAST_SECONDS and self._goes_on(name, limit):
            pass
        if self.parts[name].is_proof and log.is_listed and not log.names:
            error = f"nothing to do in {self.programs}: run `python -m benchmarks.gpu.programs` first"
            self.journal.write(name, {"event": "broken", "error": error})
        self.journal.write(name, {"event": "done", "took": time.monotonic() - begin})
        click.echo(f"{name}: {log.status}, {len(log.all_records)} records, {log.seconds:.1f} s", err=True)
        self.write_report()
        return log

    def _goes_on(self, name: str, limit: float) -> bool:
        """Run one process of a part until it ends or is killed; return whether another one should go on."""
        log = self.journal.parts[name]
        command = [sys.executable, "-m", "benchmarks.gpu.worker", json.dumps(self._order(name, limit))]
        most = limit + GRACE_SECONDS
        own = time.monotonic() + _START_SECONDS  # limit of what runs: the start, then each task
        watched = Watched(command, self._environment(name), min(most, own))
        for event in filter(None, map(_event, watched.lines())):
            self.journal.write(name, event)
            if event["event"] != "record":
                own = time.monotonic() + event.get("seconds", _START_SECONDS) + GRACE_SECONDS
                watched.limit = min(most, own)
        if log.running is None and watched.returncode in (0, LOST):
            return watched.returncode == LOST
        if watched.was_killed and own > most:
            self._end(name, log, None, f"cut off after the part's {self.parts[name].seconds:.0f} s")
            return False
        self._end(name, log, watched.report(), None)
        return log.broken is None

    def _end(self, name: str, log: PartLog, error: str | None, skipped: str | None) -> None:
        """Note how the running task ended, or the part where none was running."""
        if log.running is not None:
            end = {"event": "end", "task": log.running, "took": None, "error": error, "skipped": skipped}
            self.journal.write(name, end)
        elif error is not None:
            self.journal.write(name, {"event": "broken", "error": error})

    def _order(self, name: str, limit: float) -> dict[str, object]:
        """The worker's order."""
        log, part = self.journal.parts[name], self.parts[name]
        return {
            "part": name,
            "function": part.function,
            "needs_device": part.needs_device,
            "ended": sorted(log.ended - log.skipped.keys()),
            "only": None,
            "failed": [(one, task) for one in part.failed_in for task in self._failed(one)],
            "programs": str(self.programs),
            "scratch": str(self.scratch),
            "output": str(self.output),
            "deadline": limit,
            "peaks": asdict(peaks_of(self.journal.records)),
            "dry_run": self.dry_run,
            "plant": list(self.plant),
        }

    def _failed(self, name: str) -> list[str]:
        """Tasks of a part that failed, or whose results are wrong."""
        log = self.journal.parts.get(name, PartLog())
        return [task for task in log.names if task in log.errors or task in log.wrong]

    def _environment(self, name: str) -> dict[str, str]:
        """The worker's environment: import paths, and what the part reads at import."""
        paths = [str(ROOT / "src"), str(ROOT), str(self.scratch / SITE), os.environ.get("PYTHONPATH", "")]
        extra = {**self.parts[name].environment, **({"TRITON_INTERPRET": "1"} if self.dry_run else {})}
        return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **extra}

    def write_report(self) -> Path:
        """Write the report; the file is named after the GPU, once that is known."""
        names = [str(record["device"]) for record in self.journal.records if "device" in record]
        word = "dry" if self.dry_run else names[0] if names else "unknown"
        file = self.output / f"gpu-{word.lower().replace(' ', '-')}.json"
        content = {**self.facts, "goals": self.goals(), "parts": self.journal.summaries()}
        self.output.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(".part")
        temporary.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
        temporary.replace(file)
        return file

    def goals(self) -> list[Record]:
        """The goals, the first of which counts what is wrong in the parts that prove the kernels."""
        proofs = [name for name, part in self.parts.items() if part.is_proof and part.by_default]
        return goals(self.journal.records, wrong_count([self.journal.parts.get(name) for name in proofs]))


def unpack_wheels(programs: Path, folder: Path) -> None:
    """Unpack the wheels that are packed with the programs into a folder of the workers' import path."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted((programs / WHEELS).glob("*.whl")):
        with zipfile.ZipFile(file) as archive:
            archive.extractall(folder)


def wrong_count(proofs: Sequence[PartLog | None]) -> float | None:
    """Results beyond their limits, failed tasks and broken parts; None if that is 0 and something did not run."""
    logs = [log or PartLog() for log in proofs]
    beyond = sum(one.get("within") is False for log in logs for one in log.all_records)
    failed = sum(len(log.errors) + (log.broken is not None) for log in logs)
    if beyond + failed == 0 and any(log.status != "done" for log in logs):
        return None
    return float(beyond + failed)


@click.command(help=__doc__)
@click.option("--parts", default=",".join(BY_DEFAULT), show_default=True, help="Which, in this order.")
@click.option("--budget", default=560.0, show_default=True, help="Seconds for all parts.")
@click.option(
    "--programs",
    type=click.Path(path_type=Path),
    default=GPU_PROGRAMS,
    help="What benchmarks.gpu.programs packed.",
)
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS, help="Folder for journal and report.")
@click.option(
    "--resume", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="Journal of an earlier run."
)
@click.option("--dry-run", is_flag=True, help="Without a GPU, on tiny shapes; times are meaningless.")
@click.option("--plant", default="", help="Faults for a dry run, separated by commas; see dry_machine.py.")
def main(
    parts: str, budget: float, programs: Path, output: Path, resume: Path | None, dry_run: bool, plant: str
) -> None:
    """Run the parts and print the summary."""
    chosen, planted = parts.split(","), [name for name in plant.split(",") if name]
    unknown = [name for name in chosen if name not in PARTS]
    if unknown:
        raise click.UsageError(f"unknown part {unknown[0]!r}; parts: {', '.join(PARTS)}")
    if planted:
        _require_faults(planted, dry_run)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(f"ended by SIGTERM; resume from {output / FILE}"))
    with TemporaryDirectory() as scratch:
        if dry_run:
            programs = Path(scratch) / "programs"
            import_module("benchmarks.gpu.programs.dry_run").write_programs(programs)
        deadline = time.monotonic() + budget
        journal = Journal(output / FILE, resume)
        unpack_wheels(programs, Path(scratch) / SITE)
        bout = Bout(journal, _facts(budget, dry_run), programs, Path(scratch), output, deadline, dry_run, planted)
        for name in chosen:
            bout.run(name)
        file = bout.write_report()
    logs = {name: journal.parts[name] for name in chosen}
    click.echo(summary(journal.records, bout.goals(), logs))
    click.echo(f"written to {file}" + (" (a dry run: times mean nothing)" if dry_run else ""))
    sys.exit(exit_status(logs.values()))


def _require_faults(planted: Sequence[str], dry_run: bool) -> None:
    """Raise UsageError for unknown faults, and for any on a GPU."""
    if not dry_run:
        raise click.UsageError("--plant needs --dry-run: faults are planted in a device that interprets kernels")
    known: Mapping[str, object] = import_module("benchmarks.gpu.dry_machine").FAULTS
    unknown = [name for name in planted if name not in known]
    if unknown:
        raise click.UsageError(f"unknown fault {unknown[0]!r}; faults: {', '.join(known)}")


def exit_status(logs: Iterable[PartLog]) -> int:
    """0: all is done and right; 1: something failed or is wrong; 3: something did not run."""
    states = {log.status for log in logs}
    if states & {"failed", "wrong"}:
        return 1
    return _INCOMPLETE if "incomplete" in states else 0


def _event(line: str) -> Event | None:
    """The event of a line of the worker's output; None for other output."""
    if not line.startswith('{"event"'):
        return None
    try:
        event: Event = json.loads(line)
    except json.JSONDecodeError:  # the process was killed within the line
        return None
    return event


def _facts(budget: float, dry_run: bool) -> Record:
    return {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "dry_run": dry_run,
        "commit": _commit(),
        "driver": _said(["nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm,memory.total", "--format=csv"]),
        "host": device_facts(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "budget_seconds": budget,
    }


def _commit() -> str | None:
    """The commit of the code, in a checkout or in a copy that the packing command made."""
    file = ROOT / COMMIT_FILE
    return file.read_text("utf-8").strip() if file.is_file() else _said(["git", "rev-parse", "HEAD"])


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
