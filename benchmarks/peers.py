"""The engines of the comparison, each in a process of its own.

Separate processes keep thread pools apart and let every engine have its own virtual environment. An engine is idle, and
its threads asleep, while another one is measured. To add an engine, write benchmarks/adapters/NAME.py and add a row.
"""

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.adapters.base import PreparedModel, Setup, Timing
from benchmarks.device import available_cores
from benchmarks.paths import ROOT

# The virtual environments that `python -m benchmarks.cpu.setup_peers` makes, and what it compiles.
PEERS_VENV, VLLM_VENV = ROOT / ".venv-bench", ROOT / ".venv-bench-vllm"
IK_LLAMA_BENCH = PEERS_VENV / "ik_llama.cpp" / "bin" / "llama-bench"
# An engine that takes longer for one answer is ended: a hang must not end a run in which others can be measured.
ANSWER_SECONDS = 300.0
_REASON_LETTERS = 300
# glibc advises the kernel to use huge pages for large allocations, such as copies of weights.
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
DEFAULT_WORK = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ingot" / "benchmarks"


@dataclass(frozen=True)
class Peer:
    """A row of the table: label, adapter module, its interpreter, and options for the adapter.

    runs_in      this environment, that of the peers, or vLLM's
    attention    what attention multiplies; a ratio is never of Ingot's bfloat16 over a peer's float16 or float32
    parts        the parts of the comparison that it can run; None: all
    """

    label: str
    module: str
    runs_in: Literal["this", "peers", "vllm"]
    options: Mapping[str, int | str] = field(default_factory=dict)
    attention: Literal["float32", "bfloat16"] = "float32"
    parts: frozenset[str] | None = None

    @property
    def is_ours(self) -> bool:
        """Whether it is Ingot."""
        return self.runs_in == "this"

    def runs(self, part: str) -> bool:
        """Check that the engine runs a part of the comparison."""
        return self.parts is None or part in self.parts


_INGOT, _LLAMA_CPP = "benchmarks.adapters.ingot", "benchmarks.adapters.llama_cpp"
_OPENVINO, _IK_LLAMA = "benchmarks.adapters.openvino_genai", "benchmarks.adapters.ik_llama_bench"
# Engines that run whole requests: what they hold in memory, or do next to others, is not measured.
_SPEEDS = frozenset({"decode", "prefill", "context"})
PEERS: dict[str, Peer] = {
    "ingot-native": Peer("Ingot native", _INGOT, "this", {"recipe": "int4-cpu", "engine": "native"}),
    "ingot-native-bfloat16": Peer(
        "Ingot native, attention in bfloat16",
        _INGOT,
        "this",
        {"recipe": "int4-cpu", "engine": "native", "attention": "bfloat16"},
        attention="bfloat16",
    ),
    "ingot-onnxruntime": Peer("Ingot onnxruntime", _INGOT, "this", {"recipe": "int4-cpu", "engine": "onnxruntime"}),
    "llama.cpp-q4_0": Peer("llama.cpp Q4_0", _LLAMA_CPP, "peers", {"file_type": "q4_0"}),
    "llama.cpp-q4_k_m": Peer("llama.cpp Q4_K_M", _LLAMA_CPP, "peers", {"file_type": "q4_k_m"}),
    "ik_llama.cpp-q4_0": Peer("ik_llama.cpp Q4_0", _IK_LLAMA, "peers", {"file_type": "q4_0"}, parts=_SPEEDS),
    "ik_llama.cpp-q4_k_m": Peer("ik_llama.cpp Q4_K_M", _IK_LLAMA, "peers", {"file_type": "q4_k_m"}, parts=_SPEEDS),
    "mistral.rs": Peer(
        "mistral.rs Q4_0", "benchmarks.adapters.mistral_rs", "peers", {"file_type": "q4_0"}, parts=_SPEEDS
    ),
    "vllm": Peer("vLLM int4", "benchmarks.adapters.vllm_cpu", "vllm", attention="bfloat16"),
    "genai": Peer("onnxruntime-genai int4", "benchmarks.adapters.onnxruntime_genai", "peers"),
    "openvino": Peer("OpenVINO GenAI int4", _OPENVINO, "peers", attention="bfloat16"),
    "openvino-float32": Peer("OpenVINO GenAI int4, float32", _OPENVINO, "peers", {"activations": "f32"}),
}

# Recipes on both of Ingot's engines: name -> label and options. The engines of a recipe are compared with each other.
RECIPES: dict[str, tuple[str, Mapping[str, int | str]]] = {
    "w8a8-dynamic": ("W8A8, a scale per token", {"recipe": "w8a8-cpu", "activations": "dynamic"}),
    "w8a8-static": ("W8A8, static scales", {"recipe": "w8a8-cpu", "activations": "static"}),
    "fp16": ("float16 weights", {"recipe": "fp32-cpu"}),  # the checkpoint's
}
RECIPE_ENGINES: dict[str, Peer] = {
    f"{name}-{engine}": Peer(f"{label}, {engine}", _INGOT, "this", {**options, "engine": engine})
    for name, (label, options) in RECIPES.items()
    for engine in ("native", "onnxruntime")
}
ENGINES: dict[str, Peer] = PEERS | RECIPE_ENGINES


@dataclass(frozen=True)
class Programs:
    """Interpreters of environments and ik_llama.cpp's bench, as the command line gives them."""

    peers_python: Path = PEERS_VENV / "bin" / "python"
    vllm_python: Path = VLLM_VENV / "bin" / "python"
    ik_llama_bench: Path = IK_LLAMA_BENCH

    def python_of(self, peer: Peer) -> Path:
        """The interpreter of an engine; PeerFailed if it does not exist."""
        pythons = {"this": Path(sys.executable), "peers": self.peers_python, "vllm": self.vllm_python}
        python = pythons[peer.runs_in].absolute()
        if not python.is_file():
            raise PeerFailed(f"{python} does not exist; make it with: python -m benchmarks.cpu.setup_peers")
        return python

    def command(self, peer: Peer, setup: Setup, mode: str) -> list[str]:
        """The command line of an adapter."""
        options = dict(peer.options)
        if peer.module == _IK_LLAMA:
            options["llama_bench"] = str(self.ik_llama_bench.absolute())
        text = json.dumps(asdict(replace(setup, options=options)), default=str)
        return [str(self.python_of(peer)), "-m", peer.module, mode, text]


class PeerFailed(Exception):
    """An engine could not be started or did not answer; the message ends with the last lines of its output."""


@dataclass(frozen=True)
class Sequences:
    """Random prompts of one length for a batch, and the most tokens that each sequence may reach."""

    batch: int
    prompt_tokens: int
    max_tokens: int


class PeerProcess:
    """A running adapter with its model loaded. Use as a context manager.

    facts           the model that `prepare` made
    load            the adapter's own measurement of loading it, without the start of the process and imports
    ready_seconds   from the start of the process to the loaded model
    sequences       what it holds: the prompts that it started last
    """

    def __init__(
        self,
        peer: Peer,
        setup: Setup,
        facts: PreparedModel,
        programs: Programs,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        self.facts, self._peer, self._answer_seconds = facts, peer, answer_seconds
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        begin = time.perf_counter()
        self._process = subprocess.Popen(
            [*programs.command(peer, setup, "serve"), str(facts.model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=ROOT,
            env=environment_of(peer),
        )
        try:
            self.load = Timing(**self._read())
        except PeerFailed:
            self.close()
            raise
        self.ready_seconds = time.perf_counter() - begin
        self.spare_cores = max(0, available_cores() - setup.threads)
        self.sequences: Sequences | None = None
        self._room = 0  # steps that are left before a sequence has its most tokens

    @property
    def pid(self) -> int:
        """Process id of the adapter."""
        return self._process.pid

    def start(self, sequences: Sequences, seed: int) -> Timing:
        """Run random prompts of the seed up to the first token of each."""
        timing = self._request({**asdict(sequences), "seed": seed})
        self.sequences, self._room = sequences, sequences.max_tokens - sequences.prompt_tokens - 1
        return timing

    def decode(self, sequences: Sequences, seed: int, steps: int, max_seconds: float) -> Timing:
        """Make `steps` more tokens of each sequence, fewer if they take too long; start them where it holds others."""
        assert sequences.max_tokens - sequences.prompt_tokens > steps
        if self.sequences != sequences or self._room < steps:
            self.start(sequences, seed)
        timing = self._request({"steps": steps, "max_seconds": max_seconds})
        self._room -= timing.steps
        return timing

    def improve_pages(self) -> None:
        """Move a peer's weights to huge pages. Ingot stays as it is for its users: it does so itself."""
        if not self._peer.is_ours:
            self._request({"collapse": True})

    def close(self) -> None:
        """End the process by closing its input."""
        with suppress(BrokenPipeError):  # it has ended
            self._process.communicate()
        self._errors.close()

    def __enter__(self) -> "PeerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request(self, request: Mapping[str, object]) -> Timing:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: reading finds its last words
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return Timing(**self._read())

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        # One answer for each request, so no line waits in the buffer that select does not see.
        if not select.select([self._process.stdout], [], [], self._answer_seconds)[0]:
            self._process.kill()
            self._process.wait()
            raise PeerFailed(f"no answer after {self._answer_seconds:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._errors.seek(0)
            raise PeerFailed(last_words(self._errors.read()))
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerFailed(shortened(answer["error"]))
        return answer


def environment_of(peer: Peer) -> dict[str, str]:
    """The environment variables of an engine's process."""
    return dict(os.environ) if peer.is_ours else os.environ | _HUGE_PAGES


def prepare(peer: Peer, setup: Setup, programs: Programs) -> PreparedModel:
    """Convert the checkpoint for an engine, unless that was done; PeerFailed with the converter's last words."""
    done = subprocess.run(
        programs.command(peer, setup, "prepare"), capture_output=True, text=True, cwd=ROOT, check=False
    )
    if done.returncode != 0:
        raise PeerFailed(last_words(done.stderr))
    facts = json.loads(done.stdout)
    return PreparedModel(**facts | {"model": Path(facts["model"])})


def last_words(errors: str) -> str:
    """The last line that a process wrote to standard error."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return shortened(lines[-1]) if lines else "it ended without a message"


def shortened(reason: str) -> str:
    """The first line of a reason, cut where it is too long for a table."""
    return reason.strip().partition("\n")[0][:_REASON_LETTERS]
