"""What counts of a load: the blocks before the first that did not arrive."""

import pytest

from ingot.runtime.kv.cost_model import TierName
from ingot.runtime.kv.keys import BlockContent, Tree
from ingot.runtime.kv.transfers.restored_prefix import LoadingBlock, RestoredPrefix


def load(*outcomes: bool | None, tiers: tuple[TierName, ...] = ()) -> RestoredPrefix:
    blocks = []
    for number, arrived in enumerate(outcomes):
        content = BlockContent(bytes([number]), b"root", b"tokens")
        tier: TierName = tiers[number] if tiers else "host"
        blocks.append(LoadingBlock(content, Tree(b"first", private=False), number, tier=tier, arrived=arrived))
    return RestoredPrefix(blocks)


@pytest.mark.parametrize(
    ("outcomes", "count"),
    [((True, True, True), 3), ((True, False, True), 1), ((False, True), 0), ((True, None, True), 1), ((), 0)],
)
def test_blocks_after_one_that_did_not_arrive_do_not_count(outcomes: tuple[bool | None, ...], count: int) -> None:
    found = load(*outcomes)
    assert [content.hash for content in found.contents()] == [bytes([number]) for number in range(count)]
    assert found.done == (None not in outcomes)


def test_tokens_are_counted_by_the_tier_that_had_them() -> None:
    found = load(True, True, False, True, tiers=("disk", "host", "host", "host"))
    assert found.cached_tokens(8, 4) == (8, 4, 4)
    assert found.cached_tokens(8, 4).total == 16
