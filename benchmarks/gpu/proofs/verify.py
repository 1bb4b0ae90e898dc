"""`ingot verify` of the trained examples on the GPU: no feature of the runtime changes an answer there.

Each form is loaded as a user's artifact is, once for every cell of the quick matrix. Tokens must be equal, and logits
within the bound of the activations' type; those of a batch-invariant program must have equal bits.
"""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest import mock

from benchmarks.gpu.device import Bench
from benchmarks.gpu.parts import Record, Task
from benchmarks.gpu.programs.packing import unpack_artifact
from benchmarks.gpu.proofs.demo import INVARIANT
from ingot.runtime.cuda.driver import driver
from ingot.validation.verify import VerifyOptions, open_subject
from ingot.validation.verify import verify as verify_subject

_SECONDS_A_FORM, _MOST_SECONDS = 20.0, 150.0
_MOST_SHOWN = 5  # cells that failed
_DRY_CELLS = ("batch-mates",)  # interpreted kernels take seconds for each step


def verify(bench: Bench) -> list[Task]:
    """Every form of each model, first one whose bits must be equal."""
    files = sorted(bench.programs.glob("demo-*.zip"), key=lambda file: (not file.stem.endswith(INVARIANT), file.stem))
    return [Task(file.stem, partial(_verified, bench, file), _MOST_SECONDS, _SECONDS_A_FORM) for file in files]


def _verified(bench: Bench, file: Path) -> Iterator[Record]:
    subject = open_subject(unpack_artifact(file, bench.scratch / f"{file.stem}-verified"))
    only = _DRY_CELLS if bench.machine.is_dry else ()
    with mock.patch.object(driver, "open_device", bench.machine.open):
        result = verify_subject(subject, VerifyOptions(quick=True, only=only))
    yield {
        "figure": "verify",
        "form": file.stem,
        "logits": result.logits,
        "cells": dict(Counter(cell.verdict for cell in result.cells)),
        "seconds": result.seconds,
        "failures": {cell.name: cell.model_dump(mode="json") for cell in result.failures[:_MOST_SHOWN]},
        "within": result.verdict == "PASS",
    }
