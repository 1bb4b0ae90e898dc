"""The engine on the fake executor, whose tokens change with any error in tables, copies or positions."""

import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ingot.errors import EngineError, IngotError, RequestError, UsageError
from ingot.runtime.asking.outputs import Completion
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.cpu.native_executor import NativeExecutor
from ingot.runtime.engine.engine import Engine
from ingot.runtime.requests.request import Request
from ingot.runtime.speculation.length_control import LengthControl
from ingot.runtime.speculation.speculator import Speculator
from tests.conftest import BuildArtifact
from tests.each_case import each_case
from tests.runtime.engines import VOCAB_SIZE, demo_tokenizer, random_requests, text_engine, token_engine
from tests.simulators.fake_drafters import RandomDrafter
from tests.simulators.fake_executor import FakeExecutor
from tests.simulators.pipelined_executor import FakePipelinedExecutor


def alone(prompt: list[int], params: SamplingParams) -> Completion:
    """The completion of a request in an engine of its own, with a large pool."""
    with token_engine(num_blocks=32) as engine:
        return engine.generate(prompt, params, keep_logits=True)


def assert_same(completion: Completion, expected: Completion) -> None:
    assert completion.token_ids == expected.token_ids
    assert completion.finish_reason == expected.finish_reason
    assert completion.logits is not None
    assert expected.logits is not None
    assert completion.logits.tobytes() == expected.logits.tobytes()


@each_case("prefix_cache", [True, False])
@each_case(("num_blocks", "block_tokens", "budget"), [(40, 4, 16), (9, 16, 64), (30, 4, 5)])
def test_64_requests_in_a_pool_too_small_for_them_get_what_each_gets_alone(
    prefix_cache: bool, num_blocks: int, block_tokens: int, budget: int
) -> None:
    requests = random_requests(64)
    engine = token_engine(
        num_blocks=num_blocks, block_tokens=block_tokens, max_batch_tokens=budget, prefix_cache=prefix_cache
    )
    with engine:
        ids = [engine.add(prompt, params, keep_logits=True) for prompt, params in requests]
        done: dict[int, Completion] = {}
        while engine.has_unfinished():
            for output in engine.step():
                if output.completion:
                    done[output.request_id] = output.completion
            engine.check()
        assert engine.metrics().blocks_in_use == 0
        assert engine.metrics().num_preemptions > 0
        assert any(completion.cached_tokens for completion in done.values()) == prefix_cache
        assert engine.metrics().prefix_hit_tokens > 0, "a preempted sequence finds its own blocks"
    for request_id, (prompt, params) in zip(ids, requests, strict=True):
        assert_same(done[request_id], alone(prompt, params))


def test_prefix_hits_are_counted_and_change_nothing() -> None:
    prompt = list(range(40))
    params = SamplingParams(max_tokens=8)
    with token_engine() as engine:
        first = engine.generate(prompt, params, keep_logits=True)
        again = engine.generate(prompt, params, keep_logits=True)
        longer = engine.generate([*prompt, *first.token_ids], params)
        whole = engine.generate(prompt[:32], params)
    assert (first.cached_tokens, again.cached_tokens, longer.cached_tokens, whole.cached_tokens) == (0, 32, 32, 31)
    assert_same(again, first)
    assert whole.token_ids == alone(prompt[:32], params).token_ids


def test_a_fully_cached_prompt_in_use_is_copied_before_it_is_written() -> None:
    params = SamplingParams(max_tokens=12)
    executor = CopyCountingExecutor()
    with Engine(executor) as engine:
        prompt = list(range(32))
        first = engine.stream(prompt, params)
        next(first)
        second = engine.generate(prompt, replace(params, temperature=1.0, seed=3))
        rest = [token for output in first for token in output.token_ids]
    assert (executor.num_copies, second.cached_tokens) == (1, 31)
    assert second.token_ids == alone(prompt, replace(params, temperature=1.0, seed=3)).token_ids
    assert tuple(rest) == alone(prompt, params).token_ids[1:]


def test_a_single_prompt_gives_one_completion_and_a_list_gives_as_many() -> None:
    with token_engine() as engine:
        one = engine.generate([1, 2, 3], SamplingParams(max_tokens=4))
        many = engine.generate([[1, 2, 3], [4]], [SamplingParams(max_tokens=4), SamplingParams(max_tokens=2)])
    assert one.token_ids == many[0].token_ids
    assert [len(completion.token_ids) for completion in many] == [4, 2]
    assert (one.finish_reason, one.stop_reason, one.prompt_tokens) == ("length", None, 3)


def test_output_that_reaches_the_context_ends_there() -> None:
    with token_engine(context_tokens=24, num_blocks=4) as engine:
        completion = engine.generate(list(range(20)), SamplingParams(max_tokens=100))
    assert len(completion.token_ids) == 4
    assert completion.finish_reason == "length"


def test_end_tokens_and_stop_tokens_end_a_request_with_their_id() -> None:
    params = SamplingParams(max_tokens=10)
    tokens = alone([1, 2, 3], params).token_ids
    with token_engine(eos_token_ids=(tokens[3],)) as engine:
        by_eos = engine.generate([1, 2, 3], params)
        by_stop = engine.generate([1, 2, 3], replace(params, stop_token_ids=(tokens[2],)))
        ignored = engine.generate([1, 2, 3], replace(params, ignore_eos=True))
    assert (by_eos.finish_reason, by_eos.stop_reason, by_eos.token_ids) == ("stop", tokens[3], tokens[:4])
    assert (by_stop.stop_reason, by_stop.token_ids) == (tokens[2], tokens[:3])
    assert ignored.token_ids == tokens


ENDS = tuple(range(0, VOCAB_SIZE, 4))  # a quarter of the tokens, so that an output of the fake model ends soon
LEAST = SamplingParams(max_tokens=30, min_tokens=12, temperature=1.0, seed=7)
LIMITED = [
    *(replace(LEAST, seed=seed) for seed in range(8)),
    replace(LEAST, temperature=0.0, frequency_penalty=0.5),
    replace(LEAST, stop_token_ids=(1, 2, 3)),
    replace(LEAST, min_tokens=3, allowed_token_ids=range(0, VOCAB_SIZE, 2)),
    replace(LEAST, min_tokens=0, allowed_token_ids=(5, 9, 12), logprobs=1),
    replace(LEAST, min_tokens=0),
]


def limited_prompt(number: int) -> list[int]:
    return [*range(20), number, *range(number)]


def test_no_end_token_is_sampled_before_min_tokens_nor_another_than_the_allowed() -> None:
    with token_engine(eos_token_ids=ENDS) as engine:
        found = [engine.generate(limited_prompt(number), params) for number, params in enumerate(LIMITED)]
    for completion, params in zip(found, LIMITED, strict=True):
        ends = {*ENDS, *params.stop_token_ids}
        assert not ends & {*completion.token_ids[: params.min_tokens]}
        assert len(completion.token_ids) > params.min_tokens or completion.finish_reason == "length"
        assert {*completion.token_ids} <= {*(params.allowed_token_ids or range(VOCAB_SIZE))}
    assert sum(one.finish_reason == "stop" for one in found) > len(found) // 2, "they end after it"
    assert len(found[-1].token_ids) < 12, "without min_tokens an output ends soon"


@each_case("executor", [FakeExecutor, FakePipelinedExecutor])
@each_case("drafts", [False, True])
def test_no_feature_changes_a_token_of_min_tokens_and_allowed_tokens(
    executor: type[FakeExecutor], drafts: bool
) -> None:
    """A pool that preempts, pipelining, drafts, several choices, and prompts that are cached."""
    with token_engine(eos_token_ids=ENDS, num_blocks=64) as engine:
        expected = [engine.generate(limited_prompt(number), params) for number, params in enumerate(LIMITED)]
    drafter = RandomDrafter(VOCAB_SIZE, 1) if drafts else None
    control = LengthControl(adapts=False)
    speculator = Speculator(drafter, vocab_size=VOCAB_SIZE, num_draft_tokens=3, control=control) if drafter else None
    fake = executor(vocab_size=VOCAB_SIZE, eos_token_ids=ENDS, num_blocks=24, block_tokens=4, max_batch_tokens=24)
    with Engine(fake, speculator=speculator) as engine:
        prompts = [limited_prompt(number) for number in range(len(LIMITED))]
        for _ in range(2):
            found = engine.generate(prompts, LIMITED)
            engine.check()
            assert [one.token_ids for one in found] == [one.token_ids for one in expected]
            drafted = sum(one.metrics.num_drafted_tokens for one in found)
            accepted = sum(one.metrics.num_accepted_tokens for one in found)
            assert accepted < drafted if drafts else accepted == drafted == 0
        assert engine.metrics().num_preemptions
        choices = engine.generate(prompts[0], replace(LEAST, n=3)).choices
        for choice in choices:
            assert choice.token_ids == engine.generate(prompts[0], replace(LEAST, seed=choice.seed)).token_ids


def test_tokens_that_cannot_be_allowed_are_refused_by_name() -> None:
    with token_engine(eos_token_ids=(3,)) as engine:
        with pytest.raises(RequestError, match="allowed_token_ids names token 256") as outside:
            engine.generate([1], SamplingParams(allowed_token_ids=[256]))
        assert outside.value.field == "allowed_token_ids"
        with pytest.raises(RequestError, match="has end tokens alone"):
            engine.generate([1], SamplingParams(allowed_token_ids=[3], min_tokens=1))
        assert engine.generate([1], SamplingParams(allowed_token_ids=[3])).token_ids == (3,)


def test_min_tokens_gives_way_to_the_context() -> None:
    with token_engine(context_tokens=24, num_blocks=4) as engine:
        completion = engine.generate(list(range(20)), SamplingParams(max_tokens=100, min_tokens=90))
    assert (len(completion.token_ids), completion.finish_reason) == (4, "length")


def test_special_tokens_are_part_of_the_text_where_they_are_not_skipped() -> None:
    with text_engine() as engine:
        special = next(iter(demo_tokenizer().special_tokens.values()))
        params = SamplingParams(max_tokens=2, allowed_token_ids=[special], ignore_eos=True)
        assert engine.generate("def", params).text == ""
        shown = engine.generate("def", replace(params, skip_special_tokens=False)).text
    assert shown == 2 * next(iter(demo_tokenizer().special_tokens))


def test_streamed_text_concatenates_to_the_completion_and_a_stop_string_is_cut_off() -> None:
    with text_engine() as engine:
        whole = engine.generate("def read", SamplingParams(max_tokens=30, ignore_eos=True))
        outputs = list(engine.stream("def read", SamplingParams(max_tokens=30, ignore_eos=True)))
        stop = whole.text[10:14]
        stopped = engine.generate("def read", SamplingParams(max_tokens=30, ignore_eos=True, stop=(stop,)))
    assert "".join(output.text for output in outputs) == whole.text
    assert [token for output in outputs for token in output.token_ids] == list(whole.token_ids)
    assert [output.finished for output in outputs] == [False] * 29 + [True]
    assert stopped.text == whole.text[: whole.text.index(stop)]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)


def test_log_probabilities_are_returned_on_request() -> None:
    with token_engine() as engine:
        completion = engine.generate([1], SamplingParams(max_tokens=3, logprobs=2), keep_logits=True)
        assert engine.generate([1], SamplingParams(max_tokens=3)).logprobs is None
    assert completion.logprobs is not None
    assert completion.logits is not None
    assert [len(token.top) for token in completion.logprobs] == [2, 2, 2]
    assert tuple(token.token_id for token in completion.logprobs) == completion.token_ids
    assert completion.token_ids == tuple(completion.logits.argmax(axis=1))


def test_an_aborted_request_frees_its_blocks_and_the_others_continue() -> None:
    params = SamplingParams(max_tokens=20)
    with token_engine() as engine:
        doomed, other = engine.add([1, 2, 3], params), engine.add([4, 5], params)
        outputs = [output for _ in range(5) for output in engine.step()]
        completion = engine.abort(doomed)
        assert engine.abort(doomed) is None
        while engine.has_unfinished():
            outputs += engine.step()
        assert engine.metrics().blocks_in_use == 0
    assert completion is not None
    assert (completion.finish_reason, len(completion.token_ids)) == ("abort", 5)
    last = [output.completion for output in outputs if output.request_id == other][-1]
    assert last is not None
    assert last.token_ids == alone([4, 5], params).token_ids


@each_case("executor", [FakeExecutor, FakePipelinedExecutor])
def test_each_step_calls_what_waits_for_free_cores_before_its_tokens_are_read(
    executor: type[FakeExecutor | FakePipelinedExecutor],
) -> None:
    with Engine(executor(vocab_size=VOCAB_SIZE)) as engine:
        seen: list[int] = []
        engine.call_when_cores_are_free(lambda: seen.append(engine.metrics().output_tokens))
        engine.generate([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))
        engine.generate([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True, logprobs=1))  # the host samples
    assert seen == [0, 1, 2, 3, 4, 5]


def test_streams_may_be_interleaved_and_closing_one_aborts_it() -> None:
    params = SamplingParams(max_tokens=6)
    with token_engine() as engine:
        first, second = engine.stream([1], params), engine.stream([2], params)
        added = engine.add([3], params)
        next(first)
        next(second)
        next(first)
        assert next(output.request_id for output in engine.step()) == added
        first.close()
        rest = list(second)
        assert rest[-1].completion is not None
        assert rest[-1].completion.token_ids == alone([2], params).token_ids
        assert engine.metrics().num_running == 0


@each_case(
    ("prompt", "message"),
    [
        ([], "empty list"),
        ("", "no tokenizer"),
        ([1, 256], r"token 1 of the prompt is 256; .* from 0 to 255"),
        ([-1], r"token 0 of the prompt is -1"),
        ([1.5], "whole token ids"),
        ([[1, 2], [3, "x"]], "whole token ids"),
        (list(range(200)) * 3, r"context length is 512 tokens.*with 600 tokens.*at most 511"),
        (list(range(8)) * 64, r"512 tokens"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused(prompt: list[int], message: str) -> None:
    with token_engine() as engine:
        with pytest.raises(RequestError, match=message):
            engine.generate(prompt)
        assert not engine.has_unfinished()
        assert engine.metrics().blocks_in_use == 0


def test_a_bias_for_a_token_outside_the_vocabulary_is_refused() -> None:
    with token_engine() as engine:
        with pytest.raises(RequestError, match=r"logit_bias names token 256; the model's token ids go from 0 to 255"):
            engine.generate([1], SamplingParams(logit_bias={2: 1, 256: 1}))
        assert not engine.has_unfinished()


def test_an_empty_text_is_refused_when_it_has_no_tokens() -> None:
    with text_engine() as engine:
        if not engine.encode(""):
            with pytest.raises(RequestError, match="no tokens"):
                engine.generate("")


def test_a_request_larger_than_the_pool_is_refused_and_the_rest_of_its_list_is_dropped() -> None:
    with token_engine(num_blocks=2) as engine:
        with pytest.raises(RequestError, match="pool has 2"):
            engine.generate([[1], list(range(30))], SamplingParams(max_tokens=10))
        assert not engine.has_unfinished()


def test_unequal_numbers_of_prompts_and_parameters_are_refused() -> None:
    with token_engine() as engine:
        with pytest.raises(RequestError, match="2 prompts and 1 SamplingParams"):
            engine.generate([[1], [2]], [SamplingParams()])


class CopyCountingExecutor(FakeExecutor):
    """Counts the copies on write."""

    num_copies = 0

    def copy_block(self, source: int, target: int) -> None:
        self.num_copies += 1
        super().copy_block(source, target)


def test_a_closed_engine_refuses_and_closes_its_executor() -> None:
    executor = FakeExecutor()
    engine = Engine(executor)
    engine.add([1])
    engine.close()
    engine.close()
    assert executor.closed
    assert not engine.has_unfinished()
    for call in (lambda: engine.generate([1]), engine.step, lambda: engine.prompt_logits([1])):
        with pytest.raises(EngineError, match="closed"):
            call()


def test_metrics_record_the_events_of_a_request_in_order() -> None:
    with token_engine() as engine:
        metrics = engine.generate([1, 2], SamplingParams(max_tokens=5)).metrics
        short = engine.generate([1, 2], SamplingParams(max_tokens=1)).metrics
    assert metrics.queue_seconds is not None
    assert metrics.ttft_seconds is not None
    assert metrics.tpot_seconds is not None
    assert 0 <= metrics.queue_seconds <= metrics.ttft_seconds <= metrics.e2e_seconds
    assert metrics.ttft_seconds + 4 * metrics.tpot_seconds == pytest.approx(metrics.e2e_seconds)
    assert short.tpot_seconds is None


def test_max_sequences_below_one_is_refused() -> None:
    with pytest.raises(UsageError, match="max_sequences is 0"):
        token_engine(max_sequences=0)


def test_a_second_thread_is_refused_while_one_is_in_a_step_and_served_after_it() -> None:
    engine, step = engine_in_step()
    with step, pytest.raises(EngineError, match=r"two threads use this engine at the same time.* AsyncEngine"):
        engine.generate([1, 2], SamplingParams(max_tokens=2))
    assert step.result.token_ids == engine.generate([1, 2], SamplingParams(max_tokens=4)).token_ids
    engine.close()


def test_closing_waits_for_the_step_of_another_thread_whose_call_then_says_so() -> None:
    engine, step = engine_in_step()
    closing = threading.Thread(target=engine.close)
    with step:
        closing.start()
        closing.join(0.05)
        assert closing.is_alive()
    closing.join(10)
    assert not closing.is_alive()
    assert isinstance(step.result, EngineError)
    assert "the engine is closed" in str(step.result)


class StepOfAThread:
    """A thread that generates and is inside a step until the block ends; `result` is a completion or an error."""

    def __init__(self, engine: Engine, inside: threading.Event, ends: threading.Event) -> None:
        self.result: Any = None
        self._engine, self._inside, self._ends = engine, inside, ends
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.result = self._engine.generate([1, 2], SamplingParams(max_tokens=4))
        except EngineError as error:
            self.result = error

    def __enter__(self) -> None:
        self._thread.start()
        assert self._inside.wait(10)

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join(10)
        assert not self._thread.is_alive()


def engine_in_step() -> tuple[Engine, StepOfAThread]:
    engine, inside, ends = token_engine(), threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        ends.wait(10)

    engine.call_when_cores_are_free(wait)
    return engine, StepOfAThread(engine, inside, ends)


def test_an_interrupt_after_the_last_output_of_a_choice_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = token_engine()
    requests = engine._loop.requests
    take_out = requests.take_out

    def interrupted(ended: Iterable[Request]) -> None:
        ended = [*ended]
        if ended and ended[0].index == 1:
            monkeypatch.undo()
            raise KeyboardInterrupt
        take_out(ended)

    monkeypatch.setattr(requests, "take_out", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([1, 2, 3], SamplingParams(max_tokens=5, n=3, temperature=0.9, seed=1))
    metrics = engine.metrics()
    assert (metrics.num_running, metrics.num_waiting, metrics.blocks_in_use) == (0, 0, 0)
    assert not engine.has_unfinished()
    engine.check()
    engine.close()


def test_an_interrupt_while_a_request_is_queued_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = token_engine()

    def interrupted(request_id: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine._outputs, "open", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([1, 2, 3], SamplingParams(max_tokens=5))
    assert not engine.has_unfinished()
    engine.check()
    engine.close()


def test_a_step_that_nothing_can_run_in_blames_no_iteration_that_is_not_open() -> None:
    engine = token_engine()
    engine.add([1, 2, 3], SamplingParams(max_tokens=5))
    engine.step()
    (request,) = engine._loop.requests.by_sequence.values()
    request.sequence.num_computed = len(request.sequence.tokens)  # as if its last token had been lost
    with pytest.raises(EngineError, match="no step is possible for the 1 open requests"):
        engine.step()
    engine.close()


@pytest.mark.parametrize(
    ("fault", "message", "num_opened"),
    [
        ({"kv_blocks": 10**12}, "a KV pool of 1000000000000 blocks", 0),
        ({"kv_disk_path": "a file"}, "a file", 2),
        ({"adapters": {"a": "nowhere"}}, "the adapter 'a' cannot be loaded", 2),
    ],
    ids=["no memory for the pool", "no folder for blocks", "no adapter"],
)
def test_what_was_opened_before_a_fault_is_closed(
    build_unmeasured: BuildArtifact,
    two_layers: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: dict[str, Any],
    message: str,
    num_opened: int,
) -> None:
    artifact = build_unmeasured("int4-cpu", two_layers)
    closed, close, threads = set[NativeExecutor](), NativeExecutor.close, {*threading.enumerate()}

    def note(executor: NativeExecutor) -> None:
        closed.add(executor)
        close(executor)

    monkeypatch.setattr(NativeExecutor, "close", note)
    monkeypatch.chdir(tmp_path)
    Path("a file").write_text("no folder")
    options = {"kv_host_bytes": 1 << 22, "kv_disk_path": "kv", "kv_disk_bytes": 1 << 22, "speculation": artifact.path}
    with pytest.raises(IngotError, match=message):
        Engine.load(artifact, **{**options, **fault})
    assert len(closed) == num_opened
    assert {*threading.enumerate()} == threads
