"""Adapters in the engine: each request computes with its own, whatever else is in the batch, the caches and slots."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.errors import AdapterError, EngineError, RequestError, RequestFailed
from ingot.runtime.adapters import Adapter
from ingot.runtime.asking.outputs import Completion
from ingot.runtime.asking.request_options import RequestOptions
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.engine.engine import Engine
from ingot.runtime.requests.beam_search import BeamParams
from tests.runtime.engines import VOCAB_SIZE, random_pool
from tests.simulators.fake_executor import FakeExecutor, fake_adapter
from tests.simulators.layered_executor import VARIANTS, LayeredExecutor
from tests.simulators.pipelined_executor import FakePipelinedExecutor

NOWHERE = Path("nowhere")
PROMPT = list(range(40))
PLAIN = SamplingParams(max_tokens=6)


def engine_with(names: Sequence[str], executor: Any = None, **options: Any) -> Engine:
    """An engine with an adapter for each name; its contents are the name's."""
    engine = Engine(executor or FakeExecutor(max_adapters=2, vocab_size=VOCAB_SIZE), **options)
    for name in names:
        engine.register_adapter(adapter_of(name), NOWHERE)
    return engine


def adapter_of(name: str) -> Adapter:
    return fake_adapter(name, sum(map(ord, name)))


def named(name: str | None) -> RequestOptions:
    return RequestOptions(adapter=name)


def tokens(engine: Engine, name: str | None, prompt: Sequence[int] = PROMPT) -> tuple[int, ...]:
    return engine.generate(prompt, PLAIN, options=named(name)).token_ids


def test_requests_of_one_batch_get_the_tokens_that_they_get_alone() -> None:
    names = [None, "a", "b", None, "a"]
    alone = {name: tokens(engine_with([name] if name else []), name) for name in {*names}}
    assert len({*alone.values()}) == 3, "an adapter changes the tokens"
    together = engine_with(["a", "b"]).generate([PROMPT] * 5, PLAIN, options=[named(name) for name in names])
    assert [each.token_ids for each in together] == [alone[name] for name in names]


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.sampled_from(["plain", "pipelined", "side state", "all"]))
def test_no_slot_no_cache_and_no_preemption_changes_a_token(seed: int, kind: str) -> None:
    """More adapters than slots, pools that preempt, common prefixes: all as with an engine for each request alone."""
    rng = random.Random(seed)
    options = {**random_pool(rng), "vocab_size": VOCAB_SIZE, "max_adapters": rng.choice([1, 2, 3])}
    options["adapter_bytes"] = rng.choice([0, 1, 2]) * adapter_of("a").num_bytes
    names = ["a", "b", "c", "d", "same as a"]
    engine = _engine_of(kind, options, prefix_cache=rng.random() < 0.8)
    for known in names:
        engine.register_adapter(renamed(known[-1], known), NOWHERE)
    prompts = [PROMPT[: rng.randrange(1, 40)] + [rng.randrange(VOCAB_SIZE)] * rng.randrange(3) for _ in range(8)]
    asked = [(rng.choice([None, *names]), rng.choice(prompts), rng.choice([1, 1, 2])) for _ in range(12)]
    ids = {}
    for name, prompt, count in asked:
        params = SamplingParams(max_tokens=rng.randrange(1, 12), n=count, temperature=0.7, seed=5)
        ids[engine.add(prompt, params, options=named(name))] = (name, prompt, params)
        for output in engine.step() if rng.random() < 0.6 else ():
            _compare(output.result, ids, kind, options)
        engine.check()
    while engine.has_unfinished():
        for output in engine.step():
            _compare(output.result, ids, kind, options)
        engine.check()


def renamed(name: str, new: str) -> Adapter:
    return Adapter(new, adapter_of(name).changes)


def _engine_of(kind: str, options: dict[str, Any], **engine: Any) -> Engine:
    if kind == "plain":
        return Engine(FakeExecutor(**options), **engine)
    if kind == "pipelined":
        return Engine(FakePipelinedExecutor(**options), **engine)
    return Engine(LayeredExecutor(VARIANTS[kind], **options), **engine)


def _compare(result: Completion | None, ids: dict[int, Any], kind: str, options: dict[str, Any]) -> None:
    if result is None:
        return
    name, prompt, params = ids[result.request_id]
    alone = _engine_of(kind, {**options, "num_blocks": 256, "max_batch_tokens": 64})
    if name:
        alone.register_adapter(renamed(name[-1], name), NOWHERE)
    expected = alone.generate(prompt, params, options=named(name))
    assert [each.token_ids for each in result.choices] == [each.token_ids for each in expected.choices]


def test_the_prefix_cache_is_keyed_by_content_and_never_by_name() -> None:
    engine = engine_with(["a", "b"])
    engine.register_adapter(renamed("a", "twin"), NOWHERE)

    def cached(name: str | None) -> int:
        return engine.generate(PROMPT, PLAIN, options=named(name)).cached_tokens

    assert [cached(name) for name in (None, "a", "b")] == [0, 0, 0]
    assert [cached(name) for name in (None, "a", "b", "twin")] == [32, 32, 32, 32]
    engine.unload_adapter("b")
    engine.register_adapter(renamed("c", "b"), NOWHERE)
    assert cached("b") == 0, "another adapter of the same name shares nothing"


def test_beams_follow_their_adapter() -> None:
    def best(names: Sequence[str], name: str | None) -> tuple[int, ...]:
        params = BeamParams(width=3, max_tokens=5)
        return engine_with(names).beam_search(PROMPT, params, options=named(name)).token_ids

    assert best(["a", "b"], "a") == best(["a"], "a") != best([], None)


def test_an_unloaded_adapter_serves_its_open_requests_and_no_new_ones() -> None:
    expected = tokens(engine_with(["a"]), "a")
    engine = engine_with(["a", "b"])
    request = engine.add(PROMPT, PLAIN, options=named("a"))
    waiting = engine.add(PROMPT, PLAIN, options=named("a"))
    engine.step()
    engine.unload_adapter("a")
    with pytest.raises(AdapterError, match=r"unknown adapter 'a'.*loaded adapters: b"):
        engine.add(PROMPT, PLAIN, options=named("a"))
    done: dict[int, tuple[int, ...]] = {}
    while engine.has_unfinished():
        done |= {output.request_id: output.result.token_ids for output in engine.step() if output.result}
    assert done == {request: expected, waiting: expected}
    with pytest.raises(AdapterError, match="unknown adapter"):
        engine.unload_adapter("a")


def test_an_unused_adapter_leaves_its_slot_at_once_and_a_used_one_with_its_last_request() -> None:
    executor = FakeExecutor(max_adapters=2, vocab_size=VOCAB_SIZE)
    engine = engine_with(["a", "b"], executor)
    tokens(engine, "a")
    engine.unload_adapter("a")
    assert not executor.adapters
    engine.add(PROMPT, PLAIN, options=named("b"))
    engine.step()
    engine.unload_adapter("b")
    assert [each.name for each in executor.adapters.values()] == ["b"]
    while engine.has_unfinished():
        engine.step()
    assert not executor.adapters


def test_a_name_is_another_s_only_where_it_is_replaced() -> None:
    engine = engine_with(["a"])
    engine.register_adapter(adapter_of("a"), NOWHERE)
    other = renamed("b", "a")
    with pytest.raises(AdapterError, match="'a' is loaded from nowhere with other contents; unload it first"):
        engine.register_adapter(other, NOWHERE)
    engine.register_adapter(other, NOWHERE, replace=True)
    assert tokens(engine, "a") == tokens(engine_with(["b"]), "b")


def test_a_slot_keeps_the_adapters_that_were_used_last() -> None:
    executor = FakeExecutor(max_adapters=2, vocab_size=VOCAB_SIZE)
    engine = engine_with(["a", "b", "c"], executor)
    for name in ("a", "b", "a", "c", "a", "b"):
        tokens(engine, name)
    assert executor.num_adapter_loads == 4  # a, b, c instead of b, b instead of c


def test_a_request_waits_for_a_slot_and_others_go_on() -> None:
    engine = engine_with(["a", "b"], FakeExecutor(max_adapters=1, vocab_size=VOCAB_SIZE))
    engine.add(PROMPT, PLAIN, options=named("a"))
    engine.step()
    engine.add(PROMPT, PLAIN, options=RequestOptions(adapter="b", priority=-5))
    engine.step()
    metrics = engine.metrics()
    assert (metrics.num_running, metrics.num_waiting, metrics.num_yields) == (1, 1, 0)
    while engine.has_unfinished():
        engine.step()


def test_a_request_waits_for_memory_and_one_that_never_fits_is_refused() -> None:
    size = adapter_of("a").num_bytes
    executor = FakeExecutor(max_adapters=3, vocab_size=VOCAB_SIZE, adapter_bytes=2 * size)
    engine = engine_with(["a", "b", "c"], executor)
    for name in "abc":
        engine.add(PROMPT, PLAIN, options=named(name))
    engine.step()
    assert (engine.metrics().num_running, engine.metrics().num_waiting) == (2, 1)
    while engine.has_unfinished():
        engine.step()
    assert (engine.metrics().num_failed_steps, executor.num_adapter_loads) == (0, 3)
    folder_of_large = FakeExecutor(max_adapters=3, vocab_size=VOCAB_SIZE, adapter_bytes=size - 1)
    with pytest.raises(AdapterError, match="'a' does not fit the memory for adapters; raise adapter_bytes"):
        engine_with(["a"], folder_of_large)


def test_an_adapter_that_cannot_be_loaded_ends_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = FakeExecutor(max_adapters=2, vocab_size=VOCAB_SIZE)
    engine = engine_with(["a", "b"], executor)
    load = executor.load_adapter

    def fail(slot: int, adapter: Adapter) -> None:
        if adapter.name == "b":
            raise EngineError("no memory for it")
        load(slot, adapter)

    monkeypatch.setattr(executor, "load_adapter", fail)
    with pytest.raises(RequestFailed, match="no memory for it") as failed:
        engine.generate([PROMPT] * 3, PLAIN, options=[named("a"), named("b"), named(None)])
    first, second, third = failed.value.completions
    assert second.finish_reason == "error"
    assert first.token_ids == tokens(engine_with(["a"]), "a")
    assert third.token_ids == tokens(engine_with([]), None)
    engine.check()


@pytest.mark.parametrize("executor", [FakeExecutor(), FakeExecutor(max_adapters=0)])
def test_an_engine_without_adapters_says_which_has_them(executor: FakeExecutor) -> None:
    with pytest.raises(AdapterError, match=r"this engine computes none; .*cpu\.engine: native.*gpu\.adapters: true"):
        Engine(executor).load_adapter("a", "somewhere")


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 300])
def test_a_name_must_be_one(name: str) -> None:
    with pytest.raises(AdapterError, match="a name has 1 to 256 characters"):
        engine_with([]).load_adapter(name, "somewhere")


def test_an_adapter_of_a_request_is_a_text() -> None:
    with pytest.raises(RequestError, match="it must be the name of an adapter"):
        RequestOptions(adapter=3)  # type: ignore[arg-type]
