"""Blocks move between pool and host memory on a side stream, in order with compute and without needless waits.

Each test runs on a device that works as late as allowed, and on one whose side streams work as early as allowed.
"""

import numpy as np
import pytest

from ingot.artifact import KVGeometry
from ingot.errors import EngineError
from ingot.runtime.cuda.host_blocks import HostBlocks
from ingot.runtime.cuda.kv_pool import DevicePool
from tests.runtime.cuda.batches import Growing, token_ids
from tests.runtime.cuda.conftest import MakeExecutor
from tests.simulators.interpreted_device import InterpretedDevice

KV = KVGeometry(num_layers=1, num_kv_heads=1, head_dim=4, block_tokens=2)
OLD, NEW, KEPT, FREE = range(4)


class Setting:
    """A pool of 4 blocks whose every byte is the block's number, and 2 slots of host memory."""

    def __init__(self, *, hasty: bool) -> None:
        self.device = InterpretedDevice(hasty=hasty)
        self.compute = self.device.make_stream()
        self.pool = DevicePool(self.device, self.compute, KV, 4)
        self.host = HostBlocks(self.device, self.compute, self.pool, 2)
        for block in range(4):
            self.pool.write_block(block, self.content(block))
        self.device.num_host_waits = 0

    def content(self, value: int) -> bytes:
        return bytes([value]) * KV.block_bytes

    def copy(self, source: int, target: int) -> None:
        """Read one block and write another, as a step does."""
        self.host.before_use([source], [target])
        self.pool.copy_block(source, target)


@pytest.fixture(params=[False, True], ids=["late", "hasty"])
def setting(request: pytest.FixtureRequest) -> Setting:
    return Setting(hasty=request.param)


def test_a_block_is_saved_before_it_is_overwritten_and_after_what_wrote_it(setting: Setting) -> None:
    setting.copy(KEPT, OLD)
    setting.host.save(OLD, 0)
    setting.copy(NEW, OLD)
    assert setting.device.num_host_waits == 0
    assert setting.host.read(0) == setting.content(KEPT)
    assert setting.pool.read_block(OLD) == setting.content(NEW)


def test_a_block_is_restored_before_it_is_read_and_after_its_former_owner_read_it(setting: Setting) -> None:
    setting.host.write(0, setting.content(9))
    setting.device.num_host_waits = 0
    setting.copy(OLD, KEPT)
    setting.host.restore(0, OLD)
    setting.copy(OLD, FREE)
    assert setting.device.num_host_waits == 0
    assert setting.pool.read_block(KEPT) == setting.content(OLD)
    assert setting.pool.read_block(FREE) == setting.content(9)


def test_a_slot_is_reused_in_the_order_of_the_calls(setting: Setting) -> None:
    setting.host.save(OLD, 0)
    setting.host.restore(0, FREE)
    setting.host.save(NEW, 0)
    setting.host.restore(0, KEPT)
    setting.host.before_use([FREE, KEPT], [])
    assert setting.pool.read_block(FREE) == setting.content(OLD)
    assert setting.pool.read_block(KEPT) == setting.content(NEW)
    assert setting.host.read(0) == setting.content(NEW)


def test_a_step_that_uses_no_moving_block_does_not_wait(setting: Setting) -> None:
    setting.host.save(OLD, 0)
    setting.host.restore(1, FREE)
    setting.copy(OLD, KEPT)  # may read a block that is being saved
    assert setting.compute.num_waits == 0
    setting.copy(FREE, OLD)
    assert setting.compute.num_waits == 2
    setting.copy(FREE, OLD)
    assert setting.compute.num_waits == 2
    assert not setting.host.pending


def test_missing_blocks_and_content_of_another_size_are_refused(setting: Setting) -> None:
    with pytest.raises(EngineError, match="slot 2 does not exist: host memory has 2"):
        setting.host.save(OLD, 2)
    with pytest.raises(EngineError, match="block 4 does not exist: the pool has 4"):
        setting.host.restore(0, 4)
    with pytest.raises(EngineError, match=f"slot 0 takes {KV.block_bytes} bytes, not 3"):
        setting.host.write(0, b"abc")
    with pytest.raises(EngineError, match=f"block 1 takes {KV.block_bytes} bytes, not 3"):
        setting.pool.write_block(1, b"abc")


@pytest.mark.parametrize("hasty", [False, True], ids=["late", "hasty"])
def test_a_sequence_resumes_from_blocks_that_were_saved_and_restored(make_executor: MakeExecutor, hasty: bool) -> None:
    ids, others = token_ids(6), token_ids(8, 1)
    executor = make_executor(InterpretedDevice(hasty=hasty))
    undisturbed = Growing([ids], [[10, 11]])
    executor.forward(undisturbed.step([5], "none"))
    wanted = executor.forward(undisturbed.step([1])).copy()
    host = executor.host_blocks(3)
    sequence = Growing([ids], [[0, 1]])
    executor.forward(sequence.step([5], "none"))
    host.save(0, 2)
    host.save(1, 0)
    executor.forward(Growing([others], [[1, 0]]).step([8], "none"))  # another sequence uses the blocks now
    host.restore(2, 7)
    host.restore(0, 4)
    sequence.tables = np.array([[7, 4]], np.int32)
    np.testing.assert_array_equal(executor.forward(sequence.step([1])), wanted)


def test_blocks_go_to_files_and_back(make_executor: MakeExecutor) -> None:
    executor = make_executor()
    executor.forward(Growing([token_ids(4)], [[3]]).step([4], "none"))
    content = executor.read_block(3)
    assert len(content) == executor.kv_geometry.block_bytes
    executor.write_block(5, content)
    executor.copy_block(5, 6)
    assert executor.read_block(6) == content != executor.read_block(4)
