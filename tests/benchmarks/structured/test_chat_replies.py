"""Replies to chats with published templates by a model without an opinion, in small."""

import pytest

pytest.importorskip("llguidance", reason="the extra `structured` is not installed")

from benchmarks.structured.chat_replies import run

from tests.data_paths import shared_data

# One of each format, with a prompt that opens reasoning, and with one that has more after its anchor.
TEMPLATES = (
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "meetkai-functionary-medium-v3.2",
    "meta-llama-Llama-3.1-8B-Instruct",
    "mistralai-Mistral-Nemo-Instruct-2407",
    "Qwen-Qwen2.5-7B-Instruct",
)


def test_every_reply_is_what_was_asked_for_and_is_read_so() -> None:
    folder = shared_data("golden/chat-templates")
    outcome = run([folder / f"{name}.jinja" for name in TEMPLATES], seeds=2)
    assert outcome.problems == []
    for kind, counts in outcome.counts.items():
        assert counts.valid == counts.replies == 2 * len(TEMPLATES), kind
    assert outcome.counts["named"].calls == 2 * len(TEMPLATES)
    assert outcome.counts["required"].calls >= 2 * len(TEMPLATES)
    assert outcome.counts["choice"].with_reasoning == 1
