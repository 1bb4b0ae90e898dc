"""Measured steps of an executor fit a model of them; the points stay within pool, context and limits."""

import numpy as np
import pytest

from ingot.errors import UsageError
from ingot.planning.measuring import as_hardware, measure, measure_steps
from ingot.planning.step_model import StepShape
from ingot.runtime.forward_batch import FloatArray, ForwardBatch
from tests.planning.shapes import dense_shape
from tests.simulators.fake_executor import FakeExecutor


class TimedExecutor(FakeExecutor):
    """Takes seconds of a clock of its own: 10 ms, 1 ms a token, 1 us for each token that is read."""

    now = 0.0

    def clock(self) -> float:
        return self.now

    def forward(self, batch: ForwardBatch) -> FloatArray:
        batch.check(self.max_batch_tokens, self.model.context_tokens)
        assert batch.block_tables.max() < self.num_blocks
        self.now += 0.01 + 0.001 * batch.num_tokens + 1e-6 * float(batch.context_lens.sum())
        return np.zeros((len(batch.logits_indices), self.model.vocab_size), np.float32)


def test_a_model_of_measured_steps_predicts_others() -> None:
    with_clock = TimedExecutor()
    model = measure(with_clock, clock=with_clock.clock)
    step = StepShape(decode_rows=3, context_tokens=3 * 20, num_sequences=3)
    assert model.seconds(step) == pytest.approx(0.01 + 0.003 + 60e-6, rel=0.1)
    assert "measured on this machine" in model.source


def test_there_are_8_to_24_points_within_the_seconds() -> None:
    executor = TimedExecutor()
    found = measure_steps(executor, seconds=0.0, clock=executor.clock)
    assert 8 <= len(found) <= 24
    assert all(one.seconds > 0 for one in found)


def test_a_pool_of_one_token_is_refused() -> None:
    with pytest.raises(UsageError, match="too few to measure different contexts"):
        measure_steps(FakeExecutor(num_blocks=1, block_tokens=1))


def test_this_machine_as_a_row_of_hardware() -> None:
    executor = TimedExecutor()
    model = measure(executor, clock=executor.clock)
    row = as_hardware(model, dense_shape(), 1e9, on_cpu=True)
    assert row.bandwidth == pytest.approx(dense_shape().matmul_bytes / 0.011, rel=0.1)
    assert row.sources == (model.source,)
