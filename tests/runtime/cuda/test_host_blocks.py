"""Blocks move between pool and host memory in order with compute, without needless waits and with few calls.

Most tests run on a device that works as late as allowed, on one whose side streams work as early as allowed, and on one
that runs on as chance has it.
"""

import random
from collections.abc import Callable, Sequence
from unittest.mock import patch

import numpy as np
import pytest

from ingot.artifact import KVGeometry
from ingot.errors import EngineError
from ingot.runtime.cuda import host_blocks
from ingot.runtime.cuda.block_uses import BlockUses
from ingot.runtime.cuda.host_blocks import BlockTransfer, PinnedBlocks
from ingot.runtime.cuda.kv_pool import DevicePool
from ingot.runtime.kv.transfers.transfer import Cancelled, Transfer
from tests.each_case import each_case
from tests.runtime.cuda.batches import Growing, token_ids
from tests.runtime.cuda.conftest import MakeExecutor
from tests.simulators.interpreted_device import InterpretedDevice

KV = KVGeometry(num_layers=1, num_kv_heads=1, head_dim=4, block_tokens=2)
OLD, NEW, KEPT, FREE = range(4)
MOST_POLLS = 10_000
DEVICES: dict[str, Callable[[], InterpretedDevice]] = {
    "late": InterpretedDevice,
    "hasty": lambda: InterpretedDevice(hasty=True),
    "random": lambda: InterpretedDevice(rng=random.Random(5)),
}


def still_moving(transfers: Sequence[Transfer]) -> list[Transfer]:
    """Poll all of them, as the tiers do."""
    return [transfer for transfer in transfers if not transfer.done]


def wait(*transfers: Transfer) -> None:
    for _ in range(MOST_POLLS):
        if not still_moving(transfers):
            return
    raise AssertionError("a transfer is never done")


class Setting:
    """A pool of blocks whose every byte is the block's number, and slots of host memory."""

    def __init__(self, device: InterpretedDevice, num_blocks: int = 4, num_slots: int = 2) -> None:
        self.device = device
        self.compute = self.device.make_stream()
        self.pool = DevicePool(self.device, self.compute, KV, num_blocks)
        self.host = PinnedBlocks(self.device, self.compute, self.pool, num_slots)
        for block in range(num_blocks):
            self.pool.write_block(block, self.content(block))
        self.device.num_host_waits = 0
        self.device.calls.clear()

    def content(self, value: int) -> bytes:
        return bytes([value]) * KV.block_bytes

    def step(self, source: int, target: int) -> None:
        """Queue a step that reads a block and writes its content, plus one, to another."""
        to, of = (self.device.view(self.pool.block(block), KV.block_bytes) for block in (target, source))
        self.device.queue(self.compute, lambda: np.copyto(to, of + 1))
        self.host.add_step(np.array([[source, target]], np.int32), np.array([target]))

    def copy(self, source: int, target: int) -> None:
        self.pool.copy_block(source, target)
        self.host.add_copy(source, target)


@pytest.fixture(params=DEVICES.values(), ids=list(DEVICES))
def setting(request: pytest.FixtureRequest) -> Setting:
    return Setting(request.param())


@pytest.fixture
def late() -> Setting:
    return Setting(InterpretedDevice(), num_blocks=16, num_slots=16)


def test_a_block_is_saved_after_the_step_that_wrote_it(setting: Setting) -> None:
    setting.step(KEPT, OLD)
    wait(setting.host.save(OLD, 0))
    assert setting.device.num_host_waits == 0
    assert setting.host.view(0).tobytes() == setting.content(KEPT + 1)


def test_a_block_is_saved_after_the_copy_that_wrote_it(setting: Setting) -> None:
    setting.copy(KEPT, OLD)
    wait(setting.host.save(OLD, 0))
    assert setting.host.view(0).tobytes() == setting.content(KEPT)


def test_a_block_is_restored_after_its_former_owner_used_it(setting: Setting) -> None:
    setting.host.view(0)[:] = 9
    setting.step(OLD, KEPT)
    setting.copy(OLD, NEW)
    wait(setting.host.restore(0, OLD))
    assert setting.device.num_host_waits == 0
    setting.step(OLD, FREE)
    assert setting.pool.read_block(KEPT) == setting.content(OLD + 1)
    assert setting.pool.read_block(NEW) == setting.content(OLD)
    assert setting.pool.read_block(FREE) == setting.content(10)


def test_copies_wait_for_no_step_that_does_not_matter_to_them(late: Setting) -> None:
    late.step(OLD, KEPT)
    wait(late.host.save(OLD, 0), late.host.restore(1, FREE))  # a step may read a block while it is saved
    assert late.device.calls["wait"] == 0
    assert len(late.compute.queue) == 2, "the step and its mark have not run"
    wait(late.host.save(KEPT, 2), late.host.restore(1, OLD))
    assert late.device.calls["wait"] == 2
    assert not late.compute.queue


def test_one_wait_serves_all_copies_that_need_the_same_step(late: Setting) -> None:
    for target in range(4, 8):
        late.copy(0, target)
    late.step(0, 8)
    wait(*[late.host.restore(block, block) for block in range(4, 8)], *[late.host.save(4, slot) for slot in (0, 1)])
    assert late.device.calls["wait"] == 2, "one of each direction"


def test_neighbours_are_one_call_and_a_poll_a_few_however_many_blocks_move(late: Setting) -> None:
    transfers = [late.host.save(block, block) for block in range(8)]
    transfers += [late.host.restore(slot, slot) for slot in range(8, 16)]
    assert late.device.calls == {"make_event": 4, "record": 2}
    late.device.calls.clear()
    assert still_moving(transfers) == transfers
    assert late.device.calls == {"copy_out": 1, "copy_in": 1, "record": 2, "reached": 2}, "one poll for all"
    wait(*transfers)
    late.device.calls.clear()
    wait(*[late.host.save(block, block) for block in range(8)])
    assert late.device.calls["make_event"] == 0, "events are used again"
    wait(*transfers)
    assert late.device.calls["seconds_between"] == 1


def test_blocks_and_slots_that_do_not_follow_each_other_are_copies_of_their_own(late: Setting) -> None:
    pairs = [(3, 5), (4, 6), (5, 8), (6, 7), (7, 8), (9, 9), (8, 10), (1, 11), (2, 12)]  # slot, block
    for slot, _ in pairs:
        late.host.view(slot)[:] = 100 + slot
    transfers = [late.host.restore(slot, block) for slot, block in pairs]
    late.step(0, 13)
    assert late.device.calls["copy_in"] == 6, "3 to 4, 5, 6 to 7, 9, 8 and 1 to 2 begin with the next step"
    wait(*transfers)
    for slot, block in pairs:
        if (slot, block) != (5, 8):  # slot 7 is restored to its block, too
            assert late.pool.read_block(block) == late.content(100 + slot)


def test_transfers_have_the_devices_time_divided_among_them(late: Setting) -> None:
    late.step(0, 1)
    alone = late.host.save(1, 0)
    wait(alone)
    several = [late.host.save(block, block) for block in range(4)]
    wait(*several)
    per_copy = alone.seconds
    assert per_copy > 0
    assert all(0 < each.seconds <= per_copy for each in several), "waiting for the step does not count"


def test_only_so_many_copies_are_begun_and_the_rest_can_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_blocks, "MOST_BEGUN_BYTES", 2 * KV.block_bytes)
    setting = Setting(InterpretedDevice(), num_blocks=8, num_slots=8)
    transfers = [setting.host.save(block, block) for block in range(6)]
    assert setting.device.calls["copy_out"] == 1, "of two neighbours"
    assert [transfer.cancel() for transfer in transfers] == [False, False, True, True, True, True]
    assert not transfers[2].cancel()
    assert all(isinstance(transfer.error, Cancelled) and transfer.done for transfer in transfers[2:])
    later = setting.host.save(7, 7)
    wait(*transfers, later)
    assert setting.device.calls["copy_out"] == 2
    assert [transfer.error for transfer in (*transfers[:2], later)] == [None] * 3
    assert setting.host.view(7).tobytes() == setting.content(7)


@pytest.mark.parametrize("direction", ["save", "restore"])
def test_copies_beyond_the_limit_begin_without_a_poll_when_the_device_has_made_room(
    monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    monkeypatch.setattr(host_blocks, "MOST_BEGUN", 2)
    setting = Setting(InterpretedDevice(), num_blocks=8, num_slots=8)
    copies = {"save": "copy_out", "restore": "copy_in"}[direction]
    for slot in range(8):
        setting.host.view(slot)[:] = 100 + slot
    transfers = [getattr(setting.host, direction)(number, number) for number in range(2)]
    setting.step(6, 7)
    setting.device.synchronize("the two copies")
    num_polls, num_queries = setting.host.num_polls, setting.device.calls["reached"]
    transfers += [getattr(setting.host, direction)(number, number) for number in range(2, 6)]
    assert setting.device.calls["reached"] == num_queries + 1, "however many are queued, the device is queried once"
    setting.step(6, 7)
    assert setting.device.calls[copies] == 2, "two of the four took the place of those that were complete"
    assert setting.host.num_polls == num_polls
    wait(*transfers)
    setting.device.synchronize("all copies")
    if direction == "restore":
        assert all(setting.pool.read_block(block) == setting.content(100 + block) for block in range(6))
    else:
        assert all(setting.host.view(slot).tobytes() == setting.content(slot) for slot in range(6))


def test_copies_beyond_the_limit_wait_while_those_before_them_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_blocks, "MOST_BEGUN", 2)
    setting = Setting(InterpretedDevice(), num_blocks=8, num_slots=8)
    transfers = [setting.host.restore(number, number) for number in range(7)]
    assert [transfer.begun for transfer in transfers].count(True) == 2
    assert setting.device.calls["copy_in"] == 1
    assert setting.device.calls["reached"] == 1
    assert not any(transfer.ended for transfer in transfers)
    setting.device.synchronize("the first two")
    setting.host.poll()
    assert [transfer.begun for transfer in transfers].count(True) == 4
    setting.step(0, 0)
    setting.device.synchronize("the next two")
    later = setting.host.restore(7, 7)
    assert [transfer.begun for transfer in transfers].count(True) == 6, "after a poll the device is queried again"
    assert not later.begun, "those that wait go first"
    wait(*transfers, later)


def test_closing_makes_queued_copies_and_is_idempotent(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_blocks, "MOST_BEGUN", 1)
    setting = Setting(setting.device, num_blocks=8, num_slots=8)
    setting.host.view(0)[:] = 7
    transfers = [setting.host.restore(0, block) for block in range(3)]
    view = setting.host.view(0)
    setting.host.close()
    setting.host.close()
    setting.host.poll()
    assert all(transfer.done and transfer.error is None for transfer in transfers)
    assert [setting.pool.read_block(block) for block in range(3)] == [setting.content(7)] * 3
    assert view.tobytes() == setting.content(7), "a view outlives the memory's owner"


def test_a_copy_that_the_driver_refuses_fails_with_its_neighbours_alone(
    late: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = late.device.copy_out

    def refuse(*arguments: object) -> None:
        raise EngineError("copying from the GPU: CUDA_ERROR_INVALID_VALUE")

    monkeypatch.setattr(late.device, "copy_out", refuse)
    failed = [late.host.save(0, 0), late.host.save(1, 1)]
    late.step(8, 9)
    monkeypatch.setattr(late.device, "copy_out", right)
    others = [late.host.save(3, 3), late.host.restore(2, 2)]
    wait(*failed, *others)
    assert all("INVALID_VALUE" in str(transfer.error) for transfer in failed)
    assert [other.error for other in others] == [None, None]
    late.host.check()


def test_a_lost_device_ends_all_transfers_and_is_reported(late: Setting) -> None:
    transfers = [late.host.save(0, 0), late.host.restore(1, 1)]
    late.device.lost = "an illegal address"
    wait(*transfers)
    assert all("an illegal address" in str(transfer.error) for transfer in transfers)
    with pytest.raises(EngineError, match=r"can no longer be copied .* an illegal address.*load the engine again"):
        late.host.check()
    after = late.host.save(3, 3)
    assert after.done
    assert after.error is not None
    late.host.close()
    late.host.close()


@pytest.mark.parametrize("call", ["record", "wait"])
def test_a_failing_call_of_the_driver_between_copies_is_reported(
    late: Setting, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*arguments: object) -> None:
        raise EngineError(f"{call} failed")

    late.step(0, 1)
    monkeypatch.setattr(late.device, call, fail)
    transfer = late.host.save(1, 1)
    assert transfer.done
    assert transfer.error is not None
    with pytest.raises(EngineError, match=f"{call} failed"):
        late.host.check()


def test_memory_that_cannot_be_had_is_refused_by_the_name_of_its_option() -> None:
    device = InterpretedDevice(pinned=1000)
    compute = device.make_stream()
    pool = DevicePool(device, compute, KV, 4)
    with pytest.raises(EngineError, match=r"100 KV blocks \(kv_host_bytes\).*page-locked"):
        PinnedBlocks(device, compute, pool, 100)
    with pytest.raises(EngineError, match=r"kv_host_bytes.* this machine has .*; give kv_host_bytes less"):
        PinnedBlocks(device, compute, pool, 1 << 50)


class RandomMoves:
    """Steps, copies, saves and restores at random, as the protocol allows them, and what they must lead to."""

    blocks, slots, operations = 6, 5, 60

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        is_hasty, runs_on = self.rng.random() < 0.5, self.rng.random() < 0.5
        device = InterpretedDevice(rng=random.Random(seed) if runs_on else None, hasty=is_hasty)
        self.setting = Setting(device, self.blocks, self.slots)
        self.pool = list(range(self.blocks))  # what each block holds when all that is queued has run
        self.host = [0] * self.slots
        self.setting.host.view(0)[:] = 0
        for slot in range(self.slots):
            self.setting.host.view(slot)[:] = 0
        self.saves: list[tuple[BlockTransfer, int, int, int]] = []  # transfer, block, slot, value
        self.restores: list[tuple[BlockTransfer, int, int, int]] = []

    def run(self) -> None:
        for _ in range(self.operations):
            self.rng.choice((self.step, self.step, self.copy, self.save, self.restore, self.poll))()
        while self.saves or self.restores:
            self.poll()
        self.setting.device.synchronize("the end")
        for block, value in enumerate(self.pool):
            assert self.setting.pool.read_block(block) == self.setting.content(value), f"block {block}"
        self.setting.host.check()

    @property
    def readable(self) -> list[int]:
        moving = {block for _, block, _, _ in self.restores}
        return [block for block in range(self.blocks) if block not in moving]

    @property
    def writable(self) -> list[int]:
        moving = {block for _, block, _, _ in self.saves}
        return [block for block in self.readable if block not in moving]

    def step(self) -> None:
        if self.writable:
            source, target = self.rng.choice(self.readable), self.rng.choice(self.writable)
            self.setting.step(source, target)
            self.pool[target] = (self.pool[source] + 1) % 256

    def copy(self) -> None:
        if self.writable:
            source, target = self.rng.choice(self.readable), self.rng.choice(self.writable)
            self.setting.copy(source, target)
            self.pool[target] = self.pool[source]

    def save(self) -> None:
        free = [slot for slot in range(self.slots) if slot not in self.used_slots]
        if free and self.readable:
            block, slot = self.rng.choice(self.readable), self.rng.choice(free)
            self.saves.append((self.setting.host.save(block, slot), block, slot, self.pool[block]))

    def restore(self) -> None:
        filled = [slot for slot in range(self.slots) if slot not in {slot for _, _, slot, _ in self.saves}]
        if filled and self.writable:
            block, slot = self.rng.choice(self.writable), self.rng.choice(filled)
            self.restores.append((self.setting.host.restore(slot, block), block, slot, self.host[slot]))

    @property
    def used_slots(self) -> set[int]:
        return {slot for _, _, slot, _ in (*self.saves, *self.restores)}

    def poll(self) -> None:
        for transfer, block, slot, value in self.saves[:]:
            if transfer.done:
                self.saves.remove((transfer, block, slot, value))
                assert transfer.error is None
                assert self.setting.host.view(slot).tobytes() == self.setting.content(value), f"slot {slot}"
                self.host[slot] = value
        for transfer, block, slot, value in self.restores[:]:
            if transfer.done:
                self.restores.remove((transfer, block, slot, value))
                self.pool[block] = value


SEEDS = range(60)


@each_case("seed", SEEDS)
def test_whatever_the_order_of_the_device_every_block_has_its_content(seed: int) -> None:
    RandomMoves(seed).run()


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (BlockUses, "last_use", lambda self, block: None),
        (BlockUses, "last_write", lambda self, block: None),
        (BlockUses, "add_copy", lambda self, source, target: None),
        (InterpretedDevice, "wait", lambda self, stream, event: None),
        (InterpretedDevice, "reached", lambda self, event: True),
    ],
    ids=["restore waits for no step", "save waits for no step", "copies forgotten", "no waits", "polls too early"],
)
def test_a_missing_wait_is_found(owner: type, name: str, wrong: Callable[..., object]) -> None:
    found = 0
    with patch.object(owner, name, wrong):
        for seed in SEEDS:
            try:
                RandomMoves(seed).run()
            except AssertionError:
                found += 1
    assert found


@pytest.mark.parametrize("name", list(DEVICES))
def test_a_sequence_resumes_from_blocks_that_were_saved_and_restored(make_executor: MakeExecutor, name: str) -> None:
    ids, others = token_ids(6), token_ids(8, 1)
    executor = make_executor(DEVICES[name]())
    undisturbed = Growing([ids], [[10, 11]])
    executor.forward(undisturbed.step([5], "none"))
    wanted = executor.forward(undisturbed.step([1])).copy()
    host = executor.host_blocks(3)
    sequence = Growing([ids], [[0, 1]])
    executor.forward(sequence.step([5], "none"))
    wait(host.save(0, 2), host.save(1, 0))
    executor.forward(Growing([others], [[1, 0]]).step([8], "none"))  # another sequence uses the blocks now
    executor.forward(Growing([others], [[7, 4]]).step([8], "none"))
    wait(host.restore(2, 7), host.restore(0, 4))
    sequence.tables = np.array([[7, 4]], np.int32)
    np.testing.assert_array_equal(executor.forward(sequence.step([1])), wanted)
    assert host.view(2).tobytes() == executor.read_block(7)


def test_blocks_go_to_files_and_back(make_executor: MakeExecutor) -> None:
    executor = make_executor()
    executor.forward(Growing([token_ids(4)], [[3]]).step([4], "none"))
    content = executor.read_block(3)
    assert len(content) == executor.kv_geometry.block_bytes
    executor.write_block(5, content)
    executor.copy_block(5, 6)
    assert executor.read_block(6) == content != executor.read_block(4)
