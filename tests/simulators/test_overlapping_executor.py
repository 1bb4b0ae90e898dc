"""An engine on a fake executor with stages keeps them all at work, and gets the tokens of one without."""

from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.engine.engine import Engine
from ingot.runtime.executors import OverlappingExecutor
from tests.simulators.fake_executor import FakeExecutor
from tests.simulators.overlapping_executor import FakeOverlappingExecutor

PROMPTS = [[number, 7, 9] for number in range(12)]


def test_every_stage_has_a_step_and_the_tokens_are_those_of_steps_one_by_one() -> None:
    params = SamplingParams(max_tokens=20, temperature=0.7, seed=3)
    overlapping = FakeOverlappingExecutor()
    assert isinstance(overlapping, OverlappingExecutor)
    assert not isinstance(FakeExecutor(), OverlappingExecutor)
    with Engine(FakeExecutor()) as plain, Engine(overlapping) as engine:
        expected = [each.token_ids for each in plain.generate(PROMPTS, params)]
        assert [each.token_ids for each in engine.generate(PROMPTS, params)] == expected
        assert overlapping.most_in_flight == overlapping.num_at_once
        assert engine.metrics().num_steps > 2 * plain.metrics().num_steps
