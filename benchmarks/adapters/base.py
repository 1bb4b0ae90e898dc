"""The interface of a measured engine, and its two processes.

An adapter's module ends with `if __name__ == "__main__": run(prepare, MyAdapter)`. benchmarks/peers.py starts it twice:

    prepare   converts the checkpoint unless that was done, and prints a PreparedModel; it may import converters
    serve     loads the prepared model once, prints the load's Timing, and then answers one JSON line per measurement

So memory and load time are those of the engine alone. Every engine gets the same random prompts and generates greedily,
past any end of text; tokens are never decoded to text. An engine that cannot stop between two tokens is a
RequestAdapter, which runs whole requests and reports what its engine measured.

To add an engine: write its adapter, and add a row to PEERS in benchmarks/peers.py.
"""

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]
Mode = Literal["prepare", "serve"]
_HUGE_PAGE = 1 << 21
_MADV_COLLAPSE = 25


@dataclass(frozen=True)
class Setup:
    """The parent's request.

    shape, context_tokens   of the random checkpoint, which is in `work_folder` with all converted models
    threads                 of the engine
    max_batch               most sequences at once
    max_tokens              most tokens of one sequence, prompt included
    pool_tokens             most tokens of all sequences together
    own_python              interpreter that has Ingot, for adapters whose converter is Ingot
    options                 the adapter's own, from the table of peers
    """

    shape: str
    context_tokens: int
    work_folder: Path
    threads: int
    max_batch: int
    max_tokens: int
    pool_tokens: int
    own_python: str = sys.executable
    options: Mapping[str, int | str] = field(default_factory=dict)

    @property
    def checkpoint(self) -> Path:
        """Folder of the checkpoint, as benchmarks.kv.synthetic_artifacts names it."""
        return self.work_folder / f"{self.shape}-{self.context_tokens}"


@dataclass(frozen=True)
class PreparedModel:
    """A converted model and facts about it.

    weight_bytes     bytes of weights that one decode step reads: all matrices and the head; of the embedding only the
                     rows that are gathered (so nothing, unless it is also the head)
    kv_token_bytes   bytes of keys and values of one cached token, over all layers
    """

    model: Path
    versions: dict[str, str]
    weight_bytes: int
    kv_token_bytes: int
    notes: str


@dataclass(frozen=True)
class Timing:
    """Wall time, processor time of the whole process (user and system, all threads), and steps that were timed.

    The processor time is None where an engine reports the wall time alone of what is measured.
    """

    seconds: float
    cpu_seconds: float | None
    steps: int


class Adapter(Protocol):
    """An engine with its model loaded."""

    def __init__(self, setup: Setup, model: Path) -> None: ...

    def start(self, prompts: Tokens, max_tokens: int) -> None:
        """Forget earlier sequences and run the prompts [batch, tokens] up to each one's first token.

        No sequence gets longer than max_tokens, its prompt included.
        """
        ...

    def step(self) -> None:
        """Make one more token for every sequence."""
        ...


class RequestAdapter(Protocol):
    """An engine that runs whole requests only, and reports how long their prompts and their tokens took."""

    def __init__(self, setup: Setup, model: Path) -> None: ...

    def prefill(self, prompts: Tokens) -> Timing:
        """Compute the prompts [batch, tokens] up to each one's first token."""
        ...

    def decode(self, prompts: Tokens, steps: int) -> Timing:
        """Make `steps` tokens after the first one of each prompt, whose own time is left out."""
        ...


def timed(action: Callable[[], object], most: int = 1, max_seconds: float = float("inf")) -> Timing:
    """Repeat the action `most` times, or fewer when `max_seconds` are over before a repetition begins."""
    begin, begin_cpu, steps = time.perf_counter(), time.process_time(), 0
    while steps < most and (steps == 0 or time.perf_counter() - begin < max_seconds):
        action()
        steps += 1
    return Timing(time.perf_counter() - begin, time.process_time() - begin_cpu, steps)


def random_prompts(batch: int, tokens: int, vocab_size: int, seed: int) -> Tokens:
    """Random prompts [batch, tokens], the same for every engine; token 0 is the end of text and left out."""
    return np.random.default_rng(seed).integers(1, vocab_size, (batch, tokens), dtype=np.int64)


def run(prepare: Callable[[Setup], PreparedModel], adapter_class: type[Adapter] | type[RequestAdapter]) -> None:
    """Do what the arguments say: `prepare SETUP`, or `serve SETUP MODEL` until the parent closes the pipe.

    Libraries may print what they like: the pipe to the parent is moved away from standard output first.
    """
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    mode, text, *model = sys.argv[1:]
    setup = setup_from_json(text)
    if mode == "prepare":
        _answer(channel, asdict(prepare(setup)))
        return
    try:
        _serve(channel, setup, Path(*model), adapter_class)
    except Exception as error:
        # the reason is not always the last line on standard error: a library may print more while it ends
        _answer(channel, {"error": f"{type(error).__name__}: {error}"})
        raise


def _serve(channel: IO[str], setup: Setup, model: Path, adapter_class: type[Adapter] | type[RequestAdapter]) -> None:
    loaded: list[Adapter | RequestAdapter] = []
    load = timed(lambda: loaded.append(adapter_class(setup, model)))
    _answer(channel, asdict(load))
    vocab_size = json.loads((setup.checkpoint / "config.json").read_text("utf-8"))["vocab_size"]
    measurements = _Measurements(loaded[0], vocab_size)
    for line in sys.stdin:
        _answer(channel, asdict(measurements.take(json.loads(line))))


class _Measurements:
    """Answers requests; holds the prompts that were started last, which a RequestAdapter runs again to decode."""

    def __init__(self, adapter: Adapter | RequestAdapter, vocab_size: int) -> None:
        self._adapter, self._vocab_size = adapter, vocab_size
        self._prompts = np.zeros((0, 0), np.int64)

    def take(self, request: dict[str, Any]) -> Timing:
        """A request is {"collapse"}, {"steps", "max_seconds"}, or {"batch", "prompt_tokens", "max_tokens", "seed"}."""
        if "collapse" in request:
            return timed(collapse_anonymous_memory)
        if "steps" in request:
            return self._decode(request["steps"], request["max_seconds"])
        self._prompts = random_prompts(request["batch"], request["prompt_tokens"], self._vocab_size, request["seed"])
        return self._start(request["max_tokens"])

    def _start(self, max_tokens: int) -> Timing:
        adapter, prompts = self._adapter, self._prompts
        if hasattr(adapter, "prefill"):
            return adapter.prefill(prompts)
        return timed(lambda: adapter.start(prompts, max_tokens))

    def _decode(self, steps: int, max_seconds: float) -> Timing:
        if hasattr(self._adapter, "decode"):
            return self._adapter.decode(self._prompts, steps)
        return timed(self._adapter.step, steps, max_seconds)


def collapse_anonymous_memory() -> None:
    """Move the memory of this process that is in no file to huge pages, by MADV_COLLAPSE of Linux 6.1.

    Whichever way a library allocates its weights, they are then where reading them is fastest.
    """
    maps = Path("/proc/self/maps")
    if not maps.is_file():
        return
    libc = ctypes.CDLL(None)
    for begin, end in anonymous_regions(maps.read_text("utf-8")):
        first, last = -(-begin // _HUGE_PAGE) * _HUGE_PAGE, end // _HUGE_PAGE * _HUGE_PAGE
        if last > first:
            libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_COLLAPSE)


def anonymous_regions(maps: str) -> list[tuple[int, int]]:
    """First and last address of private, writable mappings without a file, from the text of /proc/PID/maps."""
    rows = [line.split(maxsplit=5) for line in maps.splitlines()]
    chosen = [row[0].split("-") for row in rows if row[1] == "rw-p" and (len(row) < 6 or row[5] == "[heap]")]
    return [(int(begin, 16), int(end, 16)) for begin, end in chosen]


def setup_from_json(text: str) -> Setup:
    """The parent passes the fields of Setup as one JSON object."""
    fields = json.loads(text)
    return Setup(**fields | {"work_folder": Path(fields["work_folder"])})


def _answer(channel: IO[str], message: Mapping[str, object]) -> None:
    channel.write(json.dumps(message, default=str) + "\n")
    channel.flush()
