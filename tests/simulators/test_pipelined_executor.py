"""The fake executor that queues steps: it computes late, samples tokens, and refuses violations of the contract."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ingot.errors import EngineError
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.executors import PipelinedExecutor
from ingot.runtime.forward_batch import ForwardBatch, Int32Array, SamplingArrays
from ingot.runtime.requests.sampler import Sampler, sampling_arrays
from tests.each_case import each_case
from tests.simulators.fake_executor import FakeExecutor
from tests.simulators.pipelined_executor import FakePipelinedExecutor
from tests.simulators.test_fake_executor import batch_of

GREEDY = sampling_arrays([Sampler(SamplingParams(), [])], [0])
NONE = np.array([-1], np.int32)
FIRST = np.array([0], np.int32)


def executor() -> FakePipelinedExecutor:
    return FakePipelinedExecutor(num_blocks=8, block_tokens=4)


def decode(token: int, position: int) -> ForwardBatch:
    return batch_of([token], position, [0, 1])


def test_it_implements_the_pipelined_protocol_and_the_plain_one_does_not() -> None:
    assert isinstance(executor(), PipelinedExecutor)
    assert not isinstance(FakeExecutor(), PipelinedExecutor)


def test_a_carried_token_is_the_one_that_the_previous_step_sampled() -> None:
    plain, queued = FakeExecutor(num_blocks=8, block_tokens=4), executor()
    first = int(plain.forward(decode(7, 0)).argmax())
    second = int(plain.forward(decode(first, 1)).argmax())
    steps = [queued.submit(decode(7, 0), GREEDY, NONE), queued.submit(decode(0, 1), GREEDY, FIRST)]
    assert [step.tokens().tolist() for step in steps] == [[first], [second]]


def test_a_step_computes_when_it_is_read_and_arrays_are_copied_at_once() -> None:
    under_test, batch, carried = executor(), decode(7, 0), NONE.copy()
    step = under_test.submit(batch, GREEDY, carried)
    batch.input_ids[0], batch.block_tables[0, 0], carried[0] = 9, 5, 0
    copied_later = under_test.submit(decode(0, 1), GREEDY, FIRST)
    under_test.copy_block(0, 5)
    assert not step.computed
    assert step.tokens().tolist() == [FakeExecutor().forward(decode(7, 0)).argmax()]
    assert not copied_later.computed
    copied_later.tokens()
    moved = under_test.submit(replace(decode(0, 2), block_tables=np.array([[5]], np.int32)), GREEDY, FIRST)
    assert moved.tokens().tolist() != [-1], "the copy was made after both steps, so the history is there"


def test_a_sampled_token_is_that_of_the_host_sampler() -> None:
    params = SamplingParams(temperature=0.5, top_k=40, top_p=0.75, seed=3)
    sampler = Sampler(params, [])
    logits = FakeExecutor().forward(decode(7, 0))[0]
    for index in range(20):
        under_test = executor()
        step = under_test.submit(decode(7, 0), sampling_arrays([sampler], [index]), NONE)
        assert step.tokens().tolist() == [sampler.sample(logits, [0] * index).token_id]


@pytest.mark.parametrize("lost", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_has_no_token(lost: float, temperature: float) -> None:
    class LossyExecutor(FakePipelinedExecutor):
        def logits(self, batch: ForwardBatch) -> np.ndarray[Any, np.dtype[np.float32]]:
            logits = super().logits(batch)
            logits[0, 3] = lost
            return logits

    under_test = LossyExecutor()
    sampling = sampling_arrays([Sampler(SamplingParams(temperature=temperature), [])], [0])
    first = under_test.submit(decode(7, 0), sampling, NONE)
    after = under_test.submit(decode(0, 1), sampling, FIRST)
    assert first.tokens().tolist() == after.tokens().tolist() == [-1]


@each_case(
    ("batch", "carried", "message"),
    [
        (decode(0, 1), np.array([1], np.int32), "from a row that the step before does not have"),
        (decode(0, 1), np.array([-2], np.int32), "from a row that the step before does not have"),
        (decode(3, 1), FIRST, "already has a token id"),
        (decode(0, 2), FIRST, "does not follow the position"),
        (batch_of([0, 0], 1, [0]), np.array([0, 0], np.int32), "carried to two places"),
        (decode(0, 1), np.array([0, 0], np.int32), r"not \[T\] int32"),
        (decode(0, 1), np.array([0], np.int64), r"not \[T\] int32"),
        (decode(256, 1), NONE, "outside the vocabulary"),
    ],
)
def test_a_wrongly_carried_token_is_refused(batch: ForwardBatch, carried: Int32Array, message: str) -> None:
    under_test = executor()
    under_test.submit(decode(7, 0), GREEDY, NONE)
    sampling = sampling_arrays(
        [Sampler(SamplingParams(), [])] * len(batch.logits_indices), [0] * len(batch.logits_indices)
    )
    with pytest.raises(EngineError, match=message):
        under_test.submit(batch, sampling, carried)


@each_case(
    ("change", "message"),
    [
        ({"temperatures": np.array([-1], np.float32)}, "temperature"),
        ({"temperatures": np.zeros(1)}, r"temperatures are not \[1\] float32"),
        ({"top_ks": np.array([-1], np.int32)}, "top_k"),
        ({"top_ps": np.zeros(1, np.float32)}, "top_p"),
        ({"uniforms": np.ones(1, np.float32)}, "uniform"),
        ({"uniforms": np.zeros(2, np.float32)}, r"uniforms are not \[1\] float32"),
    ],
)
def test_sampling_parameters_out_of_range_are_refused(change: dict[str, Any], message: str) -> None:
    sampling: SamplingArrays = replace(GREEDY, **change)
    with pytest.raises(EngineError, match=message):
        executor().submit(decode(7, 0), sampling, NONE)


def test_forward_is_refused_while_a_step_is_in_flight_and_carries_no_token() -> None:
    under_test = executor()
    step = under_test.submit(decode(7, 0), GREEDY, NONE)
    with pytest.raises(EngineError, match="while a step is in flight"):
        under_test.forward(decode(1, 1))
    step.tokens()
    under_test.forward(decode(1, 1))
    with pytest.raises(EngineError, match="step before does not have"):
        under_test.submit(decode(0, 2), GREEDY, FIRST)


def test_the_step_that_failed_raises_its_error() -> None:
    under_test = executor()
    failing = under_test.submit(batch_of([7], 4, [2, 3]), GREEDY, NONE)  # the positions before were never written
    after = under_test.submit(decode(7, 0), GREEDY, NONE)
    assert after.tokens().tolist() == [FakeExecutor().forward(decode(7, 0)).argmax()]
    with pytest.raises(EngineError, match="never written"):
        failing.tokens()


def test_a_closed_executor_takes_and_computes_nothing() -> None:
    under_test = executor()
    step = under_test.submit(decode(7, 0), GREEDY, NONE)
    under_test.close()
    with pytest.raises(EngineError, match="closed"):
        step.tokens()
    with pytest.raises(EngineError, match="closed"):
        under_test.submit(decode(7, 0), GREEDY, NONE)
