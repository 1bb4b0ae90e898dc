"""Count which faults `ingot doctor` names that its rules came after, and its alarms under healthy loads.

    python -m benchmarks.serve.blind_diagnosis [ARTIFACT] [--fault NAME]... [--healthy NAME]...

The faults, and the words by which a finding names each, were committed before the rules that find them were written.
A fault counts as named if any finding has the words, and as first if the first finding has them. `busy-neighbours` is
left out of both counts, as other processes of the machine may truly be busy. See `benchmarks.serve.diagnosis` for the
faults that rules were written for. Linux only; the slow disk needs a C compiler.
"""

import json
import os
import random
import re
from pathlib import Path
from typing import Any

import click

from benchmarks.device import device_facts
from benchmarks.paths import ROOT
from benchmarks.serve.blind_faults import FAULTS, HEALTHY, BlindFault, pin, slow_disk
from benchmarks.serve.diagnosis import findings_of, place_of
from benchmarks.serve.faults import NEIGHBOURS, Place, completion, tokens

_SERVED_BEFORE = 16  # requests
_HEALTHY_SECONDS = 3.0


def is_named(finding: dict[str, Any], words: tuple[str, ...]) -> bool:
    """Return whether the texts of a finding have all words."""
    text = " ".join(str(finding[key]) for key in ("symptom", "cause", "action"))
    return all(re.search(word, text) for word in words)


def planted(artifact: str, fault: BlindFault) -> dict[str, object]:
    """The findings where a fault was planted."""
    with slow_disk(fault.has_slow_disk) as folder, place_of(artifact, (*fault.options, *folder)) as place:
        _warm(place, fault.cores)
        found = findings_of(place, fault.load, fault.seconds)
    counted = [each for each in found if each["name"] != NEIGHBOURS]
    named = [each["name"] for each in counted if is_named(each, fault.words)]
    return {
        "found": [each["name"] for each in found],
        "named_by": named[0] if named else None,
        "is_first": bool(named) and named[0] == counted[0]["name"],
    }


def healthy(artifact: str, name: str) -> list[str]:
    """Alarms under a healthy load."""
    options, load = HEALTHY[name]
    with place_of(artifact, options) as place:
        _warm(place, 1)
        found = findings_of(place, load, _HEALTHY_SECONDS)
    return [each["name"] for each in found if each["name"] != NEIGHBOURS]


def _warm(place: Place, cores: int | None) -> None:
    pin(place, cores)
    rng = random.Random(4)
    for _ in range(_SERVED_BEFORE):
        place.post("/v1/completions", completion(tokens(rng, 30), 4))


@click.command(help=__doc__)
@click.argument("artifact", default=str(ROOT / "artifacts/demo"))
@click.option("--fault", "faults", multiple=True, type=click.Choice(list(FAULTS)), help="Only this fault.")
@click.option("--healthy", "loads", multiple=True, type=click.Choice(list(HEALTHY)), help="Only this healthy load.")
@click.option("--output", type=click.Path(path_type=Path), default=ROOT / "benchmarks/results/serve-blind.json")
def main(artifact: str, faults: tuple[str, ...], loads: tuple[str, ...], output: Path) -> None:
    """Plant, diagnose, print and write; with names, others keep what the output has of them."""
    kept = json.loads(output.read_text()) if output.is_file() and (faults or loads) else {}
    found, alarms = dict(kept.get("faults", {})), dict(kept.get("healthy", {}))
    is_all = not faults and not loads
    for name in FAULTS if is_all else faults:
        found[name] = {**planted(artifact, FAULTS[name]), "load_average_before": round(os.getloadavg()[0], 1)}
        click.echo(f"{name}: {json.dumps(found[name])}")
    for name in HEALTHY if is_all else loads:
        alarms[name] = healthy(artifact, name)
        click.echo(f"healthy, {name}: {alarms[name] or 'no alarm'}")
    figures = {
        "num_faults": len(found),
        "named": sum(each["named_by"] is not None for each in found.values()),
        "named_first": sum(bool(each["is_first"]) for each in found.values()),
        "num_healthy": len(alarms),
        "healthy_with_alarms": sum(bool(each) for each in alarms.values()),
    }
    click.echo(json.dumps(figures))
    facts = {"device": device_facts(), "artifact": Path(artifact).name, **figures, "faults": found, "healthy": alarms}
    output.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
