"""Tiers: examples of the policy, then random use, with the moves made on model stores."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.runtime.kv.tiers import DEVICE, Move, Tier, TierManager

BLOCK_BYTES = 1000
HOST = Tier("host", 2, write_bandwidth=1e6, read_bandwidth=2e6)
DISK = Tier("disk", 2, write_bandwidth=1e4, read_bandwidth=1e5, latency_seconds=0.001)


def name(number: int) -> bytes:
    return bytes([number])


def places(moves: tuple[Move, ...]) -> list[tuple[int, str, str | None]]:
    return [(move.hash[0], move.source, move.target) for move in moves]


def test_evicted_blocks_move_to_the_host_then_to_disk_and_are_dropped_last() -> None:
    manager = TierManager([HOST, DISK], block_bytes=BLOCK_BYTES)
    assert places(manager.save(name(1))) == [(1, DEVICE, "host")]
    manager.save(name(2))
    assert places(manager.save(name(3))) == [(1, "host", "disk"), (3, DEVICE, "host")]
    manager.save(name(4))
    assert places(manager.save(name(5))) == [(1, "disk", None), (3, "host", "disk"), (5, DEVICE, "host")]


def test_saving_a_stored_block_again_only_makes_it_the_newest() -> None:
    manager = TierManager([HOST, DISK], block_bytes=BLOCK_BYTES)
    manager.save(name(1))
    manager.save(name(2))
    assert manager.save(name(1)) == ()
    assert places(manager.save(name(3)))[0] == (2, "host", "disk")


def test_a_block_that_was_restored_from_disk_moves_up_when_it_is_evicted_again() -> None:
    manager = TierManager([HOST, DISK], block_bytes=BLOCK_BYTES)
    for number in (1, 2, 3):
        manager.save(name(number))
    assert manager.locate(name(1)) is DISK
    assert places(manager.save(name(1))) == [(1, "disk", None), (2, "host", "disk"), (1, DEVICE, "host")]


def test_costs_follow_bandwidth_and_latency() -> None:
    manager = TierManager([HOST, DISK], block_bytes=BLOCK_BYTES)
    for number in (1, 2):
        manager.save(name(number))
    down, write = manager.save(name(3))
    assert write.seconds == pytest.approx(0.001)
    assert down.seconds == pytest.approx(0.0005 + 0.001 + 0.1)
    (load,) = manager.restore([name(1)], compute_seconds=1).moves
    assert (load.source, load.num_bytes) == ("disk", BLOCK_BYTES)
    assert load.seconds == pytest.approx(0.011)


def test_only_a_whole_prefix_that_loads_faster_than_it_computes_is_restored() -> None:
    manager = TierManager([HOST, DISK], block_bytes=BLOCK_BYTES)
    for number in (1, 2, 3):
        manager.save(name(number))  # 1 on disk, 2 and 3 in host memory
    chain = [name(1), name(2), name(3)]
    assert manager.restore(chain, compute_seconds=0.002).moves == ()
    plan = manager.restore(chain, compute_seconds=0.005)
    assert [move.hash for move in plan.moves] == chain
    assert plan.saved_seconds == pytest.approx(3 * 0.005 - 0.011 - 2 * 0.0005)
    assert manager.restore([name(9), *chain], compute_seconds=1).moves == ()


TIERS = st.lists(
    st.tuples(st.integers(1, 4), st.floats(1, 1e6), st.floats(1, 1e6), st.floats(0, 1)), min_size=1, max_size=3
)
SAVE = st.tuples(st.just("save"), st.lists(st.integers(0, 12), min_size=1, max_size=1))
RESTORE = st.tuples(st.just("restore"), st.lists(st.integers(0, 12), unique=True, max_size=6))


@settings(max_examples=200, deadline=None)
@given(TIERS, st.lists(st.one_of(SAVE, RESTORE), max_size=40), st.floats(0, 1))
def test_moves_made_in_order_never_overfill_a_store_nor_miss_a_block(
    rows: list[tuple[int, float, float, float]], operations: list[tuple[str, list[int]]], compute_seconds: float
) -> None:
    tiers = [Tier(f"tier {index}", *row) for index, row in enumerate(rows)]
    manager = TierManager(tiers, block_bytes=BLOCK_BYTES)
    stores: dict[str, set[bytes]] = {tier.name: set() for tier in tiers}
    for operation, numbers in operations:
        chain = [name(number) for number in numbers]
        if operation == "save":
            moves = manager.save(chain[0])
        else:
            plan = manager.restore(chain, compute_seconds=compute_seconds)
            moves = plan.moves
            assert [move.hash for move in moves] == chain[: len(moves)]
            assert plan.saved_seconds >= 0
        for move in moves:
            carry_out(move, stores)
            assert all(len(stores[tier.name]) <= tier.capacity_blocks for tier in tiers)
        manager.check()
        for number in range(13):
            tier = manager.locate(name(number))
            assert [other.name for other in tiers if name(number) in stores[other.name]] == (
                [tier.name] if tier else []
            )
        if operation == "save":
            assert manager.locate(chain[0]) is tiers[0]


def carry_out(move: Move, stores: dict[str, set[bytes]]) -> None:
    assert move.seconds >= 0
    if move.source != DEVICE:
        assert move.hash in stores[move.source], "the block is not where the move says"
    if move.target == DEVICE:
        return
    if move.source != DEVICE:
        stores[move.source].remove(move.hash)
    if move.target is not None:
        stores[move.target].add(move.hash)
