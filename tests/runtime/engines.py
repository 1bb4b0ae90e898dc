"""Engines for tests: the fake executor with the demo model's tokenizer, random requests and random loads."""

import json
import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from ingot.runtime.asking.outputs import Completion
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.engine.engine import Engine
from ingot.runtime.speculation.speculator import Speculator
from ingot.runtime.text.tokenizer import Tokenizer
from tests.data_paths import DEMO_MODEL
from tests.simulators.fake_executor import FakeExecutor

VOCAB_SIZE = 256
LOAD_VOCAB_SIZE = 8  # of `Load`: few tokens, so that prefixes and end tokens recur
_ADJUSTED: dict[str, Any] = {"frequency_penalty": 0.7, "logit_bias": {3: 2.5, 200: -100}}


@cache
def demo_tokenizer() -> Tokenizer:
    """The demo model's tokenizer without its chat template."""
    return Tokenizer.load(DEMO_MODEL, ("tokenizer.json", "tokenizer_config.json", "generation_config.json"))


@cache
def sentencepiece_tokenizer(alphabet: str = "".join(map(chr, range(33, 127))), byte_fallback: bool = True) -> Tokenizer:
    """A small tokenizer of SentencePiece's kind, which encodes every text with a space before it.

    It has a token for each character of the alphabet and, with `byte_fallback`, for each byte.
    """
    merged = [["▁", "e"], ["▁e", "n"], ["e", "n"], ["i", "d"], ["t", "r"], ["tr", "u"], ["tru", "e"]]
    entries = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256) if byte_fallback), "▁", *alphabet]
    merges = [pair for pair in merged if set("".join(pair)) <= {"▁", *alphabet}]
    entries += ["".join(pair) for pair in merges]
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    words = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    document = {
        "version": "1.0",
        "added_tokens": [{"id": index, "content": entries[index], **special} for index in range(3)],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, spaces]},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [words, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]},
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": byte_fallback,
            "vocab": {entry: index for index, entry in enumerate(entries)},
            "merges": merges,
        },
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
        return Tokenizer.load(folder)


def token_engine(
    *, max_sequences: int = 64, prefix_cache: bool = True, speculator: Speculator | None = None, **executor: Any
) -> Engine:
    """An engine for token ids only."""
    fake = FakeExecutor(**{"vocab_size": VOCAB_SIZE, **executor})
    return Engine(fake, max_sequences=max_sequences, prefix_cache=prefix_cache, speculator=speculator)


def text_engine(**executor: Any) -> Engine:
    """An engine with the demo model's tokenizer."""
    tokenizer = demo_tokenizer()
    return Engine(FakeExecutor(**{"vocab_size": tokenizer.vocab_size, **executor}), tokenizer)


HELLO = [{"role": "user", "content": "Hello"}]
_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.name or tool.function.name }} {% endfor %}"
    "{% if mood is defined %}{{ mood }} {% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role == 'assistant' %} >{% endif %}"
)


def chat_tokenizer(folder: Path) -> Tokenizer:
    """The demo model's tokenizer with a chat template that prints its tools, the variable `mood` and its messages."""
    shutil.copy(DEMO_MODEL / "tokenizer.json", folder)
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    return Tokenizer.load(folder)


def chat_engine(folder: Path) -> Engine:
    """An engine for conversations."""
    tokenizer = chat_tokenizer(folder)
    return Engine(FakeExecutor(vocab_size=tokenizer.vocab_size), tokenizer)


def random_pool(rng: random.Random, longest: int = 64) -> dict[str, int]:
    """Options of a fake executor whose pool is small for several requests of `longest` tokens."""
    block_tokens = rng.choice([1, 2, 4, 16])
    num_blocks = -(-longest // block_tokens) + rng.choice([0, 1, 12])
    return {
        "block_tokens": block_tokens,
        "num_blocks": num_blocks,
        "max_batch_tokens": rng.choice([1, 5, 16, 64]),
    }


def random_requests(
    count: int, seed: int = 0, repetition_penalties: Sequence[float] = (1.0, 1.2)
) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 1 to 60 tokens, half of them with a common prefix; greedy and sampled; 1 to 40 output tokens."""
    rng = random.Random(seed)
    common = [rng.randrange(VOCAB_SIZE) for _ in range(37)]
    requests = []
    for number in range(count):
        prompt = common[: rng.randrange(37)] * (number % 2)
        prompt += [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 24))]
        params = SamplingParams(
            max_tokens=rng.randrange(1, 41),
            temperature=rng.choice([0.0, 0.8]),
            top_k=rng.choice([0, 20]),
            seed=rng.randrange(1000),
            repetition_penalty=rng.choice(repetition_penalties),
            **(_ADJUSTED if rng.random() < 0.2 and max(repetition_penalties) > 1 else {}),
        )
        requests.append((prompt, params))
    return requests


@dataclass
class Load:
    """Random requests with the step of their arrival and, for some, of their abort; an engine too small for them."""

    seed: int
    engine: dict[str, Any] = field(default_factory=dict)
    executor: dict[str, Any] = field(default_factory=dict)
    requests: list[tuple[list[int], SamplingParams]] = field(default_factory=list)
    arrivals: list[int] = field(default_factory=list)
    aborts: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        self.executor = {
            **random_pool(rng),
            "vocab_size": LOAD_VOCAB_SIZE,
            "eos_token_ids": rng.choice([(), (0,)]),
        }
        self.engine = {"max_sequences": rng.choice([1, 2, 5, 64]), "prefix_cache": rng.random() < 0.7}
        host_share = rng.choice([0.0, 0.0, 0.1, 1.0])
        self.requests = [self._request(rng, host_share) for _ in range(rng.randrange(1, 14))]
        self.arrivals = [rng.randrange(12) for _ in self.requests]
        self.aborts = {number: at + rng.randrange(9) for number, at in enumerate(self.arrivals) if rng.random() < 0.15}

    @staticmethod
    def _request(rng: random.Random, host_share: float) -> tuple[list[int], SamplingParams]:
        prompt = [1, 2, 3, 4] * rng.randrange(9) + [rng.randrange(LOAD_VOCAB_SIZE) for _ in range(rng.randrange(1, 5))]
        params = SamplingParams(
            max_tokens=rng.randrange(1, 28),
            temperature=rng.choice([0.0, 0.5, 2.0]),
            top_k=rng.choice([0, 3]),
            top_p=rng.choice([1.0, 0.75]),
            seed=rng.randrange(100),
            stop_token_ids=rng.choice([(), (5,)]),
            repetition_penalty=1.25 if rng.random() < host_share else 1.0,
        )
        return prompt, params


class Arrivals(Protocol):
    """Requests by number, the step in which each arrives, and that in which some are aborted."""

    requests: list[tuple[list[int], SamplingParams]]
    arrivals: list[int]
    aborts: dict[int, int]


def serve(
    engine: Engine, load: Arrivals, added: Callable[[int, int], object] = lambda number, request_id: None
) -> dict[int, Completion]:
    """Add and abort as the load says, step until all finish; completions by number of the request.

    `added` is called with the number and the id of each request once it was added.
    """
    ids: dict[int, int] = {}
    done: dict[int, Completion] = {}
    now = 0
    while now <= max(load.arrivals) or engine.has_unfinished():
        for number, (prompt, params) in enumerate(load.requests):
            if load.arrivals[number] == now:
                request_id = engine.add(prompt, params)
                ids[request_id] = number
                added(number, request_id)
        for request_id, number in ids.items():
            completion = engine.abort(request_id) if load.aborts.get(number) == now else None
            if completion:
                done[number] = completion
        for output in engine.step():
            if output.completion:
                done[ids[output.request_id]] = output.completion
        engine.check()
        now += 1
    return done
