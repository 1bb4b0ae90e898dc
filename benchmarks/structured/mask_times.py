"""Times of masks with a vocabulary of 128,000 tokens, as the engine computes them for its steps."""

import random
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from benchmarks.structured.schemas import random_schema
from ingot.runtime.constraints import Constraint
from ingot.runtime.constraints.compiler import ConstraintCompiler
from ingot.runtime.constraints.matcher import Matcher
from ingot.runtime.text.tokenizer import Tokenizer

VOCAB = 128_000
_STEPS = 120


def train_tokenizer(folder: Path, texts: Sequence[Path], vocab_size: int = VOCAB) -> Tokenizer:
    """A byte-level BPE of this size, made of texts; it stays in the folder for further runs."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        backend = Backend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
        backend.train([str(text) for text in texts], trainer)
        folder.mkdir(parents=True, exist_ok=True)
        backend.save(str(file))
    return Tokenizer.load(folder)


def measure(tokenizer: Tokenizer, num_schemas: int, seed: int = 0) -> dict[str, object]:
    """Milliseconds to read the vocabulary, to compile a schema, and for the mask of a step, p50 and p99."""
    rng = random.Random(seed)
    compiler = ConstraintCompiler(tokenizer, tokenizer.vocab_size)
    reading = _timed(compiler.read_vocabulary)
    compiling: list[float] = []
    masks: list[float] = []
    for _ in range(num_schemas):
        constraint = Constraint.json_schema(random_schema(rng))
        compiling.append(_timed(lambda: compiler.compile(constraint)))  # noqa: B023 (called at once)
        masks += _walk(compiler.compile(constraint).matcher(()), tokenizer, rng)
    return {
        "vocabulary": tokenizer.vocab_size,
        "vocabulary_ms": round(reading, 1),
        "schemas": num_schemas,
        "compile_ms": _quantiles(compiling),
        "masks": len(masks),
        "mask_ms": _quantiles(masks),
    }


def _walk(matcher: Matcher, tokenizer: Tokenizer, rng: random.Random) -> list[float]:
    """Times of the masks of one random text; tokens are taken as a model might, mostly long ones."""
    times: list[float] = []
    for _ in range(_STEPS):
        times.append(_timed(partial(matcher.prepare, ())))
        allowed = np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little"))
        allowed = allowed[allowed < tokenizer.vocab_size]
        sample = [int(allowed[rng.randrange(len(allowed))]) for _ in range(4)]
        matcher.consume(max(sample, key=lambda token: len((tokenizer.token(token) or "").strip("\u0120\u010a"))))
        if matcher.is_complete:
            break
    return times


def _timed(call: object) -> float:
    """Milliseconds of a call."""
    assert callable(call)
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e3


def _quantiles(times: Sequence[float]) -> dict[str, float]:
    return {
        name: round(float(np.quantile(times, share)), 4) for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1))
    }
