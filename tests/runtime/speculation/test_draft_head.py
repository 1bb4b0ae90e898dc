"""A draft head: whatever steps a sequence went through, its drafts are those of a head that saw the tokens at once."""

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ingot.artifact import Artifact
from ingot.errors import ArtifactError, UsageError
from ingot.runtime.asking.request_options import RequestOptions
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.cpu.native_executor import NativeExecutor
from ingot.runtime.engine.engine import Engine
from ingot.runtime.kv.blocks import BlockManager
from ingot.runtime.requests.sampler import Sampler
from ingot.runtime.scheduling.batch_builder import BatchBuilder
from ingot.runtime.scheduling.sequence import ScheduledBatch, Sequence
from ingot.runtime.speculation import draft_head
from ingot.runtime.speculation.draft_head import HeadDrafter, HiddenRows
from ingot.runtime.speculation.drafter import DraftRequest
from ingot.runtime.speculation_options import SpeculationOptions
from tests.conftest import BuildArtifact
from tests.parity import CHECKPOINTS, MTP_CHECKPOINTS

VOCAB, NUM_DRAFTS = 60, 3


@pytest.fixture(scope="module")
def artifact(build_unmeasured: BuildArtifact) -> Artifact:
    return build_unmeasured("fp32-cpu", MTP_CHECKPOINTS / "mimo")


@pytest.fixture
def executor(artifact: Artifact) -> Iterator[NativeExecutor]:
    made = NativeExecutor(artifact, num_blocks=64, num_threads=1, with_head=True)
    yield made
    made.close()


class Steps:
    """Steps of some sequences on an executor, which a drafter observes."""

    def __init__(self, executor: NativeExecutor, num_head_blocks: int = 64) -> None:
        self.executor = executor
        self.blocks = BlockManager(executor.num_blocks, executor.kv_geometry.block_tokens)
        self.builder = BatchBuilder(self.blocks, max_batch_tokens=512, max_sequences=8)
        self.drafter = HeadDrafter(executor, num_head_blocks)
        self.sequences: dict[int, Sequence] = {}

    def add(self, number: int, tokens: list[int]) -> Sequence:
        sequence = self.sequences[number] = Sequence.of(number, tokens, 200)
        self.blocks.admit(number, sequence.tokens)
        sequence.num_computed = 0
        return sequence

    def compute(self, counts: dict[int, int], drafts: tuple[int, ...] = ()) -> None:
        """Compute so many tokens of each sequence, in one step; `drafts` follow the last of each, and are rejected."""
        batch = ScheduledBatch()
        for number, count in counts.items():
            sequence = self.sequences[number]
            self.blocks.reserve(number, sequence.num_computed, sequence.num_computed + count + len(drafts))
            batch.add(sequence, count)
            entry = batch.entries[-1]
            if drafts and entry.samples:
                batch.entries[-1] = entry._replace(drafts=drafts)
        self.executor.forward(self.builder.build(batch))
        self.drafter.observe(batch)
        for entry in batch.entries:
            entry.sequence.num_computed += entry.num_tokens

    def drafts(self, *numbers: int) -> list[tuple[int, ...]]:
        """The drafts of some sequences, whose tokens are all computed but the newest."""
        requests = [
            DraftRequest(self.sequences[number], Sampler(SamplingParams(max_tokens=99), []), NUM_DRAFTS)
            for number in numbers
        ]
        return [proposal.tokens for proposal in self.drafter.propose(requests)]


def at_once(artifact: Artifact, tokens: list[int]) -> tuple[int, ...]:
    """The drafts after tokens that were all computed in one step."""
    executor = NativeExecutor(artifact, num_blocks=64, num_threads=1, with_head=True)
    try:
        steps = Steps(executor)
        steps.add(0, tokens)
        steps.compute({0: len(tokens) - 1})
        return steps.drafts(0)[0]
    finally:
        executor.close()


def test_drafts_do_not_depend_on_steps_rejected_drafts_rest_and_preemption(
    artifact: Artifact, executor: NativeExecutor
) -> None:
    rng, steps = random.Random(0), Steps(executor)
    for number in range(3):
        steps.add(number, [rng.randrange(3, VOCAB) for _ in range(6 + 9 * number)])
        length = len(steps.sequences[number].tokens)
        for count in (4, length - 5):
            steps.compute({number: count})
    for turn in range(12):
        if turn == 6:  # preempted: all is computed again, from the beginning
            steps.sequences[1].num_computed = 0
            steps.compute({1: len(steps.sequences[1].tokens) - 1})
        if turn % 4 != 3:  # else at rest: the hidden states of this turn wait for the next
            for number, found in enumerate(steps.drafts(0, 1, 2)):
                assert found == at_once(artifact, steps.sequences[number].tokens.tolist())
        for sequence in steps.sequences.values():
            sequence.tokens.append(rng.randrange(3, VOCAB))
        steps.compute(dict.fromkeys(range(3), 1), drafts=tuple(rng.randrange(3, VOCAB) for _ in range(turn % 3)))
    steps.drafter.check()


def test_a_pool_without_room_gives_no_drafts_and_loses_nothing(artifact: Artifact, executor: NativeExecutor) -> None:
    block = executor.head_geometry.block_tokens
    steps = Steps(executor, num_head_blocks=2)
    tokens = [3 + index % 50 for index in range(block + 3)]
    for number in range(2):
        steps.add(number, tokens)
        steps.compute({number: len(tokens) - 1})
    assert steps.drafts(0, 1) == [at_once(artifact, tokens), ()]
    assert steps.drafts(1) == [at_once(artifact, tokens)]
    steps.drafter.forget(steps.sequences[1])
    assert len(steps.drafts(0)[0]) == NUM_DRAFTS  # its context is shorter: it made way
    steps.drafter.check()


def test_more_hidden_states_than_memory_shorten_the_context(
    artifact: Artifact, executor: NativeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = executor.hidden_states.shape[1] * 4
    monkeypatch.setattr(draft_head, "MOST_BYTES", 24 * row)
    steps = Steps(executor)
    tokens = [3 + index * 7 % 50 for index in range(40)]
    steps.add(0, tokens)
    steps.compute({0: 39})
    assert len(steps.drafts(0)[0]) == NUM_DRAFTS
    steps.add(1, tokens)
    steps.add(2, tokens)
    steps.compute({1: 20})
    steps.compute({2: 39})
    assert sum(map(len, steps.drafter._rows.values())) <= 24


def test_rows_are_those_of_their_positions() -> None:
    """Random writes, against a dict of positions."""
    rng = np.random.default_rng(0)
    for most in (5, 64, 300):
        rows, known = HiddenRows(2, most), dict[int, float]()
        for value in range(200):
            end = max(known, default=-1) + 1
            before = max(0, end - int(rng.integers(0, 6)))
            start = int(rng.choice(np.array([end, before, end + 2, 0]), p=[0.7, 0.24, 0.03, 0.03]))
            count = int(rng.integers(1, 2 * most if value % 20 == 0 else 4))
            rows.put(start, np.full((count, 2), value, np.float32))
            if start > end or start < min(known, default=start):
                known = {}
            known = {place: number for place, number in known.items() if place < start}
            known |= dict.fromkeys(range(start, start + count), float(value))
            assert rows.end == start + count
            assert 0 < len(rows) <= most
            found = rows.take(rows.first, len(rows))[:, 0].tolist()
            assert found == [known[place] for place in range(rows.first, rows.end)]
            if value % 7 == 0:
                rows.drop_before(rows.end - 2)


def test_tokens_and_logits_are_those_of_plain_decoding(artifact: Artifact) -> None:
    prompts = [[5, 9, 11] * 6, [7], list(range(3, 40))]
    params = [SamplingParams(max_tokens=24), SamplingParams(max_tokens=24, temperature=0.9, seed=5)]
    options = [RequestOptions(), RequestOptions(), RequestOptions(speculate=False)]
    expected = []
    with Engine.load(artifact, kv_blocks=64) as engine:
        for one in params:
            expected.append(engine.generate(prompts, one, options=options, keep_logits=True))
    chosen = SpeculationOptions("mtp", adaptive=False, num_draft_tokens=NUM_DRAFTS)
    with Engine.load(artifact, kv_blocks=64, speculation=chosen) as engine:
        for _ in range(2):  # the second time from cached blocks
            for one, plain in zip(params, expected, strict=True):
                found = engine.generate(prompts, one, options=options, keep_logits=True)
                for ours, theirs in zip(found, plain, strict=True):
                    assert ours.token_ids == theirs.token_ids
                    assert ours.logits is not None
                    assert theirs.logits is not None
                    assert ours.logits.tobytes() == theirs.logits.tobytes()
        metrics = engine.metrics().speculation
        assert metrics
        assert metrics.num_draft_tokens > 0
        assert metrics.num_failures == 0


def test_an_artifact_without_a_layer_is_refused(build_unmeasured: BuildArtifact, tmp_path: Path) -> None:
    plain = build_unmeasured("fp32-cpu", CHECKPOINTS / "llama")
    with pytest.raises(UsageError, match="has no MTP layer to draft by"):
        Engine.load(plain, speculation="mtp")


def test_a_damaged_head_is_refused_by_name(artifact: Artifact, tmp_path: Path) -> None:
    file = artifact.path / "program/draft_head.json"
    content = file.read_text()
    try:
        file.write_text(content.replace('"hidden_size":', '"hidden_sizes":'))
        with pytest.raises(ArtifactError, match=r"draft_head\.json"):
            Engine.load(artifact.path, speculation="mtp")
    finally:
        file.write_text(content)
