"""Requests of whole batches to a stand-in of the package, which counts letters as tokens in pairs."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from benchmarks.adapters.base import Setup
from benchmarks.adapters.mistral_rs import MistralRs


class Runner:
    """Two letters are a token; the request sent first has the longest times."""

    def __init__(self, source: Any, max_seqs: int, prefix_cache_n: int, jinja_explicit: str) -> None:
        assert Path(jinja_explicit).read_text() == "{{ messages[0]['content'] }}"
        assert prefix_cache_n == 0
        self.texts: list[str] = []

    def tokenize_text(self, text: str, special: bool, thinking: None) -> list[int]:
        return [1] * ((len(text) + 1) // 2)

    def send_chat_completion_request(self, request: Any) -> Iterator[Any]:
        self.texts.append(request.messages[0]["content"])
        rank = len(self.texts)
        usage = SimpleNamespace(
            prompt_tokens=len(self.tokenize_text(self.texts[-1], False, None)),
            completion_tokens=request.max_tokens,
            total_prompt_time_sec=1.0 / rank,
            total_completion_time_sec=8.0 / rank,
        )
        chunks = [SimpleNamespace(usage=None), SimpleNamespace(usage=usage)]
        return iter(chunks if request.max_tokens != 99 else chunks[:1])


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MistralRs:
    package: Any = SimpleNamespace(
        Runner=Runner, ChatCompletionRequest=SimpleNamespace, Which=SimpleNamespace(GGUF=SimpleNamespace)
    )
    monkeypatch.setitem(sys.modules, "mistralrs", package)
    monkeypatch.setenv("RAYON_NUM_THREADS", "7")
    return MistralRs(Setup("small", 64, tmp_path, 2, 4, 32, 128), tmp_path / "small.gguf")


def test_a_batch_takes_until_the_last_prompt_and_decodes_as_long_as_the_last_to_begin(engine: MistralRs) -> None:
    prompts = np.arange(1, 49, dtype=np.int64).reshape(4, 12)
    prompt, tokens = engine.prefill(prompts), engine.decode(prompts, 4)
    assert (prompt.seconds, prompt.cpu_seconds, prompt.steps) == (1.0, None, 1)
    assert (tokens.seconds, tokens.steps) == (1.0, 4)


def test_prompts_differ_and_have_as_many_tokens(engine: MistralRs) -> None:
    engine.prefill(np.arange(1, 49, dtype=np.int64).reshape(4, 12))
    runner: Any = engine._runner
    assert len({*runner.texts}) == 4
    assert {len(runner.tokenize_text(text, False, None)) for text in runner.texts} == {12}


def test_a_request_that_ends_without_its_usage_is_an_error(engine: MistralRs) -> None:
    with pytest.raises(RuntimeError, match="ended a request without its usage"):
        engine.decode(np.ones((1, 12), np.int64), 98)
