"""Steps are compared with others of their composition, and with the time of their work."""

import numpy as np
import pytest
from benchmarks.kv.step_times import Step, Work, compare_steps, fit_work


def work(*tokens: int, context: int = 600) -> Work:
    return Work(np.array(tokens, np.int32), np.full(len(tokens), context, np.int32))


def test_steps_are_compared_with_others_of_their_composition() -> None:
    def steps(*seconds: float, tokens: int = 8, moved: bool = False) -> list[Step]:
        return [Step(each, work(*[1] * 7, tokens - 7), moved) for each in seconds]

    plain = [*steps(*[0.01] * 9), *steps(*[0.1] * 9, tokens=512)]
    tiered = [*steps(0.02, moved=True), *steps(0.1, 0.1, tokens=512), *steps(5.0, tokens=99, moved=True)]
    found = compare_steps(plain, tiered, plain)
    assert found["compositions"] == 2
    assert found["slowdown"]["tiers, blocks moved"] == {
        "steps": 1,
        "mean": 2.0,
        "p50": 2.0,
        "p90": 2.0,
        "p99": 2.0,
        "p100": 2.0,
    }
    assert found["slowdown"]["tiers, nothing moved"]["mean"] == 1.0
    assert found["p99_excess_while_blocks_move"] == 1.0
    moved = found["by_time"]["milliseconds"]["tiers, blocks moved"]
    assert moved["steps"] == 2, "the composition that is rare without tiers is not left out"
    assert moved["p100"] == 5000


def test_no_step_is_left_out_of_the_comparison_by_work() -> None:
    """Seconds that are linear in the work are found again, though some steps without tiers were disturbed."""
    rng = np.random.default_rng(0)
    each = np.array([1e-4, 2e-5, 3e-5, 1e-4, 2e-7, 4e-8])
    works = [
        work(*[1] * int(rng.integers(0, 8)), int(rng.integers(1, 500)), context=int(rng.integers(600, 900)))
        for _ in range(400)
    ]
    plain = [Step(float(one.terms @ each), one, moved=False) for one in works]
    disturbed = plain[:]
    disturbed[::40] = [step._replace(seconds=step.seconds * 9) for step in plain[::40]]
    assert fit_work(disturbed) == pytest.approx(each, rel=0.02)
    moved = [Step(3 * float(one.terms @ each), one, moved=True) for one in works[:3]]
    found = compare_steps(disturbed, moved, plain)["by_work"]
    assert found["slowdown"]["tiers, blocks moved"]["steps"] == 3
    assert found["slowdown"]["tiers, blocks moved"]["p50"] == pytest.approx(3, rel=0.02)
