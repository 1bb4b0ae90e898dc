"""Faults planted on a live server, and what `ingot doctor` names first; healthy loads, and its alarms.

    python -m benchmarks.serve.diagnosis [ARTIFACT] [--healthy 50] [--fault NAME]...

Each fault is a server of its own on the loopback interface, with a limit, a load or a neighbour that slows it down; no
fault needs the rights of root. `ingot doctor URL --json` runs as a process of its own, and the load begins after its
first look. Before that the server has answered a few requests, but for cold-start, where it is new. One fault is a
stand-in: the engine's process is stopped during the first request for what would be loaded then (cold-start). Drafts
are rejected with `adaptive` off: by default `ingot serve` stops drafting where that does not pay.

Engines compute with one thread unless the fault needs more, so that the clients have a processor. `busy-neighbours` is
a fault of its own here; where it is found in another run, other processes of the machine may truly have been busy, so
it is counted in fields of its own (`busy_neighbours_too`, `runs_with_busy_neighbours`) and not as an alarm. Linux only.
"""

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import click

from benchmarks.cpu.serve import metrics_of, server_process
from benchmarks.device import device_facts
from benchmarks.paths import ROOT
from benchmarks.serve.faults import COLD, FAULTS, HEALTHY, NEIGHBOURS, Load, Place, completion, tokens

_SERVED_BEFORE = 16  # requests
_LOOKED = 'ingot_http_answers_total{path="/metrics",status="200"}'
_FIRST_LOOK_SECONDS = 20.0


def diagnosed(place: Place, load: Load, seconds: float) -> list[str]:
    """Names of the findings of `ingot doctor`, the first first, while a load runs."""
    return [each["name"] for each in findings_of(place, load, seconds)]


def findings_of(place: Place, load: Load, seconds: float) -> list[dict[str, Any]]:
    """Findings of `ingot doctor` as JSON, the first first, while a load runs."""
    command = [sys.executable, "-m", "ingot", "doctor", place.url, "--seconds", str(seconds), "--json"]
    before, stop = _looks(place), threading.Event()
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as doctor,
        ThreadPoolExecutor(1) as pool,
    ):
        for polls in count(1):
            if _looks(place) > before + polls or polls * 0.05 > _FIRST_LOOK_SECONDS:
                break
            time.sleep(0.05)
        running = pool.submit(load, place, stop)
        printed, _ = doctor.communicate()
        stop.set()
        running.result()
    (diagnosis,) = json.loads(printed).values()
    findings: list[dict[str, Any]] = diagnosis["findings"]
    return findings


def _looks(place: Place) -> int:
    """Times that the metrics were read before this time, which counts at the next."""
    return int(metrics_of(place.url).get(_LOOKED, 0))


@contextmanager
def place_of(artifact: str, options: tuple[str, ...]) -> Iterator[Place]:
    """A server with these options."""
    with server_process(artifact, *options) as (url, pid):
        yield Place(url, pid)


def planted(artifact: str, name: str) -> dict[str, object]:
    """The findings where a fault was planted."""
    fault = FAULTS[name]
    with place_of(artifact, fault.options) as place:
        rng = random.Random(4)
        for _ in range(0 if name == COLD else _SERVED_BEFORE):
            place.post("/v1/completions", completion(tokens(rng, 30), 4))
        found = diagnosed(place, fault.load, fault.seconds)
    counted = found if name == NEIGHBOURS else [each for each in found if each != NEIGHBOURS]
    return {
        "found": found,
        "is_first": counted[:1] == [name],
        "is_found": name in found,
        "busy_neighbours_too": name != NEIGHBOURS and NEIGHBOURS in found,
    }


def healthy_runs(artifact: str, number: int, seconds: float) -> dict[str, object]:
    """Alarms under loads that the server can serve, and busy neighbours apart from them."""
    alarms: list[dict[str, object]] = []
    runs = with_neighbours = 0
    for place_in_order, (name, (options, load)) in enumerate(HEALTHY.items()):
        share = len(range(place_in_order, number, len(HEALTHY)))
        if not share:
            continue
        with place_of(artifact, options) as place:
            for _ in range(share):
                found = diagnosed(place, load, seconds)
                runs += 1
                with_neighbours += NEIGHBOURS in found
                if others := [each for each in found if each != NEIGHBOURS]:
                    alarms.append({"load": name, "found": others})
                    click.echo(f"healthy, {name}: {others}")
    return {
        "runs": runs,
        "loads": list(HEALTHY),
        "alarms": len(alarms),
        "found": alarms,
        "runs_with_busy_neighbours": with_neighbours,
    }


@click.command(help=__doc__)
@click.argument("artifact", default=str(ROOT / "artifacts/demo"))
@click.option("--healthy", default=50, show_default=True, help="Number of healthy runs; 0 keeps those of the output.")
@click.option("--healthy-seconds", default=2.0, show_default=True, help="Length of each.")
@click.option(
    "--fault", "names", multiple=True, type=click.Choice(list(FAULTS)), help="Only this, keeping others of the output."
)
@click.option("--output", type=click.Path(path_type=Path), default=ROOT / "benchmarks/results/serve-diagnosis.json")
def main(artifact: str, healthy: int, healthy_seconds: float, names: tuple[str, ...], output: Path) -> None:
    """Plant, diagnose, print and write."""
    kept = json.loads(output.read_text()) if output.is_file() and (names or not healthy) else {}
    found = {name: kept["faults"][name] for name in FAULTS if name in kept.get("faults", {})}
    for name in names or FAULTS:
        load = {"load_average_before": round(os.getloadavg()[0], 1)}  # of what else the machine does
        found[name] = {**planted(artifact, name), **load}
        click.echo(f"{name}: {json.dumps(found[name])}")
    facts = {
        "device": device_facts(),
        "artifact": Path(artifact).name,
        "num_faults": len(found),
        "named_first": sum(bool(each["is_first"]) for each in found.values()),
        "faults": found,
        "healthy": healthy_runs(artifact, healthy, healthy_seconds) if healthy else kept.get("healthy"),
    }
    click.echo(
        f"{facts['named_first']} of {len(found)} faults are named first; healthy: {json.dumps(facts['healthy'])}"
    )
    output.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
