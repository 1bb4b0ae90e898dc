"""Which stored blocks are restored: those that tiers have of a prompt's prefix, as far as the cost model says."""

import logging
from collections.abc import Iterable, Mapping, Sequence

from ingot.runtime.kv.cost_model import BlockPlace, CostModel, TierName
from ingot.runtime.kv.keys import BlockContent, state_content
from ingot.runtime.kv.pool_tiers import PoolTiers

_log = logging.getLogger("ingot.runtime.kv.tiers")  # the name that the documentation gives


class PrefixChoice:
    """Chooses how much of a prefix to restore, and counts the choices. Its owner guards it with a lock."""

    def __init__(self, blocks: PoolTiers, states: PoolTiers | None, costs: CostModel) -> None:
        self._blocks, self._states, self._costs = blocks, states, costs
        self.num_restored = self.num_recomputed = 0  # prefixes

    def to_restore(self, following: Iterable[BlockContent], num_cached_tokens: int) -> list[BlockContent]:
        """The blocks to restore of those that follow a computed prefix."""
        found, tiers = self._find(following)
        if not found:
            return []
        states = self._states_after(content.hash for content in found)
        return found[: self._decide(tiers, num_cached_tokens, states)]

    def to_share(self, hashes: Sequence[bytes], count: int, num_cached_tokens: int) -> int:
        """How many blocks that are computed to share, where `count` of them have their state on the device."""
        states = self._states_after(hashes[count:])
        if not states:
            return count
        return count + self._decide(["device"] * (len(hashes) - count), num_cached_tokens, states)

    def _find(self, following: Iterable[BlockContent]) -> tuple[list[BlockContent], list[BlockPlace]]:
        """The leading blocks that are in a tier, and the tier of each."""
        found: list[BlockContent] = []
        tiers: list[BlockPlace] = []
        find = self._blocks.find
        for content in following:
            tier = find(content)
            if tier is None:
                break
            found.append(content)
            tiers.append(tier)
        return found, tiers

    def _states_after(self, keys: Iterable[bytes]) -> dict[int, TierName] | None:
        """After how many of these blocks a tier has the side state, and which; None for a model without."""
        if self._states is None:
            return None
        tiers = ((count, self._states.find(state_content(key))) for count, key in enumerate(keys, 1))
        return {count: tier for count, tier in tiers if tier}

    def _decide(
        self, tiers: Sequence[BlockPlace], num_cached_tokens: int, states: Mapping[int, TierName] | None
    ) -> int:
        decision = self._costs.decide(tiers, num_cached_tokens, states)
        if decision.num_blocks:
            self.num_restored += 1
        else:
            self.num_recomputed += 1
        _log.debug(
            "%d of %d stored blocks are restored after %d tokens on the device: %s",
            decision.num_blocks,
            len(tiers),
            num_cached_tokens,
            decision.reason,
        )
        return decision.num_blocks
