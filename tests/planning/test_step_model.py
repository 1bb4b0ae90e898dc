"""A step's time is the sum of its terms, and the slowest resource binds each of them."""

import pytest

from ingot.planning.step_model import StepModel, StepShape, Term, Use

MODEL = StepModel(
    (
        Term("matmuls", (Use("memory", "steps", 0.01), Use("compute", "rows", 0.001))),
        Term("attention", (Use("memory", "context_tokens", 1e-6),)),
    ),
    "a test",
    0.1,
)


def test_the_slowest_resource_binds_a_term() -> None:
    few, many = StepShape(decode_rows=2, context_tokens=1000), StepShape(prefill_tokens=100)
    assert [(term.name, term.resource) for term in MODEL.terms(few)] == [("matmuls", "memory"), ("attention", "memory")]
    assert next(MODEL.terms(many)).resource == "compute"
    assert MODEL.seconds(few) == pytest.approx(0.011)
    assert MODEL.seconds(many) == pytest.approx(0.1)


def test_terms_add_up_to_the_seconds_inside_the_interval() -> None:
    step = StepShape(prefill_tokens=7, decode_rows=3, context_tokens=500)
    low, high = MODEL.interval(step)
    assert sum(term.seconds for term in MODEL.terms(step)) == MODEL.seconds(step)
    assert low < MODEL.seconds(step) < high


def test_rows_reach_experts_until_all_are_read() -> None:
    use = Use("memory", "rows", 1.0, ((1, 1 / 4),))
    assert use.of(StepShape(decode_rows=1)) == pytest.approx(1 / 4)
    assert use.of(StepShape(decode_rows=2)) == pytest.approx(7 / 16)
    assert use.of(StepShape(decode_rows=1000)) == pytest.approx(1)


def test_rows_reach_experts_as_counted_and_go_on_as_between_the_last_two_counts() -> None:
    use = Use("memory", "rows", 2.0, ((1, 1 / 4), (2, 1 / 4), (4, 5 / 8)))

    def left(rows: float) -> float:
        return 1 - use.of(StepShape(decode_rows=rows)) / 2.0

    expected = {0: 1, 0.5: (3 / 4) ** 0.5, 1: 3 / 4, 1.5: 3 / 4, 2: 3 / 4, 3: 3 / 4 / 2**0.5, 4: 3 / 8, 6: 3 / 16}
    assert {rows: left(rows) for rows in expected} == pytest.approx(expected)
