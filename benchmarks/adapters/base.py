"""The interface of a measured engine, and its two processes.

An adapter's module ends with `if __name__ == "__main__": run(prepare, MyAdapter)`. benchmarks/peers.py starts it twice:

    prepare   converts the checkpoint unless that was done, and prints a PreparedModel; it may import converters
    serve     loads the prepared model once, prints the load's Timing, and then answers one JSON line per measurement

So memory and load time are those of the engine alone. Every engine gets the same random prompts and generates greedily,
past any end of text; tokens are never decoded to text.

To add an engine: write its adapter, and add a row to PEERS in benchmarks/peers.py.
"""

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


@dataclass(frozen=True)
class Setup:
    """The parent's request.

    shape, context_tokens   of the random checkpoint, which is in `work_folder` with all converted models
    threads                 of the engine
    max_batch               most sequences at once
    max_tokens              most tokens of one sequence, prompt included
    pool_tokens             most tokens of all sequences together
    options                 the adapter's own, from the table of peers
    """

    shape: str
    context_tokens: int
    work_folder: Path
    threads: int
    max_batch: int
    max_tokens: int
    pool_tokens: int
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
    """Wall time, processor time of the whole process (user and system, all threads), and steps that were timed."""

    seconds: float
    cpu_seconds: float
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


def run(prepare: Callable[[Setup], PreparedModel], adapter_class: type[Adapter]) -> None:
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
    loaded: list[Adapter] = []
    load = timed(lambda: loaded.append(adapter_class(setup, Path(*model))))
    _answer(channel, asdict(load))
    vocab_size = json.loads((setup.checkpoint / "config.json").read_text("utf-8"))["vocab_size"]
    for line in sys.stdin:
        _answer(channel, asdict(_measure(loaded[0], json.loads(line), vocab_size)))


def _measure(adapter: Adapter, request: dict[str, Any], vocab_size: int) -> Timing:
    """A request is {"steps", "max_seconds"}, or {"batch", "prompt_tokens", "max_tokens", "seed"}."""
    if "steps" in request:
        return timed(adapter.step, request["steps"], request["max_seconds"])
    prompts = random_prompts(request["batch"], request["prompt_tokens"], vocab_size, request["seed"])
    return timed(lambda: adapter.start(prompts, request["max_tokens"]))


def setup_from_json(text: str) -> Setup:
    """The parent passes the fields of Setup as one JSON object."""
    fields = json.loads(text)
    return Setup(**fields | {"work_folder": Path(fields["work_folder"])})


def _answer(channel: IO[str], message: Mapping[str, object]) -> None:
    channel.write(json.dumps(message, default=str) + "\n")
    channel.flush()
