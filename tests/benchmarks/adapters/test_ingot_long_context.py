"""The executor that computes the beginning of a prompt and copies it."""

from types import SimpleNamespace

import numpy as np
import pytest
from benchmarks.adapters.ingot_long_context import CopyingExecutor, copies

from ingot.runtime.cpu.executor import OnnxRuntimeExecutor
from ingot.runtime.forward_batch import FloatArray, ForwardBatch

COMPUTED = 16  # two blocks of 8
TABLE = [5, 2, 7, 0, 3]
VOCAB = 50


class RecordingExecutor(CopyingExecutor):
    """Without sessions and threads, which would be those of the whole test process; records copies."""

    def __init__(self) -> None:
        self._computed_tokens = COMPUTED
        self.copied: list[tuple[int, int]] = []
        self.kv_geometry = SimpleNamespace(block_tokens=8)  # type: ignore[assignment]
        self.model = SimpleNamespace(vocab_size=VOCAB)  # type: ignore[assignment]

    def copy_block(self, source: int, target: int) -> None:
        self.copied.append((source, target))


def run(begin: int, end: int, monkeypatch: pytest.MonkeyPatch) -> tuple[FloatArray, list[tuple[int, int]]]:
    """Logits of the last of these positions, which are ones where they are computed; and the copies."""
    count = end - begin
    batch = ForwardBatch(
        input_ids=np.ones(count, np.int64),
        position_ids=np.arange(begin, end),
        logits_indices=np.array([count - 1]),
        query_starts=np.array([0, count], np.int32),
        context_lens=np.array([end], np.int32),
        block_tables=np.array([TABLE], np.int32),
    )
    monkeypatch.setattr(OnnxRuntimeExecutor, "forward", lambda *_: np.ones((1, VOCAB), np.float32))
    executor = RecordingExecutor()
    return executor.forward(batch), executor.copied


def test_computed_blocks_repeat_in_order() -> None:
    assert list(copies(TABLE, range(2, 5), 2)) == [(5, 7), (2, 0), (5, 3)]


@pytest.mark.parametrize(("begin", "end"), [(0, 16), (8, 24), (33, 34)], ids=["beginning", "across", "one token"])
def test_the_beginning_and_single_tokens_are_computed(begin: int, end: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, copied = run(begin, end, monkeypatch)
    assert logits.all()
    assert copied == []


def test_later_chunks_are_copies_with_finite_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, copied = run(16, 33, monkeypatch)
    assert logits.shape == (1, VOCAB)
    assert not logits.any()
    assert copied == [(5, 7), (2, 0), (5, 3)]
