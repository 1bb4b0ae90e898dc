"""Whatever a drafter proposes, requests get the tokens, texts, logits and ends of plain decoding."""

import itertools
import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from ingot.runtime.asking.outputs import Completion, RequestOutput
from ingot.runtime.asking.request_options import RequestOptions
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.engine.engine import Engine
from ingot.runtime.scheduling.sequence import Sequence
from ingot.runtime.speculation.draft_model import DraftModel
from ingot.runtime.speculation.drafter import Drafter
from ingot.runtime.speculation.guarded_drafter import MOST_FAILURES
from ingot.runtime.speculation.length_control import LengthControl
from ingot.runtime.speculation.output_history import OutputHistory
from ingot.runtime.speculation.prompt_lookup import PromptLookup
from ingot.runtime.speculation.speculator import Speculator
from tests.each_case import each_case
from tests.runtime.engines import demo_tokenizer
from tests.simulators.fake_drafters import FakeDrafter, HostileDrafter, KnowingDrafter, RandomDrafter
from tests.simulators.fake_executor import FakeExecutor
from tests.simulators.faulty_executors import Faults, FaultyExecutor, FaultyPipelinedExecutor
from tests.simulators.layered_executor import VARIANTS, FailingExecutor, LayeredExecutor, LayeredPipelinedExecutor
from tests.simulators.pipelined_executor import FakePipelinedExecutor

VOCAB = 6  # few, so that sequences repeat themselves
PARAMS = SamplingParams(max_tokens=24)
EXECUTORS = pytest.mark.parametrize("executor", [FakeExecutor, FakePipelinedExecutor])


def plain_tokens(prompt: tuple[int, ...], params: SamplingParams) -> tuple[int, ...]:
    return alone(prompt, params).token_ids


@cache
def alone(prompt: tuple[int, ...], params: SamplingParams, keep_logits: bool = False) -> Completion:
    """The completion of a request by plain decoding, in an engine of its own."""
    with Engine(FakeExecutor(vocab_size=VOCAB)) as engine:
        return engine.generate(list(prompt), params, keep_logits=keep_logits)


def speculator(*drafters: Drafter, adapts: bool = False, most: int = 8, vocab_size: int = VOCAB) -> Speculator:
    return Speculator(*drafters, vocab_size=vocab_size, num_draft_tokens=most, control=LengthControl(adapts=adapts))


DRAFTERS: dict[str, Callable[[int], Drafter]] = {
    "knows all": lambda seed: KnowingDrafter(plain_tokens, VOCAB),
    "knows half": lambda seed: KnowingDrafter(plain_tokens, VOCAB, 0.3, seed),
    "always wrong": lambda seed: KnowingDrafter(plain_tokens, VOCAB, 1.0, seed),
    "random": lambda seed: RandomDrafter(VOCAB, seed),
    "hostile": lambda seed: HostileDrafter(VOCAB, seed),
    "lookup": lambda seed: PromptLookup(),
    "suffix": lambda seed: PromptLookup(OutputHistory(4096)),
    "model": lambda seed: draft_model(seed),
}
SETS: dict[str, tuple[str, ...]] = {
    "suffix and model": ("suffix", "model"),
    "hostile, lookup and model": ("hostile", "lookup", "model"),
}


def num_drafts(engine: Engine) -> int:
    found = engine.metrics().speculation
    return found.num_draft_tokens if found else 0


def num_accepted(engine: Engine) -> int:
    found = engine.metrics().speculation
    return found.num_accepted_tokens if found else 0


def small_pool(rng: random.Random) -> dict[str, Any]:
    """Options of a fake executor whose pool has room for little more than the longest of `random_request`."""
    block_tokens = rng.choice([1, 2, 4, 16])
    return {
        "block_tokens": block_tokens,
        "num_blocks": -(-56 // block_tokens) + rng.choice([0, 1, 4]),
        "max_batch_tokens": rng.choice([1, 5, 16, 64]),
    }


def draft_model(seed: int) -> DraftModel:
    """A draft model that agrees with the target; its pool may be too small for all sequences, or for any."""
    rng = random.Random(seed)
    pool: dict[str, Any] = {
        "num_blocks": rng.choice([3, 12, 60]),
        "block_tokens": 4,
        "max_batch_tokens": rng.choice([6, 64]),
    }
    return DraftModel(
        FakeExecutor(vocab_size=VOCAB, max_sequences=rng.choice([2, 64]), **pool), target_vocab_size=VOCAB
    )


def random_request(rng: random.Random) -> tuple[tuple[int, ...], SamplingParams, bool, RequestOptions]:
    """A prompt that may share its beginning with others, parameters of every kind, and whether logits are kept."""
    prompt = (1, 2, 3, 4) * rng.randrange(6) + tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12)))
    params = SamplingParams(
        max_tokens=rng.choice([rng.randrange(1, 26), 25]),
        temperature=rng.choice([0.0, 0.0, 0.7, 1.5]),
        top_k=rng.choice([0, 3]),
        top_p=rng.choice([1.0, 0.9]),
        seed=rng.randrange(100),
        stop_token_ids=rng.choice([(), (), (5,)]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.4]),
        presence_penalty=rng.choice([0.0, 0.0, 0.5]),
        logit_bias=rng.choice([(), (), ((2, 3.0), (4, -100.0))]),
        logprobs=rng.choice([None, None, 2]),
    )
    options = RequestOptions(speculate=rng.random() < 0.9, prefix_cache=rng.random() < 0.9)
    return prompt, params, rng.random() < 0.2, options


@EXECUTORS
@pytest.mark.parametrize("name", [*DRAFTERS, *SETS])
def test_random_loads_get_the_tokens_of_plain_decoding(executor: type[FakeExecutor], name: str) -> None:
    accepted = num_preemptions = 0
    for seed in range(15):
        rng = random.Random(seed)
        drafters = [DRAFTERS[each](seed) for each in SETS.get(name, (name,))]
        under_test = speculator(*drafters, adapts=rng.random() < 0.3, most=rng.choice([1, 3, 8]))
        engine = Engine(
            executor(vocab_size=VOCAB, **small_pool(rng)),
            max_sequences=rng.choice([1, 2, 5, 64]),
            prefix_cache=rng.random() < 0.8,
            speculator=under_test,
        )
        requests = [random_request(rng) for _ in range(rng.randrange(2, 14))]
        aborts = {number: rng.randrange(1, 20) for number in range(len(requests)) if rng.random() < 0.15}
        ids = {
            engine.add(list(prompt), params, keep_logits=keep, options=options): number
            for number, (prompt, params, keep, options) in enumerate(requests)
        }
        done: dict[int, Completion] = {}
        streamed: dict[int, list[int]] = {number: [] for number in ids.values()}
        now = 0
        while engine.has_unfinished():
            now += 1
            for request_id, number in ids.items():
                completion = engine.abort(request_id) if aborts.get(number) == now else None
                done |= {number: completion} if completion else {}
            for output in engine.step():
                streamed[ids[output.request_id]] += output.token_ids
                done |= {ids[output.request_id]: output.completion} if output.completion else {}
            engine.check()
        for number, (prompt, params, keep, _) in enumerate(requests):
            assert_plain(done[number], alone(prompt, params, keep))
            assert streamed[number] == list(done[number].token_ids)
        metrics, found = engine.metrics(), engine.metrics().speculation
        assert found
        accepted += found.num_accepted_tokens
        num_preemptions += metrics.num_preemptions
        assert metrics.blocks_in_use == metrics.num_failed_requests == metrics.num_failed_steps == 0
        assert found.num_accepted_tokens <= found.num_tested_tokens <= found.num_draft_tokens
        assert sum(found.num_accepted_tokens_per_pos.values()) == found.num_accepted_tokens
        assert sum(found.num_drafts_per_length.values()) == found.num_drafts
        engine.close()
    assert num_preemptions > 5
    assert accepted > 20 or name in ("always wrong", "hostile")


def assert_plain(found: Completion, expected: Completion) -> None:
    """An aborted completion has a beginning of the expected one."""
    count = len(found.token_ids)
    if found.finish_reason != "abort":
        assert (count, found.finish_reason) == (len(expected.token_ids), expected.finish_reason)
        assert found.stop_reason == expected.stop_reason
    assert found.token_ids == expected.token_ids[:count]
    if expected.logprobs is not None:
        assert found.logprobs == expected.logprobs[:count]
    if expected.logits is not None:
        assert found.logits is not None
        assert np.array_equal(found.logits.reshape(count, VOCAB), expected.logits[:count])


@EXECUTORS
def test_drafts_that_are_right_take_the_place_of_steps(executor: type[FakeExecutor]) -> None:
    with Engine(executor(vocab_size=VOCAB), speculator=speculator(KnowingDrafter(plain_tokens, VOCAB))) as engine:
        done = engine.generate([1, 2, 3], PARAMS)
        metrics = engine.metrics()
        found = engine.metrics().speculation
    assert found
    assert done.token_ids == plain_tokens((1, 2, 3), PARAMS)
    assert metrics.output_tokens == 24
    assert metrics.num_steps == 1 + 3  # the prompt, 2 * 9 tokens, 5 that are left
    assert [*found.num_accepted_tokens_per_pos.values()] == [3, 3, 3, 3, 2, 2, 2, 2]
    assert found.mean_accepted_length == found.expected_accepted_length == 1 + 20 / 3


@EXECUTORS
def test_one_output_has_all_tokens_of_a_step(executor: type[FakeExecutor]) -> None:
    with Engine(executor(vocab_size=VOCAB), speculator=speculator(KnowingDrafter(plain_tokens, VOCAB))) as engine:
        outputs = list(engine.stream([1, 2, 3], PARAMS))
    assert [len(output.tokens) for output in outputs] == [1, 9, 9, 5]
    assert outputs[-1].completion is not None


def test_every_length_and_end_inside_of_drafts_is_that_of_plain_decoding() -> None:
    for most in range(1, 26):
        for end in range(VOCAB):
            params = SamplingParams(max_tokens=most, stop_token_ids=(end,))
            drafter = KnowingDrafter(plain_tokens_without_ends, VOCAB)
            with Engine(FakeExecutor(vocab_size=VOCAB), speculator=speculator(drafter, most=5)) as engine:
                assert_plain(engine.generate([1, 2, 3], params), alone((1, 2, 3), params))


def plain_tokens_without_ends(prompt: tuple[int, ...], params: SamplingParams) -> tuple[int, ...]:
    """Also the tokens that would follow the end."""
    return plain_tokens(prompt, replace(params, stop_token_ids=(), max_tokens=40))


def test_an_end_token_of_the_model_inside_of_drafts_ends_the_request() -> None:
    expected = plain_tokens((1, 2, 3), PARAMS)
    drafter = KnowingDrafter(plain_tokens_without_ends, VOCAB)
    with Engine(FakeExecutor(vocab_size=VOCAB, eos_token_ids=(expected[4],)), speculator=speculator(drafter)) as engine:
        done = engine.generate([1, 2, 3], PARAMS)
    first = expected.index(expected[4])
    assert (done.token_ids, done.finish_reason) == (expected[: first + 1], "stop")
    assert done.stop_reason == expected[4]


def test_a_stop_string_that_spans_accepted_drafts_ends_the_text_where_plain_decoding_does() -> None:
    tokenizer = demo_tokenizer()
    params = SamplingParams(max_tokens=30)

    @cache
    def plain(prompt: tuple[int, ...], params: SamplingParams) -> Completion:
        with Engine(FakeExecutor(vocab_size=tokenizer.vocab_size), tokenizer) as engine:
            return engine.generate(list(prompt), params)

    whole = plain((5, 6), params)
    num_checked = 0
    for start in range(0, len(whole.text) - 6, 3):
        stopped = replace(params, stop=whole.text[start : start + 5])
        expected = plain((5, 6), stopped)
        drafter = KnowingDrafter(lambda prompt, _: plain(prompt, params).token_ids, tokenizer.vocab_size)
        under_test = speculator(drafter, vocab_size=tokenizer.vocab_size)
        with Engine(FakeExecutor(vocab_size=tokenizer.vocab_size), tokenizer, speculator=under_test) as engine:
            outputs = list(engine.stream([5, 6], stopped))
        found = outputs[-1].completion
        assert found is not None
        assert (found.text, found.token_ids) == (expected.text, expected.token_ids)
        assert (found.finish_reason, found.stop_reason) == (expected.finish_reason, expected.stop_reason)
        assert "".join(output.text for output in outputs) == expected.text
        num_checked += found.finish_reason == "stop"
    assert num_checked > 10


def test_a_request_that_opts_out_has_no_drafts() -> None:
    drafter = KnowingDrafter(plain_tokens, VOCAB)
    with Engine(FakeExecutor(vocab_size=VOCAB), speculator=speculator(drafter)) as engine:
        engine.generate([1, 2, 3], PARAMS, options=RequestOptions(speculate=False))
        assert num_drafts(engine) == drafter.num_calls == 0


def test_a_drafter_that_raises_is_given_up_after_some_failures_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Raising(FakeDrafter):
        def propose(self, requests: Any) -> Any:
            self.num_calls += 1
            raise OSError("no memory")

    drafter = Raising()
    with (
        caplog.at_level(logging.WARNING),
        Engine(FakeExecutor(vocab_size=VOCAB), speculator=speculator(drafter)) as engine,
    ):
        assert engine.generate([1, 2, 3], PARAMS).token_ids == plain_tokens((1, 2, 3), PARAMS)
    assert drafter.num_calls == MOST_FAILURES
    assert len(caplog.messages) == 2
    assert caplog.messages[0] == (
        "the drafter fake failed, the engine goes on without its drafts for this step: OSError: no memory"
    )
    assert caplog.messages[-1] == "the drafter fake failed, the engine makes no more drafts of it: OSError: no memory"


def test_of_several_drafters_one_that_fails_leaves_the_others_and_each_is_counted_by_kind() -> None:
    class Raising(FakeDrafter):
        kind = "raising"

        def propose(self, requests: Any) -> Any:
            self.num_calls += 1
            raise OSError("no memory")

    knowing, model, raising = KnowingDrafter(plain_tokens, VOCAB, 0.3), draft_model(0), Raising()
    under_test = Speculator(raising, knowing, model, vocab_size=VOCAB, control=LengthControl(adapts=False))
    with Engine(FakeExecutor(vocab_size=VOCAB), speculator=under_test) as engine:
        prompts = [[1, 2, 3], [4, 5]]
        for done, prompt in zip(engine.generate(prompts, PARAMS), prompts, strict=True):
            assert done.token_ids == plain_tokens(tuple(prompt), PARAMS)
        found = engine.metrics().speculation
        model.check()
    assert found
    assert raising.num_calls == found.num_failures == MOST_FAILURES
    assert {*found.num_drafts_by_kind} == {"fake", "draft"}
    assert min(found.num_accepted_tokens_by_kind.values()) > 0
    assert sum(found.num_drafts_by_kind.values()) == found.num_drafts
    assert sum(found.num_draft_tokens_by_kind.values()) == found.num_draft_tokens
    assert sum(found.num_accepted_tokens_by_kind.values()) == found.num_accepted_tokens
    assert knowing.known == set()
    assert knowing.closed
    assert raising.closed


def test_proposals_that_are_not_taken_are_learned_from_and_cost_no_verification() -> None:
    class Other(KnowingDrafter):
        kind = "other"

    wrong, right = KnowingDrafter(plain_tokens, VOCAB, 1.0), Other(plain_tokens, VOCAB)
    control = LengthControl()
    with Engine(
        FakeExecutor(vocab_size=VOCAB), speculator=Speculator(wrong, right, vocab_size=VOCAB, control=control)
    ) as engine:
        request_id = engine.add([1, 2, 3], SamplingParams(max_tokens=200))
        for _ in range(150):
            engine.step()
        rates = [control.acceptance.rate(request_id, kind, 0) for kind in ("fake", "other")]
        engine.abort(request_id)
        assert not control.acceptance._own
    assert rates[0] < 0.2
    assert rates[1] > 0.8


@each_case("name", ["random", "lookup", "suffix", "model"])
@each_case(("n", "best_of"), [(3, None), (2, 4)])
def test_every_choice_of_a_request_is_that_of_plain_decoding(name: str, n: int, best_of: int | None) -> None:
    num_verified = 0
    for seed in range(6):
        prompt = [1, 2, 3, 4] * 3 + [seed % VOCAB]
        params = replace(PARAMS, n=n, best_of=best_of, seed=seed, temperature=0.9, stop_token_ids=(5,))
        options: dict[str, Any] = {"vocab_size": VOCAB, "block_tokens": 4, "num_blocks": 40}
        with Engine(FakeExecutor(**options)) as engine:
            expected = engine.generate(prompt, params)
        with Engine(FakeExecutor(**options), speculator=speculator(DRAFTERS[name](seed), most=3)) as engine:
            found = engine.generate(prompt, params)
            engine.check()
            num_verified += num_drafts(engine)
        assert [each.token_ids for each in found.choices] == [each.token_ids for each in expected.choices]
        assert [each.finish_reason for each in found.choices] == [each.finish_reason for each in expected.choices]
    assert num_verified > 20


@EXECUTORS
def test_drafts_end_with_the_context(executor: type[FakeExecutor]) -> None:
    for context in range(20, 30):
        params = SamplingParams(max_tokens=context - 3)
        with Engine(executor(vocab_size=VOCAB, context_tokens=context)) as engine:
            expected = engine.generate([1, 2, 3], params)
        drafter = KnowingDrafter(lambda *_: plain_tokens((1, 2, 3), replace(PARAMS, max_tokens=60)), VOCAB)
        with Engine(executor(vocab_size=VOCAB, context_tokens=context), speculator=speculator(drafter)) as engine:
            assert_plain(engine.generate([1, 2, 3], params), expected)
            assert num_accepted(engine) > 10


def test_a_draft_model_with_a_shorter_context_drafts_up_to_its_end() -> None:
    model = DraftModel(FakeExecutor(vocab_size=VOCAB, context_tokens=16), target_vocab_size=VOCAB)
    with Engine(FakeExecutor(vocab_size=VOCAB), speculator=speculator(model, most=4)) as engine:
        assert engine.generate([1, 2, 3], PARAMS).token_ids == plain_tokens((1, 2, 3), PARAMS)
        metrics = engine.metrics()
        assert 0 < num_accepted(engine) <= 13
        assert metrics.num_steps > 10, "plain steps after the end of the draft model's context"


@each_case("failed", range(1, 8))
def test_a_draft_model_that_fails_midway_costs_its_step_the_drafts_and_is_logged_once(
    failed: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = DraftModel(FaultyExecutor(Faults(failed_steps={failed, failed + 6})), target_vocab_size=8)
    with (
        caplog.at_level(logging.WARNING),
        Engine(FaultyExecutor(), speculator=speculator(model, vocab_size=8, most=3)) as engine,
    ):
        done = engine.generate([[1, 2, 3], [1, 2, 3]], PARAMS)
        found = engine.metrics().speculation
        model.check()
    assert [one.token_ids for one in done] == [plain_faulty()] * 2
    assert found is not None
    assert found.num_failures == 2
    assert found.num_accepted_tokens > 10
    assert len(caplog.messages) == 1


def test_a_request_that_is_aborted_after_accepted_drafts_leaves_no_block() -> None:
    drafter = KnowingDrafter(plain_tokens, VOCAB)
    for num_steps in range(1, 4):
        with Engine(FakeExecutor(vocab_size=VOCAB, block_tokens=2), speculator=speculator(drafter, most=5)) as engine:
            request_id = engine.add([1, 2, 3], PARAMS)
            for _ in range(num_steps):
                engine.step()
            done = engine.abort(request_id)
            assert done is not None
            assert done.token_ids == plain_tokens((1, 2, 3), PARAMS)[: 1 + 6 * (num_steps - 1)]
            assert engine.metrics().blocks_in_use == 0
            engine.check()


def test_drafts_take_only_what_prompts_and_other_requests_leave_of_a_step() -> None:
    drafter = KnowingDrafter(plain_tokens, VOCAB)
    executor = FakeExecutor(vocab_size=VOCAB, max_batch_tokens=16)
    with Engine(executor, speculator=speculator(drafter)) as engine:
        engine.add([1, 2, 3], PARAMS)
        engine.step()
        engine.add([1] * 60, PARAMS)
        sizes = []
        for _ in range(4):
            engine.step()
            sizes.append(num_drafts(engine))
        assert sizes == [0, 0, 0, 0], "15 tokens of the prompt leave no room, three times in 60"


def test_drafts_preempt_nothing_and_leave_each_sequence_a_block_to_grow_into() -> None:
    drafter = KnowingDrafter(plain_tokens, VOCAB)
    executor = FakeExecutor(vocab_size=VOCAB, block_tokens=4, num_blocks=9)
    with Engine(executor, prefix_cache=False, speculator=speculator(drafter)) as engine:
        for first in (1, 2):
            engine.add([first, 2, 3], SamplingParams(max_tokens=12))
        while engine.has_unfinished():
            engine.step()
            engine.check()
            running = engine.metrics().num_running
            assert engine.metrics().blocks_total - engine.metrics().blocks_in_use >= running or not running
        assert engine.metrics().num_preemptions == 0
        assert num_accepted(engine) > 0


def test_blocks_of_rejected_drafts_are_freed_and_never_found() -> None:
    drafter = KnowingDrafter(plain_tokens, VOCAB, error_rate=1.0)
    with Engine(FakeExecutor(vocab_size=VOCAB, block_tokens=2), speculator=speculator(drafter)) as engine:
        engine.add([1, 2, 3], PARAMS)
        for number in range(1, 20):
            engine.step()
            assert engine.metrics().blocks_in_use == -(-(2 + number) // 2)
            assert engine.metrics().blocks_cached == (2 + number) // 2
        again = engine.add([1, 2, 3, *plain_tokens((1, 2, 3), PARAMS)], PARAMS)
        done = {output.request_id: output.completion for output in iter_outputs(engine) if output.completion}
        assert done[again].cached_tokens == 20


def iter_outputs(engine: Engine) -> Iterator[RequestOutput]:
    while engine.has_unfinished():
        yield from engine.step()


def test_what_a_drafter_keeps_for_a_request_is_freed_however_it_ends() -> None:
    drafter = KnowingDrafter(plain_tokens, VOCAB)
    with Engine(
        FaultyExecutor(Faults(lost_rows={10}), vocab_size=VOCAB + 16), speculator=speculator(drafter)
    ) as engine:
        ids = [engine.add([number, 1], replace(PARAMS, max_tokens=6 + number)) for number in range(4)]
        engine.step()
        engine.abort(ids[3])
        while engine.has_unfinished():
            engine.step()
        assert engine.metrics().num_failed_requests == 1
    assert drafter.num_calls
    assert drafter.known == set()
    assert drafter.closed


FAULTY = pytest.mark.parametrize("executor", [FaultyExecutor, FaultyPipelinedExecutor])


@FAULTY
@pytest.mark.parametrize("row", range(9))
def test_a_row_that_is_not_finite_fails_its_request_only_when_a_token_is_taken_from_it(
    executor: type[FaultyExecutor], row: int
) -> None:
    for error_at in range(9):
        engine = Engine(executor(Faults(lost_rows={1 + row})), speculator=speculator(Slip(error_at), vocab_size=8))
        with engine:
            request_id = engine.add([1, 2, 3], PARAMS)
            done: list[Completion] = []
            while engine.has_unfinished():
                done += [output.completion for output in engine.step() if output.completion]
                engine.check()
            assert done[0].request_id == request_id
            expected = plain_faulty()
            if row <= error_at:
                assert done[0].finish_reason == "error"
                assert done[0].token_ids == expected[: 1 + row]
            else:
                assert done[0].token_ids == expected


@FAULTY
def test_a_step_that_fails_while_it_verifies_drafts_is_computed_again_without_them(
    executor: type[FaultyExecutor],
) -> None:
    for failing in range(1, 4):
        faults = Faults(failed_steps={failing})
        with Engine(executor(faults), speculator=speculator(Slip(99), vocab_size=8)) as engine:
            done = engine.generate([[1, 2, 3], [1, 2, 3]], PARAMS)
            assert [one.token_ids for one in done] == [plain_faulty()] * 2
            assert engine.metrics().num_failed_steps == 1
            assert engine.metrics().num_failed_requests == 0


@cache
def plain_faulty() -> tuple[int, ...]:
    with Engine(FaultyExecutor()) as engine:
        return engine.generate([1, 2, 3], PARAMS).token_ids


class Slip(FakeDrafter):
    """Proposes the tokens of `plain_faulty` with a wrong one at a place of the first draft."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self._place = place

    def draft(self, request: Any) -> Any:
        sequence: Sequence = request.sequence
        tokens = list(plain_faulty()[sequence.num_generated : sequence.num_generated + request.num_tokens])
        if self.num_calls == 1 and self._place < len(tokens):
            tokens[self._place] = (tokens[self._place] + 1) % 8
        return tokens


# Each layout with all numbers of states and rates of errors, on either executor in turn.
STATES_AND_RATES = ((3, 0.3), (4, 0.3), (30, 0.0), (30, 0.3), (30, 1.0))
LAYOUTS = [
    (layout, *states_and_rate, (LayeredExecutor, LayeredPipelinedExecutor)[index % 2])
    for index, (layout, states_and_rate) in enumerate(itertools.product(VARIANTS, STATES_AND_RATES))
]


@each_case(("layout", "num_states", "error_rate", "executor"), LAYOUTS)
def test_every_layout_of_the_cache_and_side_state_give_plain_tokens(
    executor: type[LayeredExecutor], layout: str, num_states: int, error_rate: float
) -> None:
    prompts = [[1, 2, 3] * 4, [5], [1, 2, 3] * 3]
    params = replace(PARAMS, max_tokens=90)  # beyond the places where side state is kept
    with Engine(LayeredExecutor(layout, vocab_size=VOCAB)) as engine:
        expected = {tuple(prompt): engine.generate(prompt, params).token_ids for prompt in prompts}
    drafter = KnowingDrafter(lambda prompt, _: expected[prompt], VOCAB, error_rate)
    under_test = executor(layout, vocab_size=VOCAB, block_tokens=4, num_states=num_states)
    with Engine(under_test, speculator=speculator(drafter)) as engine:
        ids = [engine.add(prompt, params) for prompt in prompts]
        done: dict[int, Completion] = {}
        while engine.has_unfinished():
            done |= {output.request_id: output.completion for output in engine.step() if output.completion}
            engine.check()
        has_room = not under_test.num_states or num_states > len(prompts)
        assert (num_accepted(engine) > 0) == (has_room and error_rate < 1) or not has_room
        again = engine.generate([*prompts[0], *done[ids[0]].token_ids], replace(params, max_tokens=1))
        if not under_test.num_states or num_states == 30:
            assert again.cached_tokens >= 64, "side state is kept where drafts would have passed"
    assert [done[number].token_ids for number in ids] == [expected[tuple(prompt)] for prompt in prompts]


def test_a_step_with_drafts_that_fails_leaves_no_trace_in_side_states() -> None:
    prompts = [[1, 2, 3] * 4, [5]]
    with Engine(FailingExecutor("side state", vocab_size=VOCAB)) as engine:
        expected = {tuple(prompt): engine.generate(prompt, PARAMS).token_ids for prompt in prompts}
    for failed in range(14):
        drafter = KnowingDrafter(lambda prompt, _: expected[prompt], VOCAB, error_rate=0.3)
        executor = FailingExecutor("side state", vocab_size=VOCAB, block_tokens=4)
        executor.failed_steps = frozenset({failed})
        with Engine(executor, speculator=speculator(drafter)) as engine:
            completions = engine.generate(prompts, PARAMS)
            engine.check()
            assert engine._blocks.states is not None
            assert engine._blocks.states.num_available == executor.num_states
        assert [one.token_ids for one in completions] == [expected[tuple(prompt)] for prompt in prompts]
