"""Subjects of verifications in tests: the fake executors with the demo model's tokenizer."""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.engine.engine import Engine
from ingot.runtime.engine.open_tiers import open_tiers
from ingot.runtime.forward_batch import FloatArray, ForwardBatch
from ingot.runtime.options import EngineOptions
from ingot.runtime.speculation.draft_model import DraftModel
from ingot.runtime.speculation.drafter import Drafter
from ingot.runtime.speculation.length_control import LengthControl
from ingot.runtime.speculation.speculator import Speculator
from ingot.runtime.speculation_options import SpeculationOptions
from ingot.validation.verify import Subject
from ingot.validation.verify.constraints import missing_constraints
from tests.runtime.engines import demo_tokenizer
from tests.simulators.fake_drafters import KnowingDrafter
from tests.simulators.fake_executor import FakeExecutor
from tests.simulators.layered_executor import LayeredExecutor, LayeredPipelinedExecutor
from tests.simulators.pipelined_executor import FakePipelinedExecutor

MAX_BATCH_TOKENS = 256
BLOCK_TOKENS = 8
_WRONG_DRAFTS = 0.3
_NUM_STATES = 24  # those of all requests at once, and room for snapshots
_DRAFT = Path("simulated-draft")


class UnsureExecutor(FakeExecutor):
    """A draft model that mostly agrees with a FakeExecutor: a quarter of its likeliest tokens are not likely here."""

    def logits(self, batch: ForwardBatch) -> FloatArray:
        """Logits [rows, vocab]."""
        logits = super().logits(batch)
        for row in logits:
            best = int(row.argmax())
            row[best] -= 20 * (best % 4 == 0)
        return logits


def fake_subject(scratch: Path, *, pipelined: bool = False, layout: str = "", **executor: Any) -> Subject:
    """A subject whose logits are a hash of what the block tables lead to; any lost or wrong block changes tokens.

    layout   name of a variant of LayeredExecutor: layers that differ, windows, side state
    """
    fields: dict[str, Any] = {"vocab_size": demo_tokenizer().vocab_size, "block_tokens": BLOCK_TOKENS, **executor}
    uniform = FakePipelinedExecutor if pipelined else FakeExecutor
    layered = LayeredPipelinedExecutor if pipelined else LayeredExecutor

    def make(**sizes: Any) -> FakeExecutor:
        return layered(layout, num_states=_NUM_STATES, **fields, **sizes) if layout else uniform(**fields, **sizes)

    def load(options: EngineOptions) -> Engine:
        blocks, most = options.kv_blocks or 256, options.max_batch_tokens or MAX_BATCH_TOKENS
        slow = options.kv_offload // facts.kv_geometry.block_bytes if isinstance(options.kv_offload, int) else 0
        fake = make(
            num_blocks=blocks + slow,
            num_fast_blocks=blocks,
            max_batch_tokens=most,
            max_adapters=options.max_adapters,
        )
        return Engine(
            fake,
            demo_tokenizer(),
            prefix_cache=options.prefix_cache,
            identity="fake",
            speculator=speculator(options.speculation),
            tiers=partial(open_tiers, options=options),
        )

    @cache
    def plain(prompt: tuple[int, ...], params: SamplingParams) -> tuple[int, ...]:
        fake = make(num_blocks=256, max_batch_tokens=MAX_BATCH_TOKENS)
        with Engine(fake, demo_tokenizer(), prefix_cache=False) as engine:
            endless = replace(params, n=1, stop=(), stop_token_ids=(), ignore_eos=True)  # drafts go past a stop
            return engine.generate(list(prompt), endless).token_ids

    def speculator(options: object) -> Speculator | None:
        """Without a draft model, a drafter that is right most of the time: real ones guess no hashes."""
        if not isinstance(options, SpeculationOptions):
            return None
        drafters: list[Drafter] = []
        if options.names:
            drafters.append(KnowingDrafter(plain, fields["vocab_size"], error_rate=_WRONG_DRAFTS))
        if options.draft is not None:
            executor = UnsureExecutor(**fields, num_blocks=512)
            drafters.append(DraftModel(executor, target_vocab_size=fields["vocab_size"]))
        count, control = options.num_draft_tokens, LengthControl(adapts=False)
        return Speculator(*drafters, vocab_size=fields["vocab_size"], num_draft_tokens=count, control=control)

    facts = make(num_blocks=1)
    return Subject(
        name="fake",
        identity="0" * 64,
        target="fake",
        engine="fake",
        model=facts.model,
        kv=facts.kv_geometry,
        max_batch_tokens=MAX_BATCH_TOKENS,
        load=load,
        keeps_logits=(False, True) if pipelined else (True,),
        draft=_DRAFT,
        scratch=scratch,
        no_constraints=missing_constraints(demo_tokenizer(), fields["vocab_size"]),
        no_adapters="",
    )
