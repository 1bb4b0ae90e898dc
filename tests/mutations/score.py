"""The mutation score of `ingot verify`: plants each fault, and prints whether it was found and by which pair.

python -m tests.mutations.score                      # every fault on the simulated engine
python -m tests.mutations.score --artifact DIR       # on a real one
python -m tests.mutations.score --clean 50           # then 50 clean runs with other seeds: false alarms
python -m tests.mutations.score --output FILE        # the result as JSON
"""

import argparse
import logging
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from ingot.artifact import Artifact, open_artifact
from ingot.runtime.cpu.executor import OnnxRuntimeExecutor
from ingot.validation.verify import Subject, VerifyOptions, VerifyResult, open_subject, verify
from ingot.validation.verify.result import CellVerdict
from tests.mutations.faults import FAULTS, Fault
from tests.simulators.fake_executor import FakeExecutor
from tests.simulators.layered_executor import LayeredExecutor
from tests.validation.verify.subjects import fake_subject

_NOT_PASSING: tuple[CellVerdict, ...] = ("DIFFERS", "NOT EXERCISED")


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
        return open_subject(artifact), OnnxRuntimeExecutor
    return fake_subject(scratch, layout=fault.layout), LayeredExecutor if fault.layout else FakeExecutor


def score(fault: Fault, subject: Subject, executor: type, only: tuple[str, ...] = ()) -> Score:
    """Verify with a fault planted."""
    with fault.trouble(executor), fault.plant(executor):
        return Score(fault, verify(subject, VerifyOptions(quick=True, only=only)))


def main(arguments: list[str]) -> int:
    """Print the table; exit code 1 when a fault was not found or a clean run was not clean."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifact", type=Path)
    parser.add_argument("--clean", type=int, default=0)
    given = parser.parse_args(arguments)
    logging.disable(logging.WARNING)  # of engines with faults there are thousands
    with tempfile.TemporaryDirectory() as scratch, patch("ingot.runtime.kv.tiers._FLUSH_SECONDS", 0.1):
        artifact = open_artifact(given.artifact) if given.artifact else None
        faults = [fault for fault in FAULTS if not (artifact and fault.layout)]
        found = [_print_score(score(fault, *subject_for(fault, Path(scratch), artifact))) for fault in faults]
        clean = open_subject(artifact) if artifact else fake_subject(Path(scratch))
        alarms = [seed for seed in range(given.clean) if not _is_clean(clean, seed)]
    classes = {fault.number for fault in faults}
    missed = {fault.number for fault, is_found in zip(faults, found, strict=True) if not is_found}
    print(f"found {sum(found)} of {len(faults)} faults, {len(classes - missed)} of {len(classes)} classes")
    if given.clean:
        print(f"{len(alarms)} false alarms in {given.clean} clean runs{f', seeds {alarms}' if alarms else ''}")
    return int(not all(found) or bool(alarms))


def _print_score(one: Score) -> bool:
    counts = ", ".join(f"{count} {verdict}" for verdict in _NOT_PASSING if (count := one.result.count(verdict)))
    by = f"{one.differing[0]} ({counts})" if counts else "NOT FOUND"
    print(f"{one.fault.number:>2}  {one.fault.planted}: {by}, {one.result.seconds:.1f} s", flush=True)
    return one.is_named


def _is_clean(subject: Subject, seed: int) -> bool:
    started = time.monotonic()
    result = verify(subject, VerifyOptions(quick=True, seed=seed + 1))
    for cell in result.failures:
        print(f"seed {seed + 1}: {cell.name} {cell.verdict} {cell.differences or cell.exercised}")
    print(f"clean run {seed + 1}: {result.verdict}, {time.monotonic() - started:.1f} s", flush=True)
    return result.verdict == "PASS"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
