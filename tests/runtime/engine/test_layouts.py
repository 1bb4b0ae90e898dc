"""Models of unequal layers and with side state: random loads get the tokens that each request gets alone."""

import random
from array import array
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest

from ingot.errors import EngineError
from ingot.runtime.asking.outputs import Completion
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.engine.engine import Engine
from ingot.runtime.kv.keys import PrefixScope, state_content
from ingot.runtime.kv.transfers.restored_prefix import CachedTokens
from ingot.runtime.requests.sampler import choice_seed
from tests.each_case import each_case
from tests.runtime.engines import LOAD_VOCAB_SIZE, Load, random_pool, random_requests, serve
from tests.runtime.kv.tiered_engines import tiered_engine
from tests.simulators.fake_executor import FakeExecutor
from tests.simulators.fake_host_blocks import FakeStore, Transfers
from tests.simulators.layered_executor import (
    VARIANTS,
    FailingExecutor,
    FailingPipelinedExecutor,
    LayeredExecutor,
    LayeredPipelinedExecutor,
)
from tests.simulators.pipelined_executor import FakePipelinedExecutor

EXECUTORS = pytest.mark.parametrize("executor", [LayeredExecutor, LayeredPipelinedExecutor])
STATEFUL = pytest.mark.parametrize("layout", ["side state", "all"])


@cache
def alone(
    layout: str, prompt: tuple[int, ...], params: SamplingParams, eos_token_ids: tuple[int, ...] = ()
) -> Completion:
    """The completion of a request computed in one step per token, with nothing before it, in an engine of its own."""
    with Engine(
        LayeredExecutor(layout, vocab_size=LOAD_VOCAB_SIZE, eos_token_ids=eos_token_ids), prefix_cache=False
    ) as engine:
        return engine.generate(list(prompt), params, keep_logits=True)


@EXECUTORS
@pytest.mark.parametrize("layout", VARIANTS)
def test_a_random_load_gets_the_tokens_of_requests_alone(executor: type[LayeredExecutor], layout: str) -> None:
    num_hit_tokens = 0
    for seed in range(12):
        load = Load(seed)
        num_states = random.Random(seed).choice([1, 2, 3, 5, 40])
        with Engine(executor(layout, num_states=num_states, **load.executor), **load.engine) as engine:
            done = serve(engine, load)
            metrics = engine.metrics()
            assert metrics.blocks_in_use == metrics.num_running == metrics.num_waiting == 0
            num_hit_tokens += metrics.prefix_hit_tokens
        for number, (prompt, params) in enumerate(load.requests):
            expected = alone(layout, tuple(prompt), params, load.executor["eos_token_ids"])
            if done[number].finish_reason == "abort":
                assert done[number].token_ids == expected.token_ids[: len(done[number].token_ids)]
            else:
                assert done[number].token_ids == expected.token_ids
    assert num_hit_tokens, "no prefix hit in all these loads"


@EXECUTORS
@pytest.mark.parametrize("layout", VARIANTS)
@pytest.mark.parametrize(("num_blocks", "block_tokens", "budget"), [(40, 4, 16), (30, 4, 5)])
def test_preempted_requests_get_the_tokens_of_requests_alone(
    executor: type[LayeredExecutor], layout: str, num_blocks: int, block_tokens: int, budget: int
) -> None:
    requests = [
        ([token % LOAD_VOCAB_SIZE for token in prompt], replace(params, temperature=0.0, logit_bias={}))
        for prompt, params in random_requests(16)
    ]
    sizes = {"num_blocks": num_blocks, "block_tokens": block_tokens, "max_batch_tokens": budget}
    with Engine(executor(layout, vocab_size=LOAD_VOCAB_SIZE, **sizes)) as engine:
        ids = [engine.add(prompt, params) for prompt, params in requests]
        done: dict[int, Completion] = {}
        while engine.has_unfinished():
            done |= {output.request_id: output.completion for output in engine.step() if output.completion}
            engine.check()
        assert engine.metrics().num_preemptions > 0
        assert engine.metrics().prefix_hit_tokens > 0
    for request_id, (prompt, params) in zip(ids, requests, strict=True):
        assert done[request_id].token_ids == alone(layout, tuple(prompt), params).token_ids


@each_case("layout", VARIANTS)
def test_every_layout_gives_other_tokens(layout: str) -> None:
    prompt = tuple([1, 2, 3, 4] * 4)
    params = SamplingParams(max_tokens=24)
    others = [alone(other, prompt, params).token_ids for other in VARIANTS if other != layout]
    assert alone(layout, prompt, params).token_ids not in others


@STATEFUL
def test_logits_are_equal_to_the_bit_after_a_hit(layout: str) -> None:
    prompt = [1, 2, 3, 4, 5] * 9
    params = SamplingParams(max_tokens=6)
    with Engine(LayeredExecutor(layout, vocab_size=LOAD_VOCAB_SIZE, block_tokens=4)) as engine:
        cold = engine.generate(prompt, params, keep_logits=True)
        hit = engine.generate(prompt, params, keep_logits=True)
        longer = engine.generate([*prompt, 7, 7], params, keep_logits=True)
    assert (cold.cached_tokens, hit.cached_tokens, longer.cached_tokens) == (0, 44, 44)
    for completion, its_prompt in ((cold, prompt), (hit, prompt), (longer, [*prompt, 7, 7])):
        expected = alone(layout, tuple(its_prompt), params)
        assert completion.logits is not None
        assert expected.logits is not None
        assert completion.logits.tobytes() == expected.logits.tobytes()


@STATEFUL
@pytest.mark.parametrize(
    ("prompt_tokens", "cached_tokens"), [(104, 100), (100, 96), (97, 96), (96, 64), (65, 64), (64, 0), (5, 0)]
)
def test_a_hit_is_shortened_to_the_longest_prefix_whose_state_is_kept(
    layout: str, prompt_tokens: int, cached_tokens: int
) -> None:
    """All blocks of the first prompt are cached, and its states after 64 tokens, and after 96 and 100 at its end."""
    params = SamplingParams(max_tokens=2)
    longest = [number * number % LOAD_VOCAB_SIZE for number in range(104)]
    with Engine(LayeredExecutor(layout, vocab_size=LOAD_VOCAB_SIZE, block_tokens=4, num_blocks=200)) as engine:
        engine.generate(longest[:100], params)
        assert engine.metrics().blocks_cached == 25
        hit = engine.generate(longest[:prompt_tokens], params)
        engine.check()
    assert hit.cached_tokens == cached_tokens
    assert hit.token_ids == alone(layout, tuple(longest[:prompt_tokens]), params).token_ids


@EXECUTORS
def test_requests_wait_for_a_state_slot(executor: type[LayeredExecutor]) -> None:
    params = SamplingParams(max_tokens=9)
    with Engine(executor("side state", vocab_size=LOAD_VOCAB_SIZE, num_states=2)) as engine:
        ids = [engine.add([number, 1], params) for number in range(5)]
        engine.step()
        assert (engine.metrics().num_running, engine.metrics().num_waiting) == (2, 3)
        done: dict[int, Completion] = {}
        while engine.has_unfinished():
            done |= {output.request_id: output.completion for output in engine.step() if output.completion}
            engine.check()
    for number, request_id in enumerate(ids):
        assert done[request_id].token_ids == alone("side state", (number, 1), params).token_ids


@EXECUTORS
@pytest.mark.parametrize("layout", VARIANTS)
def test_blocks_and_states_of_any_layout_come_back_from_both_tiers(
    executor: type[LayeredExecutor], layout: str
) -> None:
    rng = random.Random(0)
    params = SamplingParams(max_tokens=6)
    prompts = [[rng.randrange(LOAD_VOCAB_SIZE) for _ in range(40)] for _ in range(4)]
    store = FakeStore()
    restored = CachedTokens()
    for _ in range(2):
        with tiered_engine(partial(executor, layout), vocab_size=LOAD_VOCAB_SIZE, num_blocks=14, store=store) as engine:
            for prompt in prompts * 2:
                completion = engine.generate(prompt, params)
                assert completion.token_ids == alone(layout, tuple(prompt), params).token_ids
                restored = CachedTokens(*np.add(restored, completion.cached_tokens_by_tier))
                engine.check()
    assert restored.host
    assert restored.disk == 4 * 36


def tiered(layout: str, **options: Any) -> Engine:
    return tiered_engine(partial(LayeredExecutor, layout), vocab_size=LOAD_VOCAB_SIZE, **options)


@STATEFUL
def test_a_prefix_is_restored_as_far_as_its_state_is_stored(layout: str) -> None:
    """States are kept after 64 tokens, and at the end of the prompt after 96 and 100."""
    params, store = SamplingParams(max_tokens=2), FakeStore()
    prompt = [number * number % LOAD_VOCAB_SIZE for number in range(103)]
    with tiered(layout, num_blocks=64, store=store) as engine:
        engine.generate(prompt[:100], params)
    hashes = [content.hash for content in engine._blocks.contents(array("q", prompt), PrefixScope(engine._root))]
    of_states = {4 * count: state_content(key).hash for count, key in enumerate(hashes, 1)}
    assert [num_tokens for num_tokens, key in of_states.items() if key in store.blocks] == [64, 96, 100]
    for lost, cached in ((None, 100), (100, 96), (96, 64), (64, 0)):
        store.blocks.pop(of_states.get(lost or 0, b""), None)
        kept = dict(store.blocks)
        with tiered(layout, num_blocks=64, store=store) as engine:
            completion = engine.generate(prompt, params, keep_logits=True)
            metrics = engine.metrics().kv_tiers
        assert completion.cached_tokens_by_tier == (0, 0, cached)
        assert completion.logits is not None
        expected = alone(layout, tuple(prompt), params).logits
        assert expected is not None
        assert completion.logits.tobytes() == expected.tobytes()
        assert metrics is not None
        assert metrics.restored_states == metrics.disk_read_states == (1 if cached else 0)
        store.blocks = kept


@STATEFUL
def test_a_state_comes_back_to_blocks_that_never_left_the_device(layout: str) -> None:
    """Other requests took the slot of its snapshot, but not its blocks."""
    params = SamplingParams(max_tokens=2)
    prompt = [number * number % LOAD_VOCAB_SIZE for number in range(42)]
    with tiered(layout, num_blocks=64, num_states=3) as engine:
        engine.generate(prompt, params)
        engine.generate([[number] * 9 for number in range(6)], params)
        again = engine.generate(prompt, params)
        metrics = engine.metrics().kv_tiers
        assert metrics is not None
        assert (again.cached_tokens_by_tier.device, metrics.restored_blocks, metrics.restored_states) == (40, 0, 1)
        assert again.token_ids == alone(layout, tuple(prompt), params).token_ids
        engine.check()


@STATEFUL
@pytest.mark.parametrize("damaged", ["state", "block"])
def test_a_load_that_lacks_its_state_or_a_block_starts_over(layout: str, damaged: str) -> None:
    params, store = SamplingParams(max_tokens=2), FakeStore()
    prompt = [number * number % LOAD_VOCAB_SIZE for number in range(103)]
    with tiered(layout, num_blocks=64, store=store) as engine:
        engine.generate(prompt[:100], params)
    hashes = [content.hash for content in engine._blocks.contents(array("q", prompt), PrefixScope(engine._root))]
    key = state_content(hashes[24]).hash if damaged == "state" else hashes[20]
    store.blocks[key] = next(iter(store.blocks.values()))
    with tiered(layout, num_blocks=64, store=store) as engine:
        completion = engine.generate(prompt, params)
        engine.check()
    assert completion.token_ids == alone(layout, tuple(prompt), params).token_ids
    assert completion.cached_tokens == (96 if damaged == "state" else 64)


@EXECUTORS
@STATEFUL
def test_random_loads_with_tiers_get_the_tokens_of_requests_alone(executor: type[LayeredExecutor], layout: str) -> None:
    """Transfers end late and fail, slots are few everywhere, and engines restart on one store."""
    num_restored = 0
    for seed in range(8):
        rng = random.Random(seed)
        transfers = Transfers(rng, moves=rng.choice([0.2, 0.6]), fails=rng.choice([0.0, 0.0, 0.2]))
        store = FakeStore(transfers)
        for again in range(2):
            load = Load(seed)
            sizes = {"num_slots": rng.choice([2, 64]), "num_state_slots": rng.choice([1, 2, 16])}
            pool = {"block_tokens": 2, "num_blocks": rng.choice([32, 40]), "num_states": rng.choice([1, 2, 5, 40])}
            options = {**load.executor, **load.engine, **sizes, **pool, "rule": "always"}
            with tiered_engine(partial(executor, layout), store=store, transfers=transfers, **options) as engine:
                done = serve(engine, load)
                metrics = engine.metrics()
                assert metrics.blocks_in_use == metrics.num_running == metrics.num_waiting == 0
                assert metrics.kv_tiers is not None
                num_restored += metrics.kv_tiers.restored_states
            engine.check()
            for number, (prompt, params) in enumerate(load.requests):
                expected = alone(layout, tuple(prompt), params, load.executor["eos_token_ids"]).token_ids
                is_whole = done[number].finish_reason != "abort"
                found = done[number].token_ids
                assert found == (expected if is_whole else expected[: len(found)]), (seed, again, number)
    assert num_restored > 8


@EXECUTORS
@pytest.mark.parametrize("layout", VARIANTS)
@pytest.mark.parametrize("num_states", [1, 2, 9])
def test_choices_of_a_prompt_fork_its_state_and_equal_requests_with_their_seeds(
    executor: type[LayeredExecutor], layout: str, num_states: int
) -> None:
    params = SamplingParams(max_tokens=9, temperature=1.5, seed=4, n=3)
    prompts = [[1, 2, 3, 4] * number + [number] for number in range(4)]
    with Engine(executor(layout, vocab_size=LOAD_VOCAB_SIZE, block_tokens=4, num_states=num_states)) as engine:
        completions = engine.generate(prompts, params)
        engine.check()
    for prompt, completion in zip(prompts, completions, strict=True):
        for choice in completion.choices:
            single = replace(params, n=1, seed=choice_seed(4, choice.index))
            assert choice.token_ids == alone(layout, tuple(prompt), single).token_ids


FAILING = pytest.mark.parametrize("executor", [FailingExecutor, FailingPipelinedExecutor])


@FAILING
@STATEFUL
def test_a_failed_step_changes_no_token_though_it_has_changed_states(
    executor: type[FailingExecutor], layout: str
) -> None:
    params = SamplingParams(max_tokens=7)
    prompts = [[1, 2, 3, 4] * number + [number] for number in range(1, 5)]
    failures = 0
    for failed in range(24):
        under_test = executor(layout, vocab_size=LOAD_VOCAB_SIZE, block_tokens=4, max_batch_tokens=9, num_blocks=20)
        under_test.failed_steps = frozenset({failed})
        with Engine(under_test, max_sequences=3) as engine:
            completions = engine.generate(prompts, params)
            again = engine.generate(prompts, params)
            engine.check()
            failures += engine.metrics().num_failed_steps
            assert engine.metrics().num_failed_requests == 0
        for prompt, *got in zip(prompts, completions, again, strict=True):
            assert [one.token_ids for one in got] == [alone(layout, tuple(prompt), params).token_ids] * 2
    assert failures > 12


@FAILING
def test_a_state_that_cannot_be_copied_ends_its_request_or_is_not_kept(executor: type[FailingExecutor]) -> None:
    params = SamplingParams(max_tokens=3)
    prompt = [1, 2, 3, 4] * 3
    for failed in range(4):
        under_test = executor("side state", vocab_size=LOAD_VOCAB_SIZE, block_tokens=4)
        under_test.failed_copies = frozenset({failed})
        with Engine(under_test) as engine:
            served = 0
            for _ in range(3):
                request_id = engine.add(prompt, params)
                completion = None
                while completion is None:
                    completion = next((output.completion for output in engine.step() if output.completion), None)
                    engine.check()
                assert engine.metrics().blocks_in_use == 0
                if completion.error is None:
                    served += 1
                    assert completion.token_ids == alone("side state", tuple(prompt), params).token_ids
                else:
                    assert f"request {request_id} failed" in str(completion.error)
                    assert "the copy failed" in str(completion.error)
            assert served >= 2


def test_prompt_logits_do_not_need_snapshots_and_equal_those_of_one_step() -> None:
    prompt = list(range(LOAD_VOCAB_SIZE)) * 5
    with Engine(LayeredExecutor("side state", vocab_size=LOAD_VOCAB_SIZE, max_batch_tokens=64)) as engine:
        whole = engine.prompt_logits(prompt)
    with Engine(LayeredExecutor("side state", vocab_size=LOAD_VOCAB_SIZE, max_batch_tokens=7, num_states=1)) as engine:
        assert np.array_equal(engine.prompt_logits(prompt), whole)
        engine.check()


@pytest.mark.parametrize("executor", [FakeExecutor, FakePipelinedExecutor])
def test_a_model_without_side_state_has_no_slots(executor: type[FakeExecutor]) -> None:
    with Engine(executor()) as engine:
        assert engine._blocks.states is None
        assert engine._loop._side_state is None


def test_an_executor_that_cannot_keep_states_is_refused() -> None:
    class Stateless(FakeExecutor):
        def __init__(self) -> None:
            super().__init__()
            self._geometry = LayeredExecutor("side state").kv_geometry

    with pytest.raises(EngineError, match="24 bytes of side state for each sequence, which its engine cannot keep"):
        Engine(Stateless())
    with pytest.raises(EngineError, match="the engine has 0 state slots"):
        Engine(LayeredExecutor("side state", num_states=0))


def random_layout(rng: random.Random) -> dict[str, Any]:
    """Layers of random sizes, some with windows, some that share an earlier layer's keys and values."""
    count = rng.randrange(1, 5)
    columns: dict[str, list[int]] = {
        "num_kv_heads": [rng.randrange(1, 3) for _ in range(count)],
        "head_dim": [rng.choice([2, 4, 6]) for _ in range(count)],
        "value_dim": [rng.choice([0, 2, 4]) for _ in range(count)],
        "window": [rng.choice([0, 1, 4, 17]) for _ in range(count)],
        "shares": list(range(count)),
    }
    for layer in range(1, count):
        source = columns["shares"][rng.randrange(layer)]
        if rng.random() < 0.4:
            for name in ("num_kv_heads", "head_dim", "value_dim", "shares"):
                columns[name][layer] = columns[name][source]
    dtype = rng.choice(["float32", "bfloat16", "int8", "int4"])
    return {"num_layers": count, **columns, "dtype": dtype, "state_bytes": rng.choice([0, 8, 32])}


def test_random_layouts_give_each_request_what_it_gets_alone() -> None:
    for seed in range(25):
        rng = random.Random(seed)
        layout = random_layout(rng)
        requests = [
            (
                [1, 2, 3, 4] * rng.randrange(9) + [rng.randrange(LOAD_VOCAB_SIZE)],
                SamplingParams(max_tokens=rng.randrange(1, 20)),
            )
            for _ in range(6)
        ]
        options = {**random_pool(rng), "vocab_size": LOAD_VOCAB_SIZE, "num_states": rng.choice([1, 3, 20])}
        with Engine(LayeredPipelinedExecutor(layout, **options)) as engine:
            prompts, params = [prompt for prompt, _ in requests], [one for _, one in requests]
            together = engine.generate(prompts, params)
            engine.check()
        for (prompt, its_params), completion in zip(requests, together, strict=True):
            with Engine(LayeredExecutor(layout, vocab_size=LOAD_VOCAB_SIZE), prefix_cache=False) as engine:
                assert completion.token_ids == engine.generate(prompt, its_params).token_ids
