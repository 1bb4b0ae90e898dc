"""The fake executor: its logits depend on the token history alone, and it refuses invalid batches."""

from dataclasses import replace

import numpy as np
import pytest

from ingot.errors import EngineError
from ingot.runtime.forward_batch import FloatArray, ForwardBatch
from tests.each_case import each_case
from tests.simulators.fake_executor import FakeExecutor


def batch_of(tokens: list[int], start: int, table: list[int]) -> ForwardBatch:
    """A step of one sequence: `tokens` at positions start and following."""
    end = start + len(tokens)
    return ForwardBatch(
        input_ids=np.array(tokens, np.int64),
        position_ids=np.arange(start, end, dtype=np.int64),
        logits_indices=np.arange(len(tokens), dtype=np.int64),
        query_starts=np.array([0, len(tokens)], np.int32),
        context_lens=np.array([end], np.int32),
        block_tables=np.array([table], np.int32),
    )


def logits_of(tokens: list[int], table: list[int], chunk: int) -> FloatArray:
    executor = FakeExecutor(num_blocks=8, block_tokens=4)
    parts = [
        executor.forward(batch_of(tokens[start : start + chunk], start, table))
        for start in range(0, len(tokens), chunk)
    ]
    return np.concatenate(parts)


def test_chunks_and_tables_do_not_change_a_bit() -> None:
    tokens = [5, 6, 7, 8, 9, 10, 11]
    whole = logits_of(tokens, [0, 1], 7)
    assert np.array_equal(whole, logits_of(tokens, [6, 2], 3))
    assert np.array_equal(whole, logits_of(tokens, [1, 0], 1))
    assert whole.dtype == np.float32
    assert np.abs(whole).max() <= 8


def test_order_and_content_of_the_history_change_the_logits() -> None:
    last = [logits_of(tokens, [0, 1], 7)[-1] for tokens in ([1, 2, 3, 4], [2, 1, 3, 4], [1, 2, 3, 5], [0, 2, 3, 4])]
    for index, row in enumerate(last):
        assert not any(np.array_equal(row, other) for other in last[index + 1 :])


def test_a_wrong_block_table_changes_the_logits() -> None:
    executor = FakeExecutor(num_blocks=8, block_tokens=4)
    executor.forward(batch_of([1, 2, 3, 4], 0, [0]))
    executor.forward(batch_of([9, 9, 9, 9], 0, [1]))
    right = executor.forward(batch_of([5], 4, [0, 2])).copy()
    assert not np.array_equal(right, executor.forward(batch_of([5], 4, [1, 2])))


def test_a_copied_block_reads_like_its_source() -> None:
    executor = FakeExecutor(num_blocks=8, block_tokens=4)
    executor.forward(batch_of([1, 2, 3], 0, [0]))
    executor.copy_block(0, 5)
    right = executor.forward(batch_of([4], 3, [0])).copy()
    assert np.array_equal(right, executor.forward(batch_of([4], 3, [5])))


@each_case(
    ("change", "message"),
    [
        ({"position_ids": np.array([1, 2], np.int64)}, "positions"),
        ({"input_ids": np.array([1, 256], np.int64)}, "vocabulary"),
        ({"logits_indices": np.array([1, 0], np.int64)}, "ascend"),
        ({"logits_indices": np.array([2], np.int64)}, "logits row"),
        ({"block_tables": np.array([[-1]], np.int32)}, "block is missing"),
        ({"query_starts": np.array([0, 1], np.int32)}, "span"),
    ],
)
def test_a_batch_that_violates_the_contract_is_refused(change: dict[str, object], message: str) -> None:
    batch = replace(batch_of([1, 2], 0, [3]), **change)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match=message):
        FakeExecutor(num_blocks=8, block_tokens=4).forward(batch)


def test_reading_a_position_that_was_never_written_raises() -> None:
    with pytest.raises(EngineError, match="never written"):
        FakeExecutor(num_blocks=8, block_tokens=4).forward(batch_of([1], 3, [0]))
