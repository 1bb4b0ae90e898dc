"""The layered fake executors: what a wrong layout, window, block or state changes, and what they refuse."""

from dataclasses import replace

import numpy as np
import pytest

from ingot.artifact import KVGeometry
from ingot.errors import EngineError
from ingot.runtime.executors import StatefulExecutor
from ingot.runtime.forward_batch import FloatArray, ForwardBatch
from tests.each_case import each_case
from tests.simulators.fake_executor import FakeExecutor
from tests.simulators.layered_executor import VARIANTS, LayeredExecutor
from tests.simulators.test_fake_executor import batch_of

TOKENS = [5, 6, 7, 8, 9, 10, 11, 12, 13]


def executor(layout: str) -> LayeredExecutor:
    return LayeredExecutor(layout, num_blocks=8, block_tokens=4, num_states=4)


def step(under_test: LayeredExecutor, tokens: list[int], start: int, table: list[int], slot: int = 0) -> FloatArray:
    batch = batch_of(tokens, start, table)
    if under_test.num_states:
        batch = replace(batch, state_slots=np.array([slot], np.int32))
    return under_test.forward(batch).copy()


def in_chunks(under_test: LayeredExecutor, table: list[int], chunk: int, tokens: list[int] = TOKENS) -> FloatArray:
    parts = [
        step(under_test, tokens[start : start + chunk], start, table, slot=table[0] % 4)
        for start in range(0, len(tokens), chunk)
    ]
    return np.concatenate(parts)


@each_case("layout", VARIANTS)
def test_chunks_tables_and_slots_do_not_change_a_bit(layout: str) -> None:
    whole = in_chunks(executor(layout), [0, 1, 2], 9)
    assert np.array_equal(whole, in_chunks(executor(layout), [6, 2, 5], 4))
    assert np.array_equal(whole, in_chunks(executor(layout), [3, 1, 0], 1))


@each_case("layout", VARIANTS)
def test_one_other_byte_of_a_block_that_is_read_changes_the_logits(layout: str) -> None:
    """Every byte of the layout is read by some layer, and those of layers with windows by late tokens no more."""
    under_test = executor(layout)
    in_chunks(under_test, [0, 1, 2], 9)
    state = under_test._state_pool.copy()
    right = step(under_test, [1], 9, [0, 1, 2])
    under_test._state_pool[:] = state
    last = under_test._blocks[2].copy()
    for byte in np.flatnonzero(last):
        under_test._blocks[2] = last
        under_test._blocks[2, byte] ^= 2
        under_test._state_pool[:] = state
        assert not np.array_equal(right, step(under_test, [1], 9, [0, 1, 2])) or byte_is_rewritten(
            under_test, int(byte)
        )


def byte_is_rewritten(under_test: LayeredExecutor, byte: int) -> bool:
    """Whether a byte of the third block belongs to its second token, number 9, which the step writes."""
    layers = [layer for number, layer in enumerate(under_test.kv_geometry.layers) if layer.source == number]
    before = under_test._blocks.copy()
    under_test._blocks[:] = 0
    for layer in layers:
        for run in under_test._runs(layer):
            run[2, :, 1] = 1
    found = bool(under_test._blocks[2, byte])
    under_test._blocks[:] = before
    return found


def test_a_token_does_not_see_what_its_window_hides() -> None:
    layout = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 2, "window": 3}
    under_test = LayeredExecutor(layout, num_blocks=8, block_tokens=4)
    step(under_test, TOKENS, 0, [0, 1, 2])
    right = step(under_test, [1], 9, [0, 1, 2])
    assert np.array_equal(right, step(under_test, [1], 9, [5, 1, 2])), "tokens 0 to 3 are hidden, even unwritten ones"
    with pytest.raises(EngineError, match="never written"):
        step(under_test, [1], 9, [0, 5, 2])


def test_the_state_depends_on_the_order_of_all_tokens() -> None:
    for tokens in ([6, 5, *TOKENS[2:]], [5, 6, 7, 8, 9, 10, 11, 13, 12]):
        whole, other = executor("side state"), executor("side state")
        in_chunks(whole, [0, 1, 2], 9)
        in_chunks(other, [0, 1, 2], 9, tokens)
        assert not np.array_equal(whole._state_pool[0], other._state_pool[0])


@pytest.mark.parametrize("layout", ["side state", "all"])
def test_a_wrong_or_stale_state_changes_the_logits(layout: str) -> None:
    under_test = executor(layout)
    in_chunks(under_test, [0, 1, 2], 9)
    under_test.copy_state(0, 1)
    right = step(under_test, [1], 9, [0, 1, 2], slot=1)
    under_test.copy_state(0, 2)
    assert np.array_equal(right, step(under_test, [1], 9, [0, 1, 2], slot=2))
    assert not np.array_equal(right, step(under_test, [1], 9, [0, 1, 2], slot=1)), "that slot is one token ahead"
    assert not np.array_equal(right, step(under_test, [1], 9, [0, 1, 2], slot=3)), "nothing was computed there"


def test_a_sequence_that_starts_does_not_read_what_its_slot_has() -> None:
    under_test = executor("side state")
    first = in_chunks(under_test, [0, 1, 2], 9)
    assert np.array_equal(first, in_chunks(under_test, [0, 1, 2], 9))


@pytest.mark.parametrize(
    ("slots", "message"),
    [(None, "state_slots are missing"), ([4], "a state slot is missing"), ([-1], "a state slot is missing")],
)
def test_a_batch_without_a_slot_for_each_sequence_is_refused(slots: list[int] | None, message: str) -> None:
    given = None if slots is None else np.array(slots, np.int32)
    with pytest.raises(EngineError, match=message):
        executor("side state").forward(replace(batch_of([1], 0, [0]), state_slots=given))


def test_two_sequences_in_one_slot_are_refused_and_so_are_slots_of_a_model_without_state() -> None:
    batch = ForwardBatch(
        input_ids=np.array([1, 2]),
        position_ids=np.array([0, 0]),
        logits_indices=np.array([0, 1]),
        query_starts=np.array([0, 1, 2], np.int32),
        context_lens=np.array([1, 1], np.int32),
        block_tables=np.array([[0], [1]], np.int32),
        state_slots=np.array([2, 2], np.int32),
    )
    with pytest.raises(EngineError, match="two sequences have one state slot"):
        executor("side state").forward(batch)
    with pytest.raises(EngineError, match="without side state got state slots"):
        executor("windows").forward(batch)


def test_only_executors_with_slots_are_stateful() -> None:
    assert isinstance(executor("side state"), StatefulExecutor)
    assert not isinstance(FakeExecutor(), StatefulExecutor)
    assert isinstance(executor("all").kv_geometry, KVGeometry)
