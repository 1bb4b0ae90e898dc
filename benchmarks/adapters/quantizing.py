"""The interface of a quantizer in the comparison, and its process.

An adapter's module ends with `if __name__ == "__main__": answer(quantize)`. The parent (benchmarks/quantizers/runs.py)
starts it in the package's own virtual environment with one JSON object, the fields of Job; the adapter writes the
package's own checkpoint, and the process prints one JSON object, the fields of Outcome. Every package gets the same
token ids. No adapter imports Ingot.

To add a package: write its adapter, and add its rows to PEERS in benchmarks/quantizers/runs.py.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_KIB = 1024


@dataclass(frozen=True)
class Job:
    """One quantization.

    checkpoint  a Hugging Face folder; weights are converted to float32
    output      folder for the package's checkpoint; must not exist
    sequences   .npy file of token ids [sequences, tokens] int64
    method      one of the adapter's methods
    keep        names of layers to leave unquantized, like "down_proj"; the head stays so in any case
    """

    checkpoint: Path
    output: Path
    sequences: Path
    method: str
    bits: int
    group_size: int
    symmetric: bool
    keep: tuple[str, ...]
    threads: int

    def token_ids(self) -> NDArray[np.int64]:
        """The calibration sequences [sequences, tokens]."""
        ids: NDArray[np.int64] = np.load(self.sequences)
        return ids


@dataclass(frozen=True)
class Outcome:
    """Costs of a run.

    seconds       from the checkpoint on disk to the quantized one on disk, without imports
    peak_bytes    peak memory of the process
    cpu_seconds   processor time of all threads, which other processes disturb less
    """

    seconds: float
    peak_bytes: int
    versions: dict[str, str]
    cpu_seconds: float = 0.0


def job_from_json(text: str) -> Job:
    """The parent passes the fields of Job as one JSON object."""
    fields = json.loads(text)
    paths = {name: Path(fields[name]) for name in ("checkpoint", "output", "sequences")}
    return Job(**{**fields, **paths, "keep": tuple(fields["keep"])})


def answer(quantize: Callable[[Job], None], packages: Sequence[str]) -> None:
    """Run the job of the command line and print its Outcome.

    Libraries may print: standard output is moved away from the parent's pipe first.
    """
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    (text,) = sys.argv[1:]
    job = job_from_json(text)
    begin, begin_cpu = time.perf_counter(), time.process_time()
    quantize(job)
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - begin_cpu
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB
    outcome = Outcome(seconds, peak_bytes, {name: version(name) for name in packages}, cpu_seconds)
    channel.write(json.dumps(asdict(outcome)) + "\n")
    channel.flush()
