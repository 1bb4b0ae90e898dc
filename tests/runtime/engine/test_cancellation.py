"""Requests that are cancelled or run out of time at any moment, with all that an engine can do at once.

Priorities and groups, several choices, chunked prefill, preemption in a small pool, host memory for blocks, drafts
copied from the prompt, and a step in flight. What the others give is what each gives alone, and nothing is leaked.
"""

import random
from collections.abc import Iterator
from functools import cache, partial

from ingot.runtime.asking.outputs import Completion
from ingot.runtime.asking.request_options import RequestOptions
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.engine.engine import Engine
from ingot.runtime.engine.open_tiers import open_tiers
from ingot.runtime.options import EngineOptions
from ingot.runtime.speculation.length_control import LengthControl
from ingot.runtime.speculation.prompt_lookup import PromptLookup
from ingot.runtime.speculation.speculator import Speculator
from tests.each_case import each_case
from tests.runtime.steps.test_deadlines import Clock
from tests.simulators.fake_executor import FakeExecutor
from tests.simulators.pipelined_executor import FakePipelinedExecutor

VOCAB = 4
NUM_REQUESTS = 8
Prompt = tuple[int, ...]


@cache
def alone(prompt: Prompt, params: SamplingParams) -> list[tuple[int, ...]]:
    """Tokens of each choice, in an engine without anything else."""
    with Engine(FakeExecutor(vocab_size=VOCAB)) as engine:
        return [choice.token_ids for choice in engine.generate(list(prompt), params).choices]


def crowded_engine(rng: random.Random, executor: type[FakeExecutor], clock: Clock) -> Engine:
    """An engine too small for its requests, with random features."""
    control = LengthControl(adapts=False)
    speculator = Speculator(PromptLookup(), vocab_size=VOCAB, num_draft_tokens=3, control=control)
    options = EngineOptions(kv_host_bytes=4000)
    return Engine(
        executor(
            block_tokens=4, num_blocks=rng.randrange(14, 22), max_batch_tokens=rng.choice([5, 16]), vocab_size=VOCAB
        ),
        max_sequences=rng.choice([2, 3, 6]),
        clock=clock,
        speculator=speculator if rng.random() < 0.5 else None,
        tiers=partial(open_tiers, options=options) if rng.random() < 0.5 else None,
    )


def random_requests(rng: random.Random) -> Iterator[tuple[Prompt, SamplingParams, RequestOptions]]:
    for _ in range(NUM_REQUESTS):
        prompt = (0, 1, 2, 3) * rng.randrange(5) + tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 6)))
        params = SamplingParams(
            max_tokens=rng.randrange(1, 20),
            n=rng.choice([1, 1, 1, 2, 3]),
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.randrange(9),
        )
        timeout = rng.choice([None, None, rng.randrange(1, 40)])
        yield prompt, params, RequestOptions(priority=rng.randrange(3), group=rng.choice("ab"), timeout_seconds=timeout)


@each_case("executor", [FakeExecutor, FakePipelinedExecutor])
@each_case("seed", range(40))
def test_whatever_ends_early_nothing_else_changes(executor: type[FakeExecutor], seed: int) -> None:
    rng, clock = random.Random(seed), Clock()
    requests: dict[int, tuple[Prompt, SamplingParams]] = {}
    done: dict[tuple[int, int], Completion] = {}  # by request and choice
    waiting = list(random_requests(rng))
    with crowded_engine(rng, executor, clock) as engine:
        while waiting or engine.has_unfinished():
            if waiting and rng.random() < 0.4:
                prompt, params, options = waiting.pop()
                requests[engine.add(prompt, params, options=options)] = (prompt, params)
            if requests and rng.random() < 0.04:
                aborted = engine.abort(victim := rng.choice(list(requests)))
                for choice in aborted.choices if aborted else ():
                    done.setdefault((victim, choice.index), choice)
            clock.now += 1
            for output in engine.step():
                if output.completion:
                    done[output.request_id, output.index] = output.completion
            engine.check()
            engine._loop.scheduler.waiting.check()
        metrics = engine.metrics()
        assert (metrics.blocks_in_use, metrics.num_running, metrics.num_waiting) == (0, 0, 0)
        assert metrics.num_finished == sum(params.n for _, params in requests.values())
    assert len(done) == sum(params.n for _, params in requests.values())
    for request_id, (prompt, params) in requests.items():
        for index, expected in enumerate(alone(prompt, params)):
            choice = done[request_id, index]
            assert choice.finish_reason in ("length", "abort", "timeout")
            is_whole = choice.finish_reason == "length"
            assert choice.token_ids == (expected if is_whole else expected[: len(choice.token_ids)])
