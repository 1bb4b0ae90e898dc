"""The start-up check finds the padding that makes rows independent of each other, and warns when none does."""

import logging
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from ingot.artifact import ModelFacts, Program, SegmentStep, ValueFacts
from ingot.runtime.cpu.batch_invariance import RowFinding, find_row_multiple
from ingot.runtime.cpu.buffers import ValueBuffers
from ingot.runtime.cpu.segment_runner import SegmentRunner

MODEL = ModelFacts(family="test", num_layers=1, hidden_size=4, vocab_size=50, context_tokens=100, num_parameters=1)
STEP = SegmentStep(file="program/segment-000.onnx", inputs=("input_ids", "logits_indices"), outputs=("logits",))
PROGRAM = Program(
    steps=(STEP,),
    values={
        "input_ids": ValueFacts(dtype="int64", rows="tokens", columns=0),
        "logits_indices": ValueFacts(dtype="int64", rows="logits", columns=0),
        "logits": ValueFacts(dtype="float32", rows="logits", columns=4),
    },
)


class DependentSegment(SegmentRunner):
    """A segment whose last row changes in its last bit when `depends(rows)`; it runs without onnxruntime."""

    def __init__(self, buffers: ValueBuffers, depends: Callable[[int], bool]) -> None:
        self.step = STEP
        self._buffers, self._depends = buffers, depends
        self.row_counts: set[int] = set()

    def bind(self, tokens: int, logits: int) -> Callable[[], None]:
        return lambda: self._run(tokens, logits)

    def _run(self, tokens: int, logits: int) -> None:
        self.row_counts.add(tokens)
        chosen = self._buffers.integers("input_ids")[self._buffers.integers("logits_indices")[:logits]]
        rows = np.sqrt(chosen[:, None] + np.arange(1, 5)).astype(np.float32)
        if self._depends(tokens):
            rows[-1] = np.nextafter(rows[-1], np.float32(np.inf))
        self._buffers.floats("logits")[:logits] = rows


def find(depends: Callable[[int], bool], token_rows: int = 512) -> tuple[RowFinding, Sequence[int]]:
    buffers = ValueBuffers(PROGRAM, token_rows)
    segment = DependentSegment(buffers, depends)
    return find_row_multiple([segment], buffers, MODEL), sorted(segment.row_counts)


def test_independent_rows_need_no_padding() -> None:
    finding, counts = find(lambda rows: False)
    assert finding.row_multiple == 1
    assert finding.batch_invariant
    assert counts == [1, 2, 3, 4, 5, 7, 8, 16, 33, 64]


@pytest.mark.parametrize("multiple", [2, 4, 8, 16])
def test_the_smallest_multiple_that_helps_is_chosen_and_logged(multiple: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    finding, _ = find(lambda rows: rows % multiple != 0)
    assert finding.row_multiple == multiple
    assert finding.batch_invariant
    assert "segment-000.onnx with" in finding.reason
    assert f"rows are padded to a multiple of {multiple}" in caplog.text


def test_rows_that_no_padding_makes_independent_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    finding, _ = find(lambda rows: rows < 40)
    assert (finding.row_multiple, finding.batch_invariant) == (1, False)
    assert "no padding makes rows independent" in finding.reason
    assert caplog.records[-1].levelno == logging.WARNING


def test_row_counts_beyond_the_largest_batch_are_not_tried() -> None:
    finding, counts = find(lambda rows: False, token_rows=16)
    assert finding.row_multiple == 1
    assert counts[-1] == 16
