"""Requests that do not fit wait, and times follow Little's law."""

import pytest

from ingot.planning.latency import predict, predict_static, sweep
from ingot.planning.load import Load
from ingot.planning.simulation.replica import Replica, serve
from ingot.planning.step_model import StepModel, Term, Use
from ingot.runtime.options import EngineOptions
from tests.each_case import each_case
from tests.planning.simulation.engines import request, shape_of

MODEL = StepModel(
    (
        Term("step", (Use("memory", "steps", 0.01),)),
        Term("rows", (Use("compute", "decode_rows", 0.001),)),
        Term("prefill", (Use("compute", "prefill_tokens", 0.0001),)),
    ),
    "a test",
    0.1,
)


def test_times_of_a_load_that_fits() -> None:
    found = predict(MODEL, Load(4, 100, 10), 8)
    assert found.itl == pytest.approx(0.014)
    assert found.tpot == pytest.approx(0.014 + 0.0001 * 4 * 100 / 10)
    assert found.ttft == pytest.approx(0.01 + 0.003 + 0.01)
    assert found.tokens_per_second == pytest.approx(4 / found.tpot)
    assert found.upper["tpot"] == pytest.approx(1.1 * found.tpot)


def test_requests_beyond_what_fits_wait() -> None:
    fits, waits = predict(MODEL, Load(8, 100, 10), 8), predict(MODEL, Load(24, 100, 10), 8)
    assert waits.tpot == fits.tpot
    assert waits.requests_per_second == fits.requests_per_second
    # Little: N = X W, where a place is free as soon as a request ends
    assert waits.end_to_end == pytest.approx(24 / 8 * fits.end_to_end)


def test_a_sweep_ends_with_what_fits() -> None:
    assert [one.load.concurrency for one in sweep(MODEL, Load(), 12.7)] == [1, 2, 4, 8, 12]


@each_case("longest", [1, 4])
def test_closed_batches_are_as_fast_as_the_simulated_scheduler_makes_them(longest: int) -> None:
    """Of eight outputs, one is the longest: the mean times `longest`; batches of eight follow each other."""
    mean, model = (
        64,
        StepModel((Term("step", (Use("overhead", "steps", 5e-3), Use("overhead", "rows", 1e-4))),), "", 0.0),
    )
    others = round(mean * (8 - longest) / 7)
    outputs = [mean * longest, *[others] * 7] * 4
    shape = shape_of(max_sequences=8, max_batch_tokens=4096)
    replica = Replica(shape, model, EngineOptions(batching="static"))
    ended = list(serve(replica, [request(0.0, 16, output, line) for line, output in enumerate(outputs, 1)]))
    seconds = max(each.completion.metrics.finish_seconds for each in ended if each.completion)
    found = predict_static(model, Load(8, 16, mean), 8, longest)
    assert sum(outputs) / seconds == pytest.approx(found.tokens_per_second, rel=0.03)
    assert found.end_to_end == pytest.approx(found.batch_seconds)
