"""Failures in a step end the requests that cause them; all others get the tokens that they get without the failure."""

import random
import sys
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import FrameType
from typing import Any, cast

import pytest

from ingot.errors import EngineError, RequestFailed
from ingot.runtime.asking.outputs import Completion
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.engine.engine import Engine
from ingot.runtime.requests.sampler import Sampler
from ingot.runtime.text.detokenizer import Detokenizer, TextDecoder
from ingot.runtime.text.tokenizer import Tokenizer
from tests.runtime.engines import random_pool, serve, text_engine
from tests.simulators.faulty_executors import NUM_TAGS, Faults, FaultyExecutor, FaultyPipelinedExecutor

VOCAB = 8
TAG = VOCAB  # the first of the tokens that mark a sequence
PARAMS = SamplingParams(max_tokens=8)
EXECUTORS = pytest.mark.parametrize("executor", [FaultyExecutor, FaultyPipelinedExecutor])


class FaultyTokenizer:
    """Letters for tokens. The text of a sequence whose prompt ends with a tag in `fails_at` fails at that length."""

    eos_token_ids: frozenset[int] = frozenset()

    def __init__(self, fails_at: dict[int, int]) -> None:
        self._fails_at = fails_at

    def detokenizer(
        self, prompt_tokens: Sequence[int], *, skip_special_tokens: bool = True, kept: Collection[str] = ()
    ) -> Detokenizer:
        """A detokenizer that counts its tokens."""
        return FaultyDetokenizer(self._fails_at.get(prompt_tokens[-1]))


class FaultyDetokenizer(Detokenizer):
    """Fails at token number `fails_at`, and at the end if it has failed before."""

    def __init__(self, fails_at: int | None) -> None:
        super().__init__(TextDecoder(), lambda token: chr(ord("a") + token))
        self._left = -1 if fails_at is None else fails_at

    def push(self, token_id: int) -> str:
        self._left -= 1
        if self._left == 0:
            raise KeyError("no such letter")
        return super().push(token_id)

    def flush(self) -> str:
        if self._left == 0:
            raise KeyError("no letters")
        return super().flush()


def engine_of(
    executor: type[FaultyExecutor] = FaultyExecutor,
    faults: Faults | None = None,
    *,
    text_fails_at: dict[int, int] | None = None,
    max_sequences: int = 64,
    prefix_cache: bool = True,
    **options: Any,
) -> Engine:
    tokenizer = cast(Tokenizer, FaultyTokenizer(text_fails_at or {}))
    return Engine(executor(faults, **options), tokenizer, max_sequences=max_sequences, prefix_cache=prefix_cache)


@cache
def alone(prompt: tuple[int, ...], params: SamplingParams) -> Completion:
    """The completion of a request without faults, in an engine of its own."""
    with engine_of() as engine:
        return engine.generate(list(prompt), params)


def finish(engine: Engine) -> dict[int, Completion]:
    """Step until all requests finish; completions by request."""
    done: dict[int, Completion] = {}
    while engine.has_unfinished():
        done |= {output.request_id: output.completion for output in engine.step() if output.completion}
        engine.check()
    assert engine.metrics().blocks_in_use == 0
    return done


def assert_served(completion: Completion, prompt: list[int], params: SamplingParams = PARAMS) -> None:
    expected = alone(tuple(prompt), params)
    assert completion.error is None
    assert (completion.token_ids, completion.text) == (expected.token_ids, expected.text)
    assert completion.finish_reason == expected.finish_reason


class BrokenSampler(Sampler):
    """Fails at one token."""

    fails_at = 3

    def sample(self, logits: Any, generated: Sequence[int], mask: Any = None) -> Any:
        if len(generated) == self.fails_at:
            raise ZeroDivisionError("a probability of 0")
        return super().sample(logits, generated, mask)


@EXECUTORS
def test_a_row_that_is_not_finite_ends_its_request_alone(executor: type[FaultyExecutor]) -> None:
    prompts = [[number, number + 1] for number in range(5)]
    with engine_of(executor, Faults(lost_rows={5 + 2})) as engine:  # the second step's third row
        ids = [engine.add(prompt, PARAMS) for prompt in prompts]
        done = finish(engine)
        lost = done.pop(ids[2])
        assert (lost.finish_reason, lost.token_ids) == ("error", alone((2, 3), PARAMS).token_ids[:1])
        assert isinstance(lost.error, RequestFailed)
        assert f"request {ids[2]} failed after 1 tokens: " in str(lost.error)
        assert "finite" in str(lost.error)
        for request_id, completion in done.items():
            assert_served(completion, prompts[ids.index(request_id)])
        assert (engine.metrics().num_failed_requests, engine.metrics().num_failed_steps) == (1, 0)
        assert engine.error is None
        assert_served(engine.generate(prompts[2], PARAMS), prompts[2])


@EXECUTORS
def test_a_detokenizer_that_raises_ends_its_request_alone_with_the_text_so_far(executor: type[FaultyExecutor]) -> None:
    with engine_of(executor, text_fails_at={TAG: 4}) as engine:
        broken, other = engine.add([1, TAG], PARAMS), engine.add([1, 2], PARAMS)
        done = finish(engine)
    assert (done[broken].finish_reason, len(done[broken].token_ids), len(done[broken].text)) == ("error", 4, 3)
    assert str(done[broken].error) == f"request {broken} failed after 4 tokens: KeyError: 'no such letter'"
    assert isinstance(cast(EngineError, done[broken].error).__cause__, KeyError)
    assert_served(done[other], [1, 2])


def test_a_detokenizer_that_raises_while_its_request_is_aborted_gives_an_error() -> None:
    with engine_of(text_fails_at={TAG: 1}) as engine:
        engine.add([1, TAG], PARAMS)
        request = next(iter(engine._loop.requests.by_sequence.values()))
        request._stop._detokenizer._left = 0  # type: ignore[union-attr]
        completion = engine.abort(request.sequence.id)
        assert completion is not None
        assert "no letters" in str(completion.error)
        assert not engine.has_unfinished()


@EXECUTORS
def test_a_sampler_that_raises_ends_its_request_alone(executor: type[FaultyExecutor]) -> None:
    params = SamplingParams(max_tokens=8, presence_penalty=0.5)  # sampled on the host
    with engine_of(executor) as engine:
        broken, other, third = engine.add([1, 2], params), engine.add([1, 3], params), engine.add([1], PARAMS)
        request = engine._loop.requests.by_sequence[broken]
        request.sampler = BrokenSampler(request.sampler.params, [1, 2])
        done = finish(engine)
    assert (done[broken].finish_reason, len(done[broken].token_ids)) == ("error", 3)
    assert "ZeroDivisionError: a probability of 0" in str(done[broken].error)
    assert_served(done[other], [1, 3], params)
    assert_served(done[third], [1])


@EXECUTORS
@pytest.mark.parametrize("what", ["failed_steps", "failed_submits"])
def test_a_step_that_fails_once_changes_no_token(executor: type[FaultyExecutor], what: str) -> None:
    for step in range(1, 9):
        faults = Faults()
        setattr(faults, what, {step})
        with engine_of(executor, faults, max_sequences=2, max_batch_tokens=7, num_blocks=6, block_tokens=4) as engine:
            prompts = [[number] * (3 * number + 1) for number in range(4)]
            ids = [engine.add(prompt, PARAMS) for prompt in prompts]
            done = finish(engine)
            for request_id, prompt in zip(ids, prompts, strict=True):
                assert_served(done[request_id], prompt)
            failed = what == "failed_steps" or executor is FaultyPipelinedExecutor
            assert engine.metrics().num_failed_steps == failed
            assert engine.metrics().output_tokens == 8 * len(ids)


@EXECUTORS
def test_a_sequence_that_the_executor_cannot_compute_ends_alone(executor: type[FaultyExecutor]) -> None:
    with engine_of(executor, Faults(fails_at={TAG: 5})) as engine:
        prompts = [[0, 1], [TAG, 1], [0, 3]]
        ids = [engine.add(prompt, PARAMS) for prompt in prompts]
        later = engine.add([4], SamplingParams(max_tokens=12))
        done = finish(engine)
        assert "the step of tag 8 failed" in str(done[ids[1]].error)
        assert done[ids[1]].token_ids == alone((TAG, 1), PARAMS).token_ids[:3]
        assert_served(done[ids[0]], prompts[0])
        assert_served(done[ids[2]], prompts[2])
        assert_served(done[later], [4], SamplingParams(max_tokens=12))
        assert engine.error is None
        assert_served(engine.generate([1, 2]), [1, 2], SamplingParams())


@EXECUTORS
def test_a_broken_executor_ends_all_requests_and_the_engine(executor: type[FaultyExecutor]) -> None:
    faults = Faults()
    with engine_of(executor, faults, max_sequences=2) as engine:
        ids = [engine.add([number], PARAMS) for number in range(4)]
        engine.step()
        engine.step()
        faults.is_broken = True
        done = finish(engine)
        assert set(done) == set(ids)
        assert {completion.finish_reason for completion in done.values()} == {"error"}
        assert isinstance(engine.error, EngineError)
        assert isinstance(engine.error.__cause__, RuntimeError)
        for call in (lambda: engine.generate([1]), lambda: engine.add([1]), engine.step):
            with pytest.raises(EngineError, match=r"takes no more requests: the step failed; load it again"):
                call()


@EXECUTORS
def test_when_one_call_finds_the_executor_broken_the_others_get_their_errors(executor: type[FaultyExecutor]) -> None:
    faults = Faults()
    with engine_of(executor, faults) as engine:
        added = engine.add([1], PARAMS)
        stream = engine.stream([2], PARAMS)
        next(stream)
        faults.is_broken = True
        with pytest.raises(EngineError, match="takes no more requests"):
            engine.generate([3])
        with pytest.raises(EngineError, match="takes no more requests"):
            list(stream)
        outputs = finish(engine)
        assert outputs[added].error is engine.error
        assert engine.metrics().num_failed_requests == 3


@EXECUTORS
def test_a_request_whose_block_cannot_be_copied_ends_alone(executor: type[FaultyExecutor]) -> None:
    prompt = list(range(VOCAB)) * 2
    with engine_of(executor, Faults(failed_copies={0}), block_tokens=4) as engine:
        first = engine.add(prompt, PARAMS)
        engine.step()
        engine.step()  # from here on, the prompt's blocks are shared and in use
        second, other = engine.add(prompt, PARAMS), engine.add([5], PARAMS)
        done = finish(engine)
        assert "the copy failed" in str(done[second].error)
        assert_served(done[first], prompt)
        assert_served(done[other], [5])
        assert_served(engine.generate(prompt, PARAMS), prompt)


TWO_PARTS: dict[str, Any] = {"num_blocks": 14, "num_fast_blocks": 5, "block_tokens": 4}
PUSHED_OUT = [[(7 * number + shift) % VOCAB for number in range(10)] for shift in range(4)]


@EXECUTORS
@pytest.mark.parametrize("failed", [{0}, {1}, {0, 1, 2, 3, 5, 8}, set(range(40))])
def test_a_cached_block_that_cannot_move_to_the_slow_part_is_computed_again(
    executor: type[FaultyExecutor], failed: set[int]
) -> None:
    with engine_of(executor, Faults(failed_copies=failed), **TWO_PARTS) as engine:
        for prompt in PUSHED_OUT * 3:
            assert_served(engine.generate(prompt, PARAMS), prompt)
            engine.check()
        assert engine.metrics().blocks_moved["down"] > 0


def test_a_block_in_use_that_cannot_move_ends_its_request_alone() -> None:
    long = SamplingParams(max_tokens=24)
    with engine_of(prefix_cache=False, **TWO_PARTS) as engine:
        first, second = engine.add([1] * 9, PARAMS), engine.add([2] * 8, long)
        third = engine.add([3], long)
        assert isinstance(engine._executor, FaultyExecutor)
        engine._executor.faults.failed_copies.update(range(100))
        done = finish(engine)
        moved = engine.metrics().blocks_moved
    assert_served(done[first], [1] * 9)
    ended = {number: done[number] for number in (second, third)}
    prompts = {second: [2] * 8, third: [3]}
    for number, completion in ended.items():
        if completion.error:
            assert "the copy failed" in str(completion.error)
        else:
            assert_served(completion, prompts[number], long)
    assert any(completion.error for completion in ended.values())
    assert moved["up"] > 0


@EXECUTORS
def test_moves_that_are_interrupted_lose_what_they_move_and_no_more(
    executor: type[FaultyExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    with engine_of(executor, **TWO_PARTS) as engine:
        num_interrupted = 0
        for prompt in PUSHED_OUT * 3:
            with monkeypatch.context() as patch:
                patch.setattr(executor, "copy_block", interrupt)
                try:
                    engine.generate(prompt, PARAMS)
                except KeyboardInterrupt:
                    num_interrupted += 1
                    engine.check()
            assert_served(engine.generate(prompt, PARAMS), prompt)
        assert num_interrupted


@EXECUTORS
def test_damaged_blocks_are_never_shared(executor: type[FaultyExecutor]) -> None:
    prompt = [1, 2, 3, 4] * 6
    for damaged in range(24):
        faults = Faults(damaged_tokens={damaged})
        with engine_of(executor, faults, block_tokens=4, max_batch_tokens=8) as engine:
            first = engine.add(prompt, PARAMS)
            engine.step()
            engine.step()  # two chunks of three are computed
            second = engine.add([*prompt, 5], PARAMS)
            done = finish(engine)
            assert done[first].finish_reason == "error"
            assert_served(done[second], [*prompt, 5])
            assert_served(engine.generate([*prompt, 6], PARAMS), [*prompt, 6])


@EXECUTORS
def test_a_cached_block_that_is_damaged_later_fails_one_request_and_is_computed_again(
    executor: type[FaultyExecutor],
) -> None:
    prompt = [1, 2, 3, 4] * 6
    with engine_of(executor, block_tokens=4) as engine:
        engine.generate(prompt, PARAMS)
        fake = engine._executor
        assert isinstance(fake, FaultyExecutor)
        fake.damage(engine._blocks._match(engine._root, array("q", prompt))[0][2])
        with pytest.raises(RequestFailed, match="finite"):
            engine.generate([*prompt, 5], PARAMS)
        assert_served(engine.generate([*prompt, 5], PARAMS), [*prompt, 5])


@EXECUTORS
def test_generate_raises_the_error_of_its_request_with_what_was_generated(executor: type[FaultyExecutor]) -> None:
    with engine_of(executor, text_fails_at={TAG: 3}) as engine:
        with pytest.raises(RequestFailed, match=r"failed after 3 tokens: KeyError") as single:
            engine.generate([1, TAG], PARAMS)
        with pytest.raises(RequestFailed, match=r"\(1 of 3 prompts failed\)") as several:
            engine.generate([[1, 2], [1, TAG], [3]], PARAMS)
        assert isinstance(several.value.__cause__, KeyError)
        assert [len(completion.token_ids) for completion in single.value.completions] == [3]
        first, broken, third = several.value.completions
        assert_served(first, [1, 2])
        assert_served(third, [3])
        assert len(broken.token_ids) == 3
        finish(engine)


@EXECUTORS
def test_a_stream_raises_after_what_it_yielded(executor: type[FaultyExecutor]) -> None:
    with engine_of(executor, text_fails_at={TAG: 3}) as engine:
        outputs = engine.stream([1, TAG], PARAMS)
        assert [len(next(outputs).tokens), len(next(outputs).tokens)] == [1, 1]
        with pytest.raises(RequestFailed, match="KeyError"):
            next(outputs)
        assert engine.metrics().num_running == 0


@EXECUTORS
def test_an_interrupted_step_aborts_its_requests_and_the_engine_goes_on(
    executor: type[FaultyExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    for method in ("forward", "logits", "submit"):
        with engine_of(executor, max_sequences=2) as engine:
            ids = [engine.add([number], PARAMS) for number in range(3)]
            engine.step()
            with monkeypatch.context() as patch:
                patch.setattr(executor, method, interrupt, raising=False)
                try:
                    engine.step()
                except KeyboardInterrupt:
                    engine.check()
            done = finish(engine)
            assert set(done) == set(ids)
            assert_served(done[ids[2]], [2])


@dataclass
class Load:
    """Random requests, arrivals, aborts and faults; an engine too small for them."""

    seed: int
    engine: dict[str, Any] = field(default_factory=dict)
    faults: Faults = field(default_factory=Faults)
    text_fails_at: dict[int, int] = field(default_factory=dict)
    sampler_fails: set[int] = field(default_factory=set)
    requests: list[tuple[list[int], SamplingParams]] = field(default_factory=list)
    arrivals: list[int] = field(default_factory=list)
    aborts: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        self.engine = {
            **random_pool(rng),
            "max_sequences": rng.choice([1, 2, 5, 64]),
            "prefix_cache": rng.random() < 0.8,
        }
        count = rng.randrange(2, NUM_TAGS)
        for number in range(count):
            prompt = [1, 2, 3, 4] * rng.randrange(9) + [rng.randrange(VOCAB)] * rng.randrange(3) + [TAG + number]
            self.requests.append((prompt, self._params(rng)))
        self.arrivals = [rng.randrange(12) for _ in self.requests]
        self.aborts = {number: at + rng.randrange(9) for number, at in enumerate(self.arrivals) if rng.random() < 0.1}

        def few(end: int) -> set[int]:
            return {rng.randrange(end) for _ in range(rng.randrange(3))}

        self.faults = Faults(
            damaged_tokens=few(300),
            lost_rows=few(150),
            failed_steps=few(60),
            failed_submits=few(60),
            failed_copies=few(3),
            fails_at={TAG + n: rng.randrange(1, 50) for n in range(count) if rng.random() < 0.05},
        )
        self.text_fails_at = {TAG + n: rng.randrange(1, 20) for n in range(count) if rng.random() < 0.05}
        self.sampler_fails = {
            n for n, (_, params) in enumerate(self.requests) if rng.random() < 0.05 and params.logprobs == 0
        }

    @staticmethod
    def _params(rng: random.Random) -> SamplingParams:
        return SamplingParams(
            max_tokens=rng.randrange(1, 27),
            temperature=rng.choice([0.0, 0.5, 2.0]),
            seed=rng.randrange(100),
            stop_token_ids=rng.choice([(), (5,)]),
            min_p=rng.choice([0.0, 0.0, 0.0, 0.01]),  # with the other rows of its step, on the host
            logprobs=rng.choice([None, None, None, 0]),  # sampled by itself
        )


def serve_with_faults(engine: Engine, load: Load) -> dict[int, Completion]:
    """As `serve`; the samplers that the load names are broken."""

    def break_sampler(number: int, request_id: int) -> None:
        if number in load.sampler_fails:
            request = engine._loop.requests.by_sequence[request_id]
            request.sampler = BrokenSampler(request.sampler.params, load.requests[number][0])

    return serve(engine, load, break_sampler)


@EXECUTORS
@pytest.mark.parametrize("seeds", [range(start, start + 25) for start in (0, 25, 50)], ids=str)
def test_random_faults_end_the_requests_that_they_hit_and_no_other(
    executor: type[FaultyExecutor], seeds: range
) -> None:
    num_failed = num_hurt = num_served = num_failed_steps = 0
    for seed in seeds:
        load = Load(seed)
        with engine_of(executor, load.faults, text_fails_at=load.text_fails_at, **load.engine) as engine:
            done = serve_with_faults(engine, load)
            assert set(done) == set(range(len(load.requests)))
            metrics = engine.metrics()
            assert metrics.blocks_in_use == metrics.num_running == metrics.num_waiting == 0
            for number, (prompt, params) in enumerate(load.requests):
                completion, expected = done[number], alone(tuple(prompt), params)
                if completion.finish_reason in ("abort", "error"):
                    assert completion.token_ids == expected.token_ids[: len(completion.token_ids)]
                else:
                    assert (completion.token_ids, completion.text) == (expected.token_ids, expected.text)
            failed = [number for number, completion in done.items() if completion.error]
            assert metrics.num_failed_requests == len(failed)
            own = {tag - TAG for tag in (*load.faults.fails_at, *load.text_fails_at)} | load.sampler_fails
            hurt = [number for number in failed if number not in own]
            faults = load.faults
            twice = (len(faults.failed_steps) + len(faults.failed_submits)) // 2  # the step, and the sequence alone
            ending = len(faults.damaged_tokens) + len(faults.lost_rows) + len(faults.failed_copies) + twice
            assert len(hurt) <= ending, "a fault ended more than one request"
            assert engine.error is None
            num_failed, num_hurt = num_failed + len(failed), num_hurt + len(hurt)
            num_served, num_failed_steps = (
                num_served + len(done) - len(failed),
                num_failed_steps + metrics.num_failed_steps,
            )

            faults.__init__()  # type: ignore[misc]  # no more faults
            load.text_fails_at.clear()
            for prompt, params in load.requests:  # from the blocks that are cached now
                assert engine.generate(prompt, params).token_ids == alone(tuple(prompt), params).token_ids
    assert min(num_failed, num_hurt, num_served, num_failed_steps) > 10


def calls_of_a_step(engine: Engine) -> list[str]:
    """Make a step; return the module of each Python function of the runtime that it calls."""
    modules: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith("ingot.runtime.") and frame.f_code.co_filename != "<string>":
            modules.append(module)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        engine.step()
    finally:
        sys.setprofile(before)
    return modules


def test_a_decode_step_of_one_sequence_takes_few_calls() -> None:
    with text_engine() as engine:
        engine.add([5] * 20, SamplingParams(max_tokens=30, ignore_eos=True))
        steps = [calls_of_a_step(engine) for _ in range(25)]
        plain = min(steps[3:], key=len)
        assert len(plain) <= 60
        assert len({*plain}) <= 17
