"""A draft model: what it proposes is what its executor would generate, however the target's tokens go on."""

import random
from typing import Any

import numpy as np
import pytest

from ingot.errors import EngineError
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.engine.engine import Engine
from ingot.runtime.forward_batch import FloatArray, ForwardBatch
from ingot.runtime.kv.keys import prefix_scope
from ingot.runtime.requests.sampler import Sampler
from ingot.runtime.scheduling.sequence import Sequence
from ingot.runtime.speculation.draft_model import DraftModel
from ingot.runtime.speculation.drafter import NUM_GRADES, DraftRequest, Proposal
from tests.simulators.fake_executor import FakeExecutor
from tests.simulators.faulty_executors import Faults, FaultyExecutor

VOCAB = 16
PARAMS = [SamplingParams(max_tokens=60), SamplingParams(max_tokens=60, temperature=0.9, seed=3, frequency_penalty=0.5)]


def draft_model(**options: Any) -> DraftModel:
    return DraftModel(FakeExecutor(**{"vocab_size": VOCAB, **options}), target_vocab_size=VOCAB)


def request(number: int, tokens: list[int], num_tokens: int = 4, params: SamplingParams = PARAMS[0]) -> DraftRequest:
    sequence = Sequence.of(number, tokens, 200)
    return DraftRequest(sequence, Sampler(params, tokens), num_tokens)


def plain(prompt: list[int], params: SamplingParams) -> tuple[int, ...]:
    with Engine(FakeExecutor(vocab_size=VOCAB)) as engine:
        return engine.generate(prompt, params).token_ids


@pytest.mark.parametrize("params", PARAMS)
def test_drafts_are_what_the_model_would_generate_with_the_same_random_numbers(params: SamplingParams) -> None:
    prompts = [[1, 2, 3], [4] * 20, [5]]
    drafter = draft_model(block_tokens=4)
    asked = [request(number, prompt, 5, params) for number, prompt in enumerate(prompts)]
    expected = [plain(prompt, params) for prompt in prompts]
    for start in (0, 3, 9, 10):
        for one, tokens in zip(asked, expected, strict=True):
            one.sequence.tokens.extend(tokens[one.sequence.num_generated : start])
        found = drafter.propose(asked)
        assert [each.tokens for each in found] == [tokens[start : start + 5] for tokens in expected]
        assert all(0 <= grade < NUM_GRADES for each in found for grade in each.grades)
        drafter.check()


def test_tokens_that_the_target_took_instead_replace_the_drafts() -> None:
    rng = random.Random(0)
    drafter = draft_model(block_tokens=2, num_blocks=200)
    asked = [request(number, [number, 1], rng.randrange(1, 7)) for number in range(4)]
    for _ in range(25):
        found = drafter.propose(asked)
        for one, drafts in zip(asked, found, strict=True):
            fresh = draft_model(max_batch_tokens=256)
            assert drafts == fresh.propose([one])[0], "what was computed before changes nothing"
            taken = drafts.tokens[: rng.randrange(len(drafts.tokens) + 1)]
            one.sequence.tokens.extend([*taken, rng.randrange(VOCAB)])
        drafter.check()


def test_sequences_draft_together_and_catch_up_in_one_step() -> None:
    executor = FakeExecutor(vocab_size=VOCAB)
    drafter = DraftModel(executor, target_vocab_size=VOCAB)
    drafter.propose([request(number, [number] * 9, 3) for number in range(6)])
    assert executor.num_forwards == 3


def test_a_prompt_that_needs_several_steps_drafts_once_it_is_complete_and_keeps_no_other_from_drafting() -> None:
    drafter = draft_model(max_batch_tokens=16)
    long, short = request(0, [7] * 40), request(1, [1, 2])
    sizes = []
    for _ in range(4):
        found = drafter.propose([long, short])
        sizes.append(len(found[0].tokens))
        assert len(found[1].tokens) == 4
    assert sizes == [0, 0, 4, 4]
    assert drafter.catch_up_tokens(long.sequence) <= 1


def test_the_least_recently_used_sequence_makes_way_and_without_room_nothing_is_drafted() -> None:
    drafter = draft_model(num_blocks=6, block_tokens=4)
    first, second, third = (request(number, [number] * 8) for number in range(3))
    assert all(each.tokens for each in drafter.propose([first, second]))
    assert drafter.propose([first])[0].tokens
    assert drafter.propose([third])[0].tokens
    assert set(drafter._drafts) == {0, 2}
    assert drafter.propose([request(9, [1] * 30)]) == [Proposal()]
    found = drafter.propose([first, second, third])
    assert sum(bool(each.tokens) for each in found) == 2
    drafter.check()
    for each in (first, second, third, request(9, [1])):
        drafter.forget(each.sequence)
    assert drafter._blocks.num_in_use == 0


def test_a_common_prompt_is_computed_once_for_all_sequences_of_a_salt() -> None:
    class Counting(FakeExecutor):
        def forward(self, batch: ForwardBatch) -> FloatArray:
            sizes.append(batch.num_tokens)
            return super().forward(batch)

    sizes: list[int] = []
    drafter = DraftModel(Counting(vocab_size=VOCAB, block_tokens=4), target_vocab_size=VOCAB)
    for number, salt in enumerate(["", "", "a"]):
        one = request(number, [1, 2, 3, 4] * 5, num_tokens=1)
        one.sequence.scope = prefix_scope(b"root", cache_salt=salt)
        drafter.propose([one])
    assert sizes == [20, 1, 20]


def test_a_draft_stops_where_it_is_not_worth_more() -> None:
    drafter = draft_model()
    one = request(0, [1, 2, 3], 8)._replace(is_worth_more=lambda grades: len(grades) < 3)
    assert len(drafter.propose([one])[0].tokens) == 3


def test_nothing_is_drafted_past_the_draft_models_context() -> None:
    drafter = draft_model(context_tokens=16)
    assert drafter.propose([request(0, [1] * 13)])[0].tokens
    assert drafter.propose([request(1, [1] * 14)]) == [Proposal()]


@pytest.mark.parametrize("size", [12, 16, 20])
def test_a_vocabulary_that_is_padded_differently_drafts_only_tokens_of_both(size: int) -> None:
    drafter = DraftModel(FakeExecutor(vocab_size=size), target_vocab_size=VOCAB)
    found = drafter.propose([request(number, [number]) for number in range(12)])
    assert all(len(each.tokens) == 4 and max(each.tokens) < min(size, VOCAB) for each in found)
    assert bool(drafter.propose([request(20, [15])])[0].tokens) == (size >= VOCAB)


def test_an_executor_that_fails_loses_what_it_kept_and_works_again() -> None:
    drafter = DraftModel(FaultyExecutor(Faults(failed_steps={2})), target_vocab_size=8)
    one = request(0, [1, 2, 3])
    with pytest.raises(RuntimeError, match="the step failed"):
        drafter.propose([one])
    assert drafter._blocks.num_in_use == 0
    assert len(drafter.propose([one])[0].tokens) == 4


def test_logits_that_are_not_finite_are_an_error_and_leave_no_cached_block() -> None:
    class Broken(FakeExecutor):
        def forward(self, batch: ForwardBatch) -> FloatArray:
            return np.full_like(super().forward(batch), np.nan)

    drafter = DraftModel(Broken(vocab_size=VOCAB, block_tokens=4), target_vocab_size=VOCAB)
    with pytest.raises(EngineError, match="finite"):
        drafter.propose([request(0, [1] * 9)])
    assert drafter._blocks.num_cached == 0


def test_closing_closes_the_executor() -> None:
    executor = FakeExecutor(vocab_size=VOCAB)
    drafter = DraftModel(executor, target_vocab_size=VOCAB)
    drafter.propose([request(0, [1])])
    drafter.close()
    drafter.close()
    assert executor.closed
