"""The packages that quantizers are compared with, and their runs, each cached.

A run is a process in the package's own virtual environment (see setup_packages.py). Its output and costs stay in the
working folder, under a key of everything that decides the result: package, method, settings, the checkpoint's bytes,
the calibration's tokens. To add a package: write its adapter in benchmarks/adapters, and add its rows to PEERS.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.adapters.quantizing import Job, Outcome
from benchmarks.paths import ROOT
from benchmarks.peers import PeerFailed

VENVS = ROOT / ".venv-quantizers"
_KEY_DIGITS = 16
# Files that every package writes in its own way and that are not weights.
_READ_BY_ALL = ("config.json", "model.safetensors")


@dataclass(frozen=True)
class Peer:
    """A row of the comparison.

    package    name of its virtual environment and of its adapter in benchmarks/adapters
    method     one of the adapter's methods
    bits       those that it supports
    is_ours    runs in this environment
    """

    label: str
    package: str
    method: str
    symmetric: bool
    bits: tuple[int, ...] = (4, 3)
    is_ours: bool = False

    def python(self, venvs: Path) -> Path:
        """Interpreter of the package's environment."""
        return Path(sys.executable) if self.is_ours else venvs / self.package / "bin" / "python"

    @property
    def adapter(self) -> str:
        """Module to run."""
        return f"benchmarks.adapters.{self.package}"


PEERS: dict[str, Peer] = {
    "llmc-awq-gptq-asym": Peer("llm-compressor AWQ then GPTQ, asym", "llm_compressor", "awq+gptq", False),
    "llmc-awq-gptq-sym": Peer("llm-compressor AWQ then GPTQ, sym", "llm_compressor", "awq+gptq", True),
    "llmc-gptq-asym": Peer("llm-compressor GPTQ, asym", "llm_compressor", "gptq", False),
    "llmc-gptq-sym": Peer("llm-compressor GPTQ, sym", "llm_compressor", "gptq", True),
    "llmc-awq-asym": Peer("llm-compressor AWQ, asym", "llm_compressor", "awq", False),
    "gptqmodel-gptq-sym": Peer("gptqmodel GPTQ, sym", "gptqmodel", "gptq", True),
    "gptqmodel-gptq-asym": Peer("gptqmodel GPTQ, asym", "gptqmodel", "gptq", False),
    "gptqmodel-awq-asym": Peer("gptqmodel AWQ, asym", "gptqmodel", "awq", False, bits=(4,)),
    "auto-round-asym": Peer("auto-round, asym", "auto_round", "auto-round", False),
    "auto-round-sym": Peer("auto-round, sym", "auto_round", "auto-round", True),
    "auto-gptq-sym": Peer("auto-gptq, sym, act-order", "auto_gptq", "gptq", True),
    "auto-gptq-asym": Peer("auto-gptq, asym, act-order", "auto_gptq", "gptq", False),
    "autoawq-asym": Peer("autoawq, asym", "auto_awq", "awq", False, bits=(4,)),
}


@dataclass(frozen=True)
class Case:
    """Input of every quantizer.

    keep    names of layers that stay unquantized
    """

    checkpoint: Path
    sequences: Path
    bits: int
    group_size: int
    keep: tuple[str, ...] = ()
    threads: int = 1


@dataclass(frozen=True)
class PeerRun:
    """A finished run: the package's checkpoint, and its costs."""

    checkpoint: Path
    outcome: Outcome


def cache_key(peer: Peer, case: Case) -> str:
    """Name of a run's folder; the number of threads affects only the time, and is left out."""
    facts = {
        "package": [peer.package, peer.method, peer.symmetric],
        "settings": [case.bits, case.group_size, *case.keep],
        "checkpoint": [hashlib.sha256((case.checkpoint / name).read_bytes()).hexdigest() for name in _READ_BY_ALL],
        "tokens": hashlib.sha256(np.load(case.sequences).tobytes()).hexdigest(),
    }
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:_KEY_DIGITS]


def run_peer(peer: Peer, case: Case, work: Path, venvs: Path = VENVS, fresh: bool = False) -> PeerRun:
    """The run of this case, cached in the working folder. Raises PeerFailed with the package's error."""
    name = f"{case.checkpoint.name}-{case.bits}bit-g{case.group_size}-{peer.package}-{peer.method}"
    folder = work / f"{name}-{'sym' if peer.symmetric else 'asym'}-{cache_key(peer, case)}"
    record = folder / "outcome.json"
    if fresh or not record.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        outcome = run_adapter(peer, job_of(peer, case, folder / "checkpoint"), venvs)
        record.write_text(json.dumps(asdict(outcome), indent=2) + "\n", encoding="utf-8")
    return PeerRun(folder / "checkpoint", Outcome(**json.loads(record.read_text("utf-8"))))


def job_of(peer: Peer, case: Case, output: Path) -> Job:
    """The peer's method on the case."""
    return Job(
        checkpoint=case.checkpoint.resolve(),
        output=output.resolve(),
        sequences=case.sequences.resolve(),
        method=peer.method,
        bits=case.bits,
        group_size=case.group_size,
        symmetric=peer.symmetric,
        keep=case.keep,
        threads=case.threads,
    )


def run_adapter(peer: Peer, job: Job, venvs: Path) -> Outcome:
    """Start the adapter in its environment and wait for its answer."""
    return Outcome(
        **json.loads(run_in(peer.python(venvs), peer.adapter, json.dumps(asdict(job), default=str), job.threads))
    )


def last_words(lines: Sequence[str]) -> str:
    """The exception of a traceback, with the source line that raised it if the exception has no message."""
    spoken = [line.strip() for line in lines if line.strip("^~ \n")]
    if not spoken:
        return "it ended without a word"
    return spoken[-1] if ":" in spoken[-1] or len(spoken) == 1 else f"{spoken[-1]}: {spoken[-2]}"


def run_in(python: Path, module: str, argument: str, threads: int = 1) -> str:
    """Run a module of this repository in another environment; return its last line, or raise PeerFailed."""
    if not python.is_file():
        raise PeerFailed(f"{python} is not there; make it with: python -m benchmarks.quantizers.setup_packages")
    limits = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    environment = {**os.environ, **limits, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryFile("w+") as errors:
        command = [str(python), "-m", module, argument]
        finished = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        errors.seek(0)
        words = errors.read().strip().splitlines()
    if finished.returncode or not finished.stdout.strip():
        raise PeerFailed(last_words(words))
    return finished.stdout.splitlines()[-1]
