"""The interface of a loader, and its process: logits and greedy tokens of an exported checkpoint.

A loader's module ends with `if __name__ == "__main__": answer(load, packages)`. benchmarks/quantizers/format_loaders.py
starts it in the package's own virtual environment with one JSON object, the fields of Request; logits come back in
a file, the rest as one JSON line. No loader imports Ingot. To add one: write it, and name it in the parent's table.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]
LogitsOf = Callable[[list[int]], Logits]  # token ids -> logits of every position [tokens, vocab]


@dataclass(frozen=True)
class Request:
    """A checkpoint in the package's format, a prompt, the number of tokens to generate, and the tokens to score.

    scored   token ids whose logits to return
    logits   .npy file to write them to, [tokens, vocab] float32
    """

    checkpoint: Path
    prompt: tuple[int, ...]
    new_tokens: int
    scored: tuple[int, ...]
    logits: Path


@dataclass(frozen=True)
class Loaded:
    """The greedy tokens after the prompt, and versions."""

    tokens: list[int]
    versions: dict[str, str]


def request_from_json(text: str) -> Request:
    """The parent passes the fields of Request as one JSON object."""
    fields = json.loads(text)
    return Request(
        checkpoint=Path(fields["checkpoint"]),
        prompt=tuple(fields["prompt"]),
        new_tokens=fields["new_tokens"],
        scored=tuple(fields["scored"]),
        logits=Path(fields["logits"]),
    )


def greedy(logits_of: LogitsOf, prompt: Sequence[int], new_tokens: int) -> list[int]:
    """Generate every token from the whole text before it: no cache that could differ between packages."""
    ids = list(prompt)
    for _ in range(new_tokens):
        ids.append(int(logits_of(ids)[-1].argmax()))
    return ids[len(prompt) :]


def answer(load: Callable[[Path], LogitsOf], packages: Sequence[str]) -> None:
    """Load, score, generate. Libraries may print: the pipe to the parent is moved away first."""
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    (text,) = sys.argv[1:]
    request = request_from_json(text)
    logits_of = load(request.checkpoint)
    np.save(request.logits, logits_of(list(request.scored)))
    loaded = Loaded(greedy(logits_of, request.prompt, request.new_tokens), {name: version(name) for name in packages})
    channel.write(json.dumps(asdict(loaded)) + "\n")
    channel.flush()
