"""What a server must do with the CUDA engine, on any device: the interpreted one here, a GPU in tests/gpu.

Each scenario loads an engine as `ingot serve` does, and compares with the tokens of an engine that computes one request
at a time without any cache. On a GPU the artifact has a batch-invariant program, so that tokens are equal there too.
"""

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ingot.artifact import Artifact
from ingot.runtime import Engine, SamplingParams
from ingot.validation.verify import VerifyOptions, open_subject, verify
from ingot.validation.verify.adapters import random_adapter
from tests.runtime.server.servers import Running, running

OVERRIDES = (
    *("gpu.adapters=true", "gpu.decode_rows=[1,4]", "gpu.prefill_rows=[32]"),
    *("engine.max_batch_tokens=32", "context_tokens=96", "engine.block_tokens=8"),
)
# 14 or 15 tokens each: two blocks, and a third for the answer.
PROMPTS = (
    "def read_file(path):\n    with open(path) as",
    "class Reader:\n    def __init__(self, path):\n",
    "import os\n\nfor name in os.listdir(path):\n",
)
TOKENS = 5
GREEDY: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
CELLS = ("batch-mates", "prefix-hit", "adapter-mates")
_KINDS = ["yes", "no"]


def expected_texts(artifact: Artifact) -> dict[str, str]:
    """The text after each prompt, computed alone."""
    with Engine.load(artifact, kv_blocks=12, prefix_cache=False) as engine:
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        return {prompt: engine.generate(prompt, params).text for prompt in PROMPTS}


def _text(server: Running, prompt: str, **more: Any) -> str:
    answer = server.client().completions.create(model="fake", prompt=prompt, extra_body={**GREEDY, **more})
    return answer.choices[0].text


def _together(server: Running) -> dict[str, str]:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return dict(zip(PROMPTS, pool.map(lambda prompt: _text(server, prompt), PROMPTS), strict=True))


def completions_and_chat(artifact: Artifact, expected: Mapping[str, str], folder: Path) -> None:
    """Requests at once, streamed, in a conversation, and again from the prefix cache."""
    with running(Engine.load(artifact, kv_blocks=24)) as server:
        assert _together(server) == expected
        metrics = server.model().engine.metrics
        before = metrics().prefix_hit_tokens
        assert _together(server) == expected
        assert metrics().prefix_hit_tokens > before
        stream = server.client().completions.create(model="fake", prompt=PROMPTS[0], stream=True, extra_body=GREEDY)
        assert "".join(event.choices[0].text for event in stream if event.choices) == expected[PROMPTS[0]]
        talk = [{"role": "user", "content": "read a file"}]
        answers = [
            server.client().chat.completions.create(model="fake", messages=talk, extra_body=GREEDY).choices[0]  # type: ignore[arg-type]
            for _ in range(2)
        ]
        assert answers[0].message.content == answers[1].message.content
        assert answers[0].finish_reason == "length"
        server.require_nothing_left()


def constrained_output(artifact: Artifact, expected: Mapping[str, str], folder: Path) -> None:
    """Answers follow a choice and a schema, next to a request without a constraint."""
    schema = {"type": "object", "properties": {"a": {"enum": _KINDS}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    with running(Engine.load(artifact, kv_blocks=24)) as server, ThreadPoolExecutor(2) as pool:
        free = pool.submit(_text, server, PROMPTS[0])
        made = _text(server, PROMPTS[1], response_format=form, max_tokens=40, ignore_eos=False)
        assert json.loads(made)["a"] in _KINDS
        assert free.result() == expected[PROMPTS[0]]


def preemption(artifact: Artifact, expected: Mapping[str, str], folder: Path) -> None:
    """A pool that holds fewer requests than run at once changes no token."""
    with running(Engine.load(artifact, kv_blocks=5)) as server:
        assert _together(server) == expected
        assert server.model().engine.metrics().num_preemptions > 0


def tiers(artifact: Artifact, expected: Mapping[str, str], folder: Path) -> None:
    """Blocks that left the pool come back from host memory, and after a restart from the disk."""
    stored: dict[str, Any] = {"kv_disk_path": folder / "blocks", "kv_disk_bytes": 2**26, "kv_host_bytes": 2**24}
    for tier in ("host", "disk"):
        with running(Engine.load(artifact, kv_blocks=4, **stored)) as server:
            for _ in range(2):
                assert {prompt: _text(server, prompt) for prompt in PROMPTS} == expected
            hits = server.model().engine.metrics().prefix_hit_tokens_by_tier
            assert hits.get(tier, 0) > 0, (tier, hits)


def speculation(artifact: Artifact, expected: Mapping[str, str], folder: Path) -> None:
    """Drafts copied from the text change no token."""
    repeated = PROMPTS[2] + PROMPTS[2]
    with Engine.load(artifact, kv_blocks=24, speculation="lookup") as engine:
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        assert {prompt: engine.generate(prompt, params).text for prompt in PROMPTS} == expected
        drafted = engine.generate(repeated, params).text
    with Engine.load(artifact, kv_blocks=24) as plain:
        assert drafted == plain.generate(repeated, params).text


def adapters(artifact: Artifact, expected: Mapping[str, str], folder: Path) -> None:
    """Requests with adapters and without share steps, while one is loaded and another unloaded."""
    engine = Engine.load(artifact, kv_blocks=24, max_adapters=2)
    for name, seed in (("one", 1), ("two", 2)):
        engine.register_adapter(random_adapter(name, engine.projections, seed), folder)
    with running(engine) as server, ThreadPoolExecutor(3) as pool:
        names = ("fake", "one", "two")

        def ask(name: str) -> str:
            made = server.client().completions.create(model=name, prompt=PROMPTS[0], extra_body=GREEDY)
            return made.choices[0].text

        alone = [ask(name) for name in names]
        assert list(pool.map(ask, names)) == alone
        assert alone[0] == expected[PROMPTS[0]]
        assert len({*alone}) == 3


def verified(artifact: Artifact, expected: Mapping[str, str], folder: Path) -> None:
    """`ingot verify` finds equal bits."""
    result = verify(open_subject(artifact), VerifyOptions(quick=True, only=CELLS))
    assert [(cell.name, cell.verdict) for cell in result.cells] == [(name, "OK") for name in CELLS]


Scenario = Callable[[Artifact, Mapping[str, str], Path], None]
SCENARIOS: tuple[Scenario, ...] = (
    completions_and_chat,
    constrained_output,
    preemption,
    tiers,
    speculation,
    adapters,
)
ON_A_GPU = (*SCENARIOS, verified)  # interpreted, it takes minutes
