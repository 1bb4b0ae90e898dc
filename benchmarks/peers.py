"""The engines of the comparison, each in a process of its own.

Separate processes keep thread pools apart and let every engine have its own virtual environment. An engine is idle, and
its threads asleep, while another one is measured. To add an engine, write benchmarks/adapters/NAME.py and add a row.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.adapters.base import PeerFacts, Setup, Timing
from benchmarks.cpu.rounds import Scenario
from benchmarks.device import available_cores
from benchmarks.paths import ROOT

PEERS_VENV = ROOT / ".venv-bench"
DEFAULT_WORK = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ingot" / "benchmarks"


@dataclass(frozen=True)
class Peer:
    """A row of the table: label, adapter module, its interpreter, and options for the adapter."""

    label: str
    module: str
    runs_in: Literal["this", "peers"]
    options: Mapping[str, int | str]


PEERS: dict[str, Peer] = {
    "ingot": Peer("Ingot int4, block 32", "benchmarks.adapters.ingot", "this", {"block_size": 32}),
    "ingot-b128": Peer("Ingot int4, block 128", "benchmarks.adapters.ingot", "this", {"block_size": 128}),
    "llama.cpp": Peer("llama.cpp Q4_0", "benchmarks.adapters.llama_cpp", "peers", {}),
    "genai": Peer("onnxruntime-genai int4", "benchmarks.adapters.onnxruntime_genai", "peers", {}),
}


class PeerFailed(Exception):
    """An engine could not be started or did not answer; the message ends with the last lines of its output."""


class PeerProcess:
    """A running adapter. Use as a context manager; `facts` is set once the model is loaded."""

    def __init__(self, peer: Peer, setup: Setup, peers_python: Path) -> None:
        python = Path(sys.executable) if peer.runs_in == "this" else peers_python
        if not python.is_file():
            raise PeerFailed(f"{python} is not there; make it with: python -m benchmarks.cpu.setup_peers")
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [str(python), "-m", peer.module, _setup_json(setup, peer.options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=ROOT,
        )
        self.facts = PeerFacts(**self._read())
        self.spare_cores = max(0, available_cores() - setup.threads)

    @property
    def pid(self) -> int:
        """Process id of the adapter."""
        return self._process.pid

    def measure(self, scenario: Scenario, seed: int) -> Timing:
        """Run the scenario once, on random prompts of the seed."""
        request = {name: getattr(scenario, name) for name in ("batch", "prompt_tokens", "new_tokens")}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({**request, "seed": seed}) + "\n")
        self._process.stdin.flush()
        return Timing(**self._read())

    def close(self) -> None:
        """End the process by closing its input."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._errors.close()

    def __enter__(self) -> "PeerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._errors.seek(0)
            raise PeerFailed(_last_words(self._errors.read()))
        answer: dict[str, Any] = json.loads(line)
        return answer


def tokens_per_second(scenario: Scenario, timing: Timing) -> float:
    """Throughput of the phase that the scenario counts."""
    seconds = timing.prefill_seconds if scenario.phase == "prefill" else timing.decode_seconds
    return scenario.counted_tokens / seconds


def _setup_json(setup: Setup, options: Mapping[str, int | str]) -> str:
    return json.dumps(asdict(replace(setup, options=options)), default=str)


def _last_words(errors: str) -> str:
    lines = [line for line in errors.splitlines() if line.strip()]
    return lines[-1] if lines else "it ended without a word"
