"""The interface of a measured engine, and the loop that serves it to the parent process.

An adapter's module ends with `if __name__ == "__main__": serve(MyAdapter)`. The parent (benchmarks/peers.py) starts it
with a checkpoint, a working folder and a thread count, and then sends one JSON line per measurement. The model is
loaded once. Every engine gets the same prompts (random tokens), generates greedily the same number of tokens past any
end of text, and never decodes tokens to text.

To add an engine: write its adapter, and add a row to PEERS in benchmarks/peers.py.
"""

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Protocol

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]


@dataclass(frozen=True)
class Setup:
    """The parent's request: checkpoint, a folder for converted models, threads, and the largest batch and length.

    max_tokens counts prompt and new tokens of one sequence; options are the adapter's own, from the table of peers.
    """

    checkpoint: Path
    work_folder: Path
    threads: int
    max_batch: int
    max_tokens: int
    options: Mapping[str, int | str] = field(default_factory=dict)


@dataclass(frozen=True)
class PeerFacts:
    """Facts about an engine for the table.

    weight_bytes  bytes of weights that one decode step reads: all matrices and the head; of the embedding only the rows
                  that are gathered (so nothing, unless it is also the head)
    """

    versions: dict[str, str]
    weight_bytes: int
    notes: str


@dataclass(frozen=True)
class Timing:
    """Seconds until every sequence has its first token, and seconds of all later steps together."""

    prefill_seconds: float
    decode_seconds: float


class Adapter(Protocol):
    """An engine with its model loaded."""

    def __init__(self, setup: Setup) -> None: ...

    def facts(self) -> PeerFacts:
        """Versions, bytes read per step, and remarks for the reader."""
        ...

    def start(self, prompts: Tokens, new_tokens: int) -> None:
        """Forget earlier sequences and run the prompts [batch, tokens] up to each one's first token of new_tokens."""
        ...

    def step(self) -> None:
        """Make one more token for every sequence."""
        ...


def measure(adapter: Adapter, prompts: Tokens, new_tokens: int) -> Timing:
    """Generate `new_tokens` for every prompt and return how long the two phases took."""
    begin = time.perf_counter()
    adapter.start(prompts, new_tokens)
    first = time.perf_counter()
    for _ in range(new_tokens - 1):
        adapter.step()
    return Timing(first - begin, time.perf_counter() - first)


def random_prompts(batch: int, tokens: int, vocab_size: int, seed: int) -> Tokens:
    """Random prompts [batch, tokens], the same for every engine; token 0 is the end of text and left out."""
    return np.random.default_rng(seed).integers(1, vocab_size, (batch, tokens), dtype=np.int64)


def serve(adapter_class: type[Adapter]) -> None:
    """Load the model, then answer measurements until the parent closes the pipe.

    Libraries may print what they like: the pipe to the parent is moved away from standard output first.
    """
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    setup = _setup_from_arguments(sys.argv[1:])
    adapter = adapter_class(setup)
    vocab_size = json.loads((setup.checkpoint / "config.json").read_text("utf-8"))["vocab_size"]
    _answer(channel, asdict(adapter.facts()))
    for line in sys.stdin:
        request = json.loads(line)
        prompts = random_prompts(request["batch"], request["prompt_tokens"], vocab_size, request["seed"])
        _answer(channel, asdict(measure(adapter, prompts, request["new_tokens"])))


def _setup_from_arguments(arguments: list[str]) -> Setup:
    """The parent passes the fields of Setup as one JSON object."""
    (text,) = arguments
    fields = json.loads(text)
    return Setup(
        checkpoint=Path(fields["checkpoint"]),
        work_folder=Path(fields["work_folder"]),
        threads=fields["threads"],
        max_batch=fields["max_batch"],
        max_tokens=fields["max_tokens"],
        options=fields.get("options", {}),
    )


def _answer(channel: IO[str], message: dict[str, object]) -> None:
    channel.write(json.dumps(message) + "\n")
    channel.flush()
