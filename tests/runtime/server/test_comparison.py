"""Engines are compared at equal load: both take requests, and a round counts where both have as many open."""

import asyncio
from collections.abc import Callable, Iterator

import pytest

from ingot.errors import IngotError
from ingot.runtime.async_engine import AsyncEngine
from ingot.runtime.prompts import TokenIds
from ingot.runtime.server import comparison
from ingot.runtime.server.comparison import Pace
from ingot.runtime.server.models import Models, ServedModel
from ingot.runtime.server.options import ServerOptions
from ingot.runtime.server.service import Service
from tests.runtime.engines import text_engine

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

    monkeypatch.setattr(comparison, "_pace", timed)


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
            asyncio.run(comparison.require_as_fast(*engines))
    else:
        asyncio.run(comparison.require_as_fast(*engines))


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
        comparing = asyncio.create_task(comparison.slowness(old, new))
        await asyncio.sleep(0)
        assert comparing.done() <= (num_new - num_old == 1)
        old.gate.num_open = new.gate.num_open = 32  # requests ended, and new ones went to the less busy engine
        return await comparing

    monkeypatch.setattr(comparison, "_LOOK_SECONDS", 0.0)
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
    monkeypatch.setattr(comparison, "_LOOK_SECONDS", 0.0)
    assert asyncio.run(comparison.slowness(old, new)) is None
    assert next(rounds) == 11


def test_a_broken_engine_is_replaced_without_its_times(engines: tuple[ServedModel, ServedModel]) -> None:
    old, new = engines
    asyncio.run(old.close())
    asyncio.run(comparison.require_as_fast(old, new))


def test_prompts_that_one_engine_cannot_complete_are_left_out(engines: tuple[ServedModel, ServedModel]) -> None:
    old, new = engines
    old.recent_prompts.extend([[new.engine.model.vocab_size], [1] * new.context_tokens])
    assert comparison._prompts(old, new) == [[1, 2, 3]]


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
