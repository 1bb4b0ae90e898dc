"""Engines are compared by speed, at equal load, and by answers, on the same texts."""

import asyncio
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from ingot.artifact import Artifact, GateOutcome
from ingot.errors import IngotError
from ingot.runtime.asking.outputs import SampledToken, TokenLogprob
from ingot.runtime.asking.prompts import TokenIds
from ingot.runtime.hosting.async_engine import AsyncEngine
from ingot.runtime.server.models import swap_comparison
from ingot.runtime.server.models.served_models import Models, ServedModel
from ingot.runtime.server.models.swap_comparison import Pace
from ingot.runtime.server.options import ServerOptions
from ingot.runtime.server.service import Service
from tests.conftest import BuildArtifact
from tests.runtime.engines import sentencepiece_tokenizer, text_engine

OPTIONS = ServerOptions()
PRESENT = Pace(first=3.0, token=1.0)


def served() -> ServedModel:
    model = ServedModel("fake", AsyncEngine(text_engine()), OPTIONS)
    model.recent_prompts.append([1, 2, 3])
    return model


@pytest.fixture
def engines() -> Iterator[tuple[ServedModel, ServedModel]]:
    old, new = served(), served()
    yield old, new
    for model in (old, new):
        asyncio.run(model.close())


def with_paces(
    monkeypatch: pytest.MonkeyPatch, engines: tuple[ServedModel, ServedModel], pace: Callable[[bool], Pace]
) -> None:
    """Have a round's times given by whether they are of the new engine."""

    async def timed(engine: AsyncEngine, prompts: list[TokenIds]) -> Pace:
        assert prompts == [[1, 2, 3]]
        return pace(engine is engines[1].engine)

    monkeypatch.setattr(swap_comparison, "_pace", timed)


@pytest.mark.parametrize(("slow_rounds", "is_refused"), [(4, False), (5, True)])
@pytest.mark.parametrize(
    ("slow", "message"),
    [
        (Pace(3.0, 2.5), r"a token takes 2500\.00 ms, with the engine before 1000\.00 ms"),
        (Pace(7.0, 1.0), r"a first token takes 7000\.00 ms, with the engine before 3000\.00 ms"),
    ],
)
def test_a_new_artifact_is_refused_where_it_is_slow_in_every_round(
    monkeypatch: pytest.MonkeyPatch,
    engines: tuple[ServedModel, ServedModel],
    slow_rounds: int,
    is_refused: bool,
    slow: Pace,
    message: str,
) -> None:
    rounds = iter([slow] * slow_rounds + [Pace(4.0, 1.5)])
    with_paces(monkeypatch, engines, lambda is_new: next(rounds) if is_new else PRESENT)
    if is_refused:
        with pytest.raises(IngotError, match=message):
            asyncio.run(swap_comparison.require_as_fast(*engines))
    else:
        asyncio.run(swap_comparison.require_as_fast(*engines))


@pytest.mark.parametrize(
    ("factor", "is_slow"), [(1.0, False), (3.0, True)], ids=["the same artifact", "a slow artifact"]
)
@pytest.mark.parametrize(("num_old", "num_new"), [(0, 64), (64, 0), (3, 4)])
def test_load_changes_no_verdict(
    monkeypatch: pytest.MonkeyPatch,
    engines: tuple[ServedModel, ServedModel],
    factor: float,
    is_slow: bool,
    num_old: int,
    num_new: int,
) -> None:
    """A token takes as long as requests are open: quiet before and loaded after, the other way round, and balanced."""
    old, new = engines
    old.gate.num_open, new.gate.num_open = num_old, num_new

    def pace(is_new: bool) -> Pace:
        return Pace(1.0, (1 + new.gate.num_open) * factor if is_new else 1 + old.gate.num_open)

    with_paces(monkeypatch, engines, pace)

    async def compared() -> str | None:
        comparing = asyncio.create_task(swap_comparison.slowness(old, new))
        await asyncio.sleep(0)
        assert comparing.done() <= (num_new - num_old == 1)
        old.gate.num_open = new.gate.num_open = 32  # requests ended, and new ones went to the less busy engine
        return await comparing

    monkeypatch.setattr(swap_comparison, "_LOOK_SECONDS", 0.0)
    assert (asyncio.run(compared()) is not None) == is_slow


def test_a_round_whose_load_became_unequal_does_not_count(
    monkeypatch: pytest.MonkeyPatch, engines: tuple[ServedModel, ServedModel]
) -> None:
    old, new = engines
    rounds = iter(range(20))

    def pace(is_new: bool) -> Pace:
        if is_new and next(rounds) < 10:  # ten rounds in which requests arrive while the new engine is timed
            new.gate.num_open = 64
            asyncio.get_running_loop().call_soon(setattr, new.gate, "num_open", 0)
            return Pace(9.0, 9.0)
        return PRESENT

    with_paces(monkeypatch, engines, pace)
    monkeypatch.setattr(swap_comparison, "_LOOK_SECONDS", 0.0)
    assert asyncio.run(swap_comparison.slowness(old, new)) is None
    assert next(rounds) == 11


def test_a_broken_engine_is_replaced_without_its_times(engines: tuple[ServedModel, ServedModel]) -> None:
    old, new = engines
    asyncio.run(old.close())
    asyncio.run(swap_comparison.require_as_fast(old, new))


def test_prompts_that_one_engine_cannot_complete_are_left_out(engines: tuple[ServedModel, ServedModel]) -> None:
    old, new = engines
    old.recent_prompts.extend([[new.engine.model.vocab_size], [1] * new.context_tokens])
    assert swap_comparison._prompts(old, new) == [[1, 2, 3]]


def test_engines_that_share_a_model_take_requests_in_turn(engines: tuple[ServedModel, ServedModel]) -> None:
    old, new = engines
    models = Models([new])
    taken = []
    with models.shared(old, new):
        assert [*models.with_requests] == [new, old]
        for _ in range(5):
            taken.append(models.less_busy(new))
            taken[-1].gate.num_open += 1
        asyncio.run(old.close())
        assert models.less_busy(new) is new
    assert taken == [new, old, new, old, new]
    old.gate.num_open = 0
    assert models.less_busy(new) is new
    assert [*models.with_requests] == [new]


def test_requests_go_to_the_less_busy_engine_and_adapters_to_the_new_one(
    engines: tuple[ServedModel, ServedModel],
) -> None:
    old, new = engines
    service = Service(OPTIONS)
    service.models = Models([new])
    new.gate.num_open = 1
    with service.models.shared(old, new):
        assert asyncio.run(service.find_loaded("fake")) is old
        assert asyncio.run(service.find_loaded("fake", current=True)) is new
    assert asyncio.run(service.find_loaded("fake")) is new


def most_likely(probabilities: list[float], count: int) -> SampledToken:
    """The `count` most likely tokens of a distribution, as an engine reports them."""
    order = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])[:count]
    return SampledToken(0, 0.0, tuple(TokenLogprob(token, math.log(probabilities[token])) for token in order))


def exact(one: list[float], other: list[float]) -> float:
    return sum(p * math.log(p / q) for p, q in zip(one, other, strict=True))


DISTRIBUTION = st.lists(st.floats(1e-4, 1), min_size=12, max_size=12).map(
    lambda sizes: [each / sum(sizes) for each in sizes]
)


@given(DISTRIBUTION, DISTRIBUTION, st.integers(1, 12))
def test_a_divergence_by_the_most_likely_tokens_is_at_most_the_exact_one(
    one: list[float], other: list[float], count: int
) -> None:
    found = swap_comparison.divergence(most_likely(one, count), most_likely(other, count))
    assert 0 <= found <= exact(one, other) + 1e-9
    assert swap_comparison.divergence(most_likely(one, count), most_likely(one, count)) == pytest.approx(0, abs=1e-9)
    whole = swap_comparison.divergence(most_likely(one, 12), most_likely(other, 12))
    assert whole == pytest.approx(exact(one, other), abs=1e-6)


def test_distributions_whose_most_likely_tokens_differ_diverge() -> None:
    sharp = [0.97, *[0.03 / 99] * 99]
    assert swap_comparison.divergence(most_likely(sharp, 4), most_likely(sharp[::-1], 4)) > 3


def gate(name: str, limit: float, *, advisory: bool = False) -> GateOutcome:
    return GateOutcome(
        name=name, verdict="PASS", measured=0, low=0, high=0, limit=limit, bound="max", advisory=advisory
    )


def test_artifacts_may_differ_as_far_as_their_gates_allow(int8: Artifact) -> None:
    def with_gates(*gates: GateOutcome) -> Artifact:
        return Artifact(int8.path, int8.manifest.model_copy(update={"gates": gates}))

    strict, other = with_gates(gate("kl_mean", 0.01)), with_gates(gate("perplexity_ratio", 3.0))
    advisory, lax = with_gates(gate("kl_mean", 9.0, advisory=True)), with_gates(gate("kl_mean", 50.0))
    assert swap_comparison.most_divergence(strict, strict) == pytest.approx(0.02)
    for unmeasured in (other, None):
        assert swap_comparison.most_divergence(strict, unmeasured) == pytest.approx(0.11)
    assert swap_comparison.most_divergence(strict, advisory) == pytest.approx(0.11)
    assert swap_comparison.most_divergence(strict, lax) == pytest.approx(0.26), (
        "a gate that allows everything does not count"
    )


@pytest.fixture(scope="module")
def int8(build_unmeasured: BuildArtifact, two_layers: Path) -> Artifact:
    return build_unmeasured("int8-cpu", two_layers)


@pytest.fixture(scope="module")
def permuted(build_unmeasured: BuildArtifact, two_layers: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """The same model with its two layers in the wrong order."""
    checkpoint = tmp_path_factory.mktemp("permuted") / two_layers.name
    shutil.copytree(two_layers, checkpoint)
    tensors = load_file(checkpoint / "model.safetensors")
    swapped = {".layers.0.": ".layers.1.", ".layers.1.": ".layers.0."}
    renamed = {
        next((name.replace(old, new) for old, new in swapped.items() if old in name), name): np.ascontiguousarray(array)
        for name, array in tensors.items()
    }
    save_file(renamed, checkpoint / "model.safetensors")
    return build_unmeasured("int8-cpu", checkpoint)


@contextmanager
def loaded(*artifacts: Artifact) -> Iterator[list[ServedModel]]:
    models = [ServedModel("model", AsyncEngine.load(each), OPTIONS, each) for each in artifacts]
    try:
        yield models
    finally:
        for model in models:
            asyncio.run(model.close())


@pytest.mark.parametrize("texts", [[], ["import os\n"], ["def read(path):\n" * 40, "class A:\n    pass\n", "x"]])
def test_a_permuted_layer_is_found_and_another_quantization_is_not(
    int8: Artifact, permuted: Artifact, build_unmeasured: BuildArtifact, two_layers: Path, texts: list[str]
) -> None:
    int4 = build_unmeasured("int4-cpu", two_layers, "passes.quantize-weights.block_size=32")
    with loaded(int8, int4, permuted) as (served_model, quantized, wrong):
        served_model.recent_prompts.extend(served_model.tokenizer.encode(text) for text in texts)
        assert asyncio.run(swap_comparison.change_of_answers(served_model, quantized)) is None
        change = asyncio.run(swap_comparison.change_of_answers(served_model, wrong))
        assert change
        assert "tokens of 8 texts, and at most 0.2 is allowed" in change


def test_models_with_other_vocabularies_cannot_be_compared(engines: tuple[ServedModel, ServedModel]) -> None:
    old, new = engines
    new.tokenizer = sentencepiece_tokenizer()
    found = asyncio.run(swap_comparison.change_of_answers(old, new))
    assert found
    assert "another vocabulary" in found
