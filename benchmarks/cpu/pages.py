"""Decode speed by how the weights' pages came about: after a build, a copy, a drop, on tmpfs, overlayfs, shared.

    python -m benchmarks.cpu.pages --build

Each way has a copy of the artifact and a process of its own; they take turns, one thread each, so that disturbances
affect all alike; the ratio is of tokens per second of processor time, which waiting for a busy core leaves out.
--realtime decodes at the priority of real time, for a machine that others use (needs the right to do so).

"Plain" ways map the file and leave its pages as they are. --build builds the artifacts anew, so that "after a build" is
what it says. Overlayfs is mounted where this process may do so, and left out by name where not.
"""

import json
import multiprocessing
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import click

from benchmarks.cpu.machine import measure_read_bandwidth, read_memory
from benchmarks.cpu.rounds import interval, order_of_round
from benchmarks.device import device_facts
from benchmarks.kv.synthetic_artifacts import WORK_FOLDER, synthetic_artifact
from benchmarks.paths import RESULTS
from benchmarks.shapes import SHAPES
from ingot.artifact import open_artifact
from ingot.artifact.page_cache import drop_from_cache
from ingot.artifact.programs.cpu_program import WEIGHTS_FILE
from ingot.artifact.safetensors import MappedTensors, map_whole
from ingot.file_systems import file_system
from ingot.pipeline.checkpoint.safetensors_writer import SafetensorsWriter
from ingot.runtime.asking.outputs import require_success
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.cpu import native_executor
from ingot.runtime.cpu.weight_pages import PlacedWeights, SystemMemory, WeightPages, setting
from ingot.runtime.engine.engine import Engine

_PROMPT = list(range(1, 65))
_STEPS_A_ROUND = 24
_SETTINGS = ("enabled", "defrag", "shmem_enabled")


@dataclass(frozen=True)
class Way:
    """A folder with the artifact, and how it is loaded.

    weights   option of Engine.load; "plain": mapped as it is
    """

    name: str
    folder: Path
    weights: str


@dataclass
class Running:
    """A process with an engine."""

    way: Way
    process: Any
    pipe: Connection
    facts: dict[str, Any]
    rates: list[float]
    work_rates: list[float]

    def decode(self) -> None:
        """Decode some tokens; keep the rates by the clock and by the processor's time."""
        self.pipe.send("decode")
        for rates, rate in zip((self.rates, self.work_rates), self.pipe.recv(), strict=True):
            rates.append(rate)


def serve(pipe: Connection, folder: str, weights: str, priority: int) -> None:
    """The process: load, then decode on each request."""
    started = time.perf_counter()
    artifact = open_artifact(folder)
    opened = time.perf_counter()
    plain = weights == "plain"
    with ExitStack() as stack:
        if plain:
            stack.enter_context(patch.object(native_executor, "place_weights", _plain))
        engine = Engine.load(
            artifact,
            kv_blocks=64,
            num_threads=1,
            max_sequences=1,
            prefix_cache=False,
            weights="auto" if plain else weights,  # type: ignore[arg-type]
        )
    loaded = time.perf_counter()
    pages = engine._executor.weight_pages  # type: ignore[attr-defined]  # for the report alone
    engine.add(_PROMPT, SamplingParams(max_tokens=900, ignore_eos=True))
    for _ in range(4):
        require_success(engine.step())
    first = time.perf_counter()
    seconds = {"verify_seconds": opened - started, "load_seconds": loaded - opened, "first_seconds": first - loaded}
    pipe.send(seconds | {"how": str(pages)})
    while pipe.recv() == "decode":
        if priority:
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(priority))
        started, worked = time.perf_counter(), time.process_time()
        for _ in range(_STEPS_A_ROUND):
            require_success(engine.step())
        found = _STEPS_A_ROUND / (time.perf_counter() - started), _STEPS_A_ROUND / (time.process_time() - worked)
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        pipe.send(found)
    pipe.send(None)


def _plain(file: Path, *_: object) -> PlacedWeights:
    content = map_whole(file)
    return PlacedWeights(content, WeightPages("mapped", len(content)))


@contextmanager
def running(way: Way, priority: int) -> Iterator[Running]:
    """Start a process for a way of loading, and end it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, str(way.folder), way.weights, priority), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Running(way, process, ours, ours.recv(), [], [])
    finally:
        ours.send("end")
        process.join()


def huge_megabytes(pid: int, folder: Path) -> dict[str, float]:
    """Of a process's mappings of the weights, and of its own memory: resident, proportional and in huge pages."""
    found = {"rss": 0, "pss": 0, "huge": 0, "own_huge": 0}
    kind = ""
    for line in Path(f"/proc/{pid}/smaps").read_text("utf-8").splitlines():
        name, _, rest = line.partition(":")
        if "-" in name and " " in name:
            kind = "file" if "weights.safetensors" in line else "" if "/" in line else "own"
        elif kind == "file" and name in ("Rss", "Pss", "FilePmdMapped", "ShmemPmdMapped"):
            found["huge" if "Pmd" in name else name.lower()] += int(rest.split()[0])
        elif kind == "own" and name == "AnonHugePages":
            found["own_huge"] += int(rest.split()[0])
    return {name: round(kib * 1024 / 1e6, 1) for name, kib in found.items()}


@contextmanager
def overlay(lower: Path, work: Path) -> Iterator[Path | str]:
    """A folder as an overlayfs shows it, as in a container; the reason where it cannot be mounted."""
    top = Path(tempfile.mkdtemp(dir=work))
    for name in ("upper", "work", "merged"):
        (top / name).mkdir()
    options = f"lowerdir={lower},upperdir={top}/upper,workdir={top}/work"
    mount = ["mount", "-t", "overlay", "overlay", "-o", options, str(top / "merged")]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    try:
        yield top / "merged" if done.returncode == 0 else done.stderr.strip()
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", str(top / "merged")], check=False)
        shutil.rmtree(top)


def copied(artifact: Path, folder: Path) -> Path:
    """A copy of an artifact, in the page cache as a copy leaves it."""
    shutil.rmtree(folder, ignore_errors=True)
    return Path(shutil.copytree(artifact, folder, copy_function=_copy))


def _copy(source: str, target: str) -> None:
    """Copy by writes of 128 KiB, as `cp` and unpacking do; a copy within the kernel may share blocks or large pages."""
    with Path(source).open("rb") as reading, Path(target).open("wb", buffering=0) as writing:
        shutil.copyfileobj(reading, writing, 1 << 17)


def write_again(file: Path) -> None:
    """Write the tensors of a file as a build does, one after another."""
    mapped, new = MappedTensors(file), file.with_name("new")
    begin = min(tensor.offset for tensor in mapped.tensors.values())
    with SafetensorsWriter(new, begin) as writer:
        for name, tensor in mapped.tensors.items():
            content = mapped.view(name).data
            writer.add(name, tensor.dtype, tensor.shape, lambda write, content=content: write(content))  # type: ignore[misc]
    new.replace(file)


def read_whole(file: Path) -> None:
    """Read a file as `cat` does."""
    with file.open("rb", buffering=0) as stream:
        while stream.read(1 << 20):
            pass


def measure(artifact: Path, work: Path, rounds: int, priority: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of the table for one artifact, and what was left out."""
    skipped: list[str] = []
    with ExitStack() as stack:
        built = stack.enter_context(running(Way("after a build", artifact, "auto"), priority))  # before it is copied
        shm = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        lower = copied(artifact, work / "lower" / "artifact").parent
        merged = stack.enter_context(overlay(lower, work))
        written = copied(artifact, work / "written")
        write_again(written / WEIGHTS_FILE)
        read = copied(artifact, work / "read")
        drop_from_cache(read / WEIGHTS_FILE)
        read_whole(read / WEIGHTS_FILE)
        dropped = copied(artifact, work / "dropped")
        drop_from_cache(dropped / WEIGHTS_FILE)
        held = copied(artifact, work / "held")
        holder = SystemMemory().map_file(held / WEIGHTS_FILE)
        sum(holder.content[::4096])
        ways = [
            Way("plain: as a build writes it", written, "plain"),
            Way("plain: as a copy leaves it", copied(artifact, work / "plain"), "plain"),
            Way("plain: cache dropped, read again", read, "plain"),
            Way("plain: tmpfs", copied(artifact, shm / "plain"), "plain"),
            Way("after a copy", copied(artifact, work / "copy"), "auto"),
            Way("after a copy, second process", work / "copy", "auto"),
            Way("after a start of the machine (cache dropped)", dropped, "auto"),
            Way("in small pages of another process", held, "auto"),
            Way("weights: copied", copied(artifact, work / "own"), "copied"),
            Way("tmpfs", copied(artifact, shm / "auto"), "auto"),
        ]
        if isinstance(merged, Path):
            ways.append(Way("overlayfs", merged / "artifact", "auto"))
        else:
            skipped.append(f"overlayfs: {merged}")
        engines = {way.name: stack.enter_context(running(way, priority)) for way in ways} | {built.way.name: built}
        for number in range(rounds):
            for name in order_of_round(list(engines), number):
                engines[name].decode()
        rows = [row_of(engine) for engine in engines.values()]
        for engine in engines.values():
            assert engine.process.is_alive()
        del holder
        return rows, skipped


def row_of(engine: Running) -> dict[str, Any]:
    """Figures of a way."""
    pid = engine.process.pid
    memory = read_memory(pid)
    return {
        "way": engine.way.name,
        "file_system": file_system(engine.way.folder),
        "tokens_per_second": round(median(engine.rates), 2),
        "interval": [round(each, 2) for each in interval(engine.rates)],
        "rates": [round(each, 2) for each in engine.rates],
        "tokens_per_processor_second": round(median(engine.work_rates), 2),
        "processor_rates": [round(each, 2) for each in engine.work_rates],
        "weights_mb": huge_megabytes(pid, engine.way.folder),
        "private_mb": round(memory.private_bytes / 1e6, 1) if memory else None,
        **{name: round(each, 3) if isinstance(each, float) else each for name, each in engine.facts.items()},
    }


_COLUMNS = ("tokens/s", "per CPU s", "ratio", "huge MB", "verify s", "load s", "first s", "PSS MB", "private MB")


def print_rows(title: str, rows: list[dict[str, Any]]) -> None:
    """The table."""
    click.echo(f"\n{title}\n{'way':46}" + "".join(f"{column:>11}" for column in _COLUMNS))
    for row in rows:
        sizes, seconds = row["weights_mb"], [row[f"{name}_seconds"] for name in ("verify", "load", "first")]
        rate, huge = row["tokens_per_processor_second"], sizes["huge"] if sizes["rss"] else sizes["own_huge"]
        ratio = rate / rows[0]["tokens_per_processor_second"]
        figures = [row["tokens_per_second"], rate, ratio, huge, *seconds, sizes["pss"], row["private_mb"]]
        click.echo(f"{row['way']:46}" + "".join(f"{figure:11.2f}" for figure in figures))
        click.echo(f"    {row['how']}")


@click.command(help=__doc__)
@click.option("--shape", "shapes", multiple=True, default=("smollm2-135m", "tinyllama-1.1b"), show_default=True)
@click.option("--rounds", default=9, show_default=True, help="Rounds, in which each way decodes once.")
@click.option("--realtime", is_flag=True, help="Decode at the priority of real time.")
@click.option("--build", is_flag=True, help="Build the artifacts anew.")
@click.option("--work", type=click.Path(path_type=Path), default=WORK_FOLDER, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS / "cpu-pages.json", show_default=True)
def main(shapes: tuple[str, ...], rounds: int, realtime: bool, build: bool, work: Path, output: Path) -> None:
    """Measure, print and write."""
    facts: dict[str, Any] = {"device": device_facts(), "huge_pages": {name: setting(name) for name in _SETTINGS}}
    facts |= {"threads": 1, "realtime": realtime, "steps_of_a_round": _STEPS_A_ROUND, "shapes": {}}
    for shape in shapes:
        if build:
            for older in work.glob(f"{shape}-2048-int4-cpu-*"):
                shutil.rmtree(older)
        artifact = synthetic_artifact(SHAPES[shape], "int4-cpu", context_tokens=2048, folder=work).path
        with tempfile.TemporaryDirectory(dir=work) as copies:
            before = measure_read_bandwidth(1)
            rows, skipped = measure(artifact, Path(copies), rounds, int(realtime))
            bandwidth = max(before, measure_read_bandwidth(1))
        facts["shapes"][shape] = {
            "built_in_this_run": build,
            "weights_bytes": os.path.getsize(artifact / WEIGHTS_FILE),
            "read_bandwidth": round(bandwidth / 1e9, 2),
            "rows": rows,
            "left_out": skipped,
        }
        print_rows(f"{shape}, memory read at {bandwidth / 1e9:.1f} GB/s", rows)
        output.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
