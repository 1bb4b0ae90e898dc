"""The mutation score of `ingot verify`: plants each fault, and prints whether it was found and by which pair.

python -m tests.mutations.score                      # every fault on the simulated engine
python -m tests.mutations.score --artifact DIR       # on a real one, and those that need its texts
python -m tests.mutations.score --clean 50           # then 50 clean runs with other seeds: false alarms
python -m tests.mutations.score --output FILE        # the result as JSON
"""

import argparse
import json
import logging
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import get_args
from unittest.mock import patch

from benchmarks.device import available_cores, device_facts

from ingot.artifact import Artifact, open_artifact
from ingot.runtime.cpu.executor import OnnxRuntimeExecutor
from ingot.runtime.cpu.native_executor import NativeExecutor
from ingot.validation.verify import Subject, VerifyOptions, VerifyResult, open_subject, verify
from ingot.validation.verify.result import CellVerdict
from tests.mutations.faults import FAULTS, Fault
from tests.simulators.fake_executor import FakeExecutor
from tests.simulators.layered_executor import LayeredExecutor
from tests.validation.verify.subjects import fake_subject


@dataclass(frozen=True)
class Score:
    """What a verification said about one fault."""

    fault: Fault
    result: VerifyResult

    @property
    def differing(self) -> list[str]:
        """Names of the cells that differ, pairs first."""
        cells = [cell for cell in self.result.cells if cell.verdict == "DIFFERS"]
        return [cell.name for cell in sorted(cells, key=lambda cell: len(cell.features) != 2)]

    @property
    def is_named(self) -> bool:
        """Whether a pair that differs has a feature that the fault breaks."""
        return any("+" in name and set(name.split("+")) & set(self.fault.features) for name in self.differing)


def subject_for(fault: Fault, scratch: Path, artifact: Artifact | None = None) -> tuple[Subject, type]:
    """What to plant a fault in, and the class of its executor."""
    if artifact:
        is_native = artifact.manifest.engine == "native"
        return open_subject(artifact), NativeExecutor if is_native else OnnxRuntimeExecutor
    return fake_subject(scratch, layout=fault.layout), LayeredExecutor if fault.layout else FakeExecutor


def _can_be_found(fault: Fault, artifact: Path | None) -> bool:
    """Whether the artifact, or the simulated engine, has what the fault breaks."""
    if artifact is None:
        return not fault.needs_model
    return not fault.layout or (fault.layout == "side state" and bool(open_artifact(artifact).manifest.kv.state_bytes))


def score(fault: Fault, subject: Subject, executor: type, only: tuple[str, ...] = ()) -> Score:
    """Verify with a fault planted."""
    with fault.trouble(executor), fault.plant(executor):
        return Score(fault, verify(subject, VerifyOptions(quick=True, only=only)))


def main(arguments: list[str]) -> int:
    """Print the table; exit code 1 when a fault was not found or a clean run was not clean."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifact", type=Path)
    parser.add_argument("--clean", type=int, default=0)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--processes", type=int, default=available_cores())
    given = parser.parse_args(arguments)
    started = time.monotonic()
    numbers = [number for number, fault in enumerate(FAULTS) if _can_be_found(fault, given.artifact)]
    with ProcessPoolExecutor(given.processes, get_context("spawn")) as pool:
        found = pool.map(partial(_scored, given.artifact), numbers)
        clean = pool.map(partial(_clean, given.artifact), range(1, given.clean + 1))
        scores = [_printed_score(Score(FAULTS[number], result)) for number, result in zip(numbers, found, strict=True)]
        runs = [_printed_run(result) for result in clean]
    missed = {score.fault.number for score in scores if not score.is_named}
    classes = {score.fault.number for score in scores}
    alarms = [run.seed for run in runs if run.verdict != "PASS"]
    num_found = sum(score.is_named for score in scores)
    print(f"found {num_found} of {len(scores)} faults, {len(classes - missed)} of {len(classes)} classes")
    if runs:
        print(f"{len(alarms)} false alarms in {len(runs)} clean runs{f', seeds {alarms}' if alarms else ''}")
    if given.output:
        record = {
            "device": device_facts(),
            "subject": str(given.artifact or "simulated engine"),
            "seconds": round(time.monotonic() - started, 1),
            "classes": {"found": len(classes - missed), "of": len(classes)},
            "faults": [_facts(score) for score in scores],
            "clean": {"runs": len(runs), "cells": sum(run.num_checked for run in runs), "false_alarm_seeds": alarms},
        }
        given.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return int(bool(missed) or bool(alarms))


def _scored(artifact: Path | None, number: int) -> VerifyResult:
    fault = FAULTS[number]
    with _workspace() as scratch, _short_waits():
        return score(fault, *subject_for(fault, scratch, open_artifact(artifact) if artifact else None)).result


def _clean(artifact: Path | None, seed: int) -> VerifyResult:
    with _workspace() as scratch:
        subject = open_subject(open_artifact(artifact)) if artifact else fake_subject(scratch)
        return verify(subject, VerifyOptions(quick=True, seed=seed))


@contextmanager
def _workspace() -> Iterator[Path]:
    """A folder for tiers. Engines with faults log thousands of warnings."""
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as scratch:
        yield Path(scratch)


@contextmanager
def _short_waits() -> Iterator[None]:
    """Engines with faults would wait for disks that never answer. Sound ones must not give up because others run."""
    with (
        patch("ingot.runtime.kv.transfers.saves.STALL_SECONDS", 0.1),
        patch("ingot.validation.verify.scenario._FLUSH_SECONDS", 10.0),
    ):
        yield


def _facts(one: Score) -> dict[str, object]:
    return {
        "class": one.fault.number,
        "kind": one.fault.kind,
        "planted": one.fault.planted,
        "found": one.is_named,
        "by": one.differing[0] if one.differing else None,
        "cells": {verdict: one.result.count(verdict) for verdict in get_args(CellVerdict)},
        "seconds": one.result.seconds,
    }


def _printed_score(one: Score) -> Score:
    by = f"{one.differing[0]} ({one.result.count('DIFFERS')} cells differ)" if one.is_named else "NOT FOUND"
    print(f"{one.fault.number:>2}  {one.fault.planted}: {by}, {one.result.seconds:.1f} s", flush=True)
    return one


def _printed_run(result: VerifyResult) -> VerifyResult:
    for cell in result.failures:
        print(f"seed {result.seed}: {cell.name} {cell.verdict} {cell.differences or cell.exercised}")
    print(f"clean run {result.seed}: {result.verdict}, {result.seconds:.1f} s", flush=True)
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
