"""What still uses a block of the pool: found by block, newest first, and forgotten when the device has reached it."""

import numpy as np
import pytest

from ingot.runtime.cuda.block_uses import BlockUses
from ingot.runtime.forward_batch import Int32Array, Int64Array
from tests.simulators.interpreted_device import FakeStream, InterpretedDevice


def table(*rows: tuple[int, ...]) -> Int32Array:
    return np.array(rows, np.int32)


def blocks(*numbers: int) -> Int64Array:
    return np.array(numbers, np.int64)


@pytest.fixture
def device() -> InterpretedDevice:
    return InterpretedDevice()


@pytest.fixture
def compute(device: InterpretedDevice) -> FakeStream:
    return device.make_stream()


@pytest.fixture
def uses(device: InterpretedDevice, compute: FakeStream) -> BlockUses:
    return BlockUses(device, compute, 8)


def test_the_newest_step_that_uses_or_writes_a_block_is_found(uses: BlockUses) -> None:
    uses.add_step(table((0, 1), (2, -1)), blocks(1, 2))
    uses.add_step(table((0, 3)), blocks(3, 3))
    assert [work and work.number for work in map(uses.last_use, range(8))] == [2, 1, 1, 2, None, None, None, None]
    assert [work and work.number for work in map(uses.last_write, range(4))] == [None, 1, 1, 2]


def test_the_padding_of_tables_is_no_use_of_the_last_block(uses: BlockUses) -> None:
    uses.add_step(table((0, -1)), blocks(0))
    assert uses.last_use(7) is None


def test_tables_may_change_after_the_step_was_recorded(uses: BlockUses) -> None:
    tables = table((4, 5))
    uses.add_step(tables, blocks(5))
    tables[:] = 0
    assert uses.last_use(4) is not None
    assert uses.last_use(0) is None


def test_copies_before_a_step_are_marked_with_it_or_when_a_block_needs_them(
    uses: BlockUses, device: InterpretedDevice
) -> None:
    uses.add_copy(1, 2)
    uses.add_copy(3, 4)
    assert device.calls["record"] == 0
    found = uses.last_use(3)
    assert found is not None
    assert (found.is_marked, device.calls["record"]) == (True, 1)
    assert uses.last_write(3) is None
    uses.add_copy(3, 5)  # after the mark: work of its own
    newer = uses.last_use(3)
    assert newer is not None
    assert newer.number == 2
    uses.add_step(table((6,)), blocks(6))
    assert len(uses) == 3


def test_what_the_device_has_reached_is_forgotten_and_its_events_are_used_again(
    uses: BlockUses, device: InterpretedDevice
) -> None:
    for _ in range(5):
        uses.add_step(table((0,)), blocks(0))
        device.synchronize("a step")
    assert len(uses) == 1
    assert device.calls["make_event"] == 2
    uses.add_step(table((1,)), blocks(1))
    assert uses.last_use(0) is None
