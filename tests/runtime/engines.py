"""Engines for tests: the fake executor with the demo model's tokenizer, and random requests."""

import random
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ingot.runtime.engine import Engine
from ingot.runtime.sampling import SamplingParams
from ingot.runtime.speculation.speculator import Speculator
from ingot.runtime.text.tokenizer import Tokenizer
from tests.data_paths import DEMO_MODEL
from tests.simulators.fake_executor import FakeExecutor

VOCAB_SIZE = 256
_ADJUSTED: dict[str, Any] = {"frequency_penalty": 0.7, "logit_bias": {3: 2.5, 200: -100}}


@cache
def demo_tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO_MODEL)


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
    "{% for tool in tools or [] %}{{ tool.name }} {% endfor %}{% if mood is defined %}{{ mood }} {% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}{% endfor %}"
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
