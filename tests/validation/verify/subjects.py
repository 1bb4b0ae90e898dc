"""Subjects of verifications in tests: the fake executors with the demo model's tokenizer."""

from pathlib import Path
from typing import Any

from ingot.runtime.engine import Engine
from ingot.runtime.options import EngineOptions
from ingot.validation.verify import Subject
from tests.runtime.engines import demo_tokenizer
from tests.simulators.fake_executor import FakeExecutor
from tests.simulators.pipelined_executor import FakePipelinedExecutor

MAX_BATCH_TOKENS = 256
BLOCK_TOKENS = 8


def fake_subject(scratch: Path, *, pipelined: bool = False, **executor: Any) -> Subject:
    """A subject whose logits are a hash of what the block tables lead to; any lost or wrong block changes tokens."""
    kind = FakePipelinedExecutor if pipelined else FakeExecutor
    fields = {"vocab_size": demo_tokenizer().vocab_size, "block_tokens": BLOCK_TOKENS, **executor}

    def load(options: EngineOptions) -> Engine:
        fake = kind(
            num_blocks=options.kv_blocks or 256, max_batch_tokens=options.max_batch_tokens or MAX_BATCH_TOKENS, **fields
        )
        return Engine(fake, demo_tokenizer(), prefix_cache=options.prefix_cache, identity="fake")

    model = kind(**fields).model
    return Subject(
        name="fake",
        identity="0" * 64,
        target="fake",
        engine="fake",
        model=model,
        kv=kind(**fields).kv_geometry,
        max_batch_tokens=MAX_BATCH_TOKENS,
        load=load,
        keeps_logits=(False, True) if pipelined else (True,),
        scratch=scratch,
    )
