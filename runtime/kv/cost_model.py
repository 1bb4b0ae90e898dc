"""Whether to restore stored blocks or to compute them: measured seconds of both, for one engine on one machine.

A restored prefix must be whole, so the leading blocks are restored for which the sum of what they save is largest. A
slow block is restored where the blocks after it make up for it. With side state, a prefix can only end where its state
is stored, which is restored too. Seconds are running averages of real transfers and steps; those of the tiers begin
with a short measurement at load. Until a prompt was computed, restoring is assumed to be faster. With the rule "always"
every stored block is restored, whatever was measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from ingot.artifact.serving import ArtifactOptions, KVRestore

TierName = Literal["host", "disk"]
BlockPlace = Literal["device", "host", "disk"]  # of a block; one on the device costs nothing
_KEPT = 0.9  # share of the old sums in a running average


@dataclass(slots=True)
class _Average:
    """A running average of seconds per unit, weighted by units."""

    units: float = 0.0
    seconds: float = 0.0

    def add(self, units: float, seconds: float) -> None:
        self.units = self.units * _KEPT + units
        self.seconds = self.seconds * _KEPT + seconds

    @property
    def seconds_per_unit(self) -> float:
        return self.seconds / self.units


@dataclass(frozen=True, slots=True)
class Decision:
    """Restore the first `num_blocks` of the stored ones; `saved_seconds` is estimated, None before a measurement."""

    num_blocks: int
    saved_seconds: float | None
    reason: str


class CostModel:
    """Seconds to restore a block from each tier, and to compute a prompt's tokens at each length of context."""

    def __init__(
        self, block_tokens: int, rule: KVRestore = ArtifactOptions.kv_restore, *, state_blocks: float = 0.0
    ) -> None:
        """Nothing is measured yet. `state_blocks` is the size of a side state in blocks."""
        self._block_tokens = block_tokens
        self._rule = rule
        self._state_blocks = state_blocks
        self._state_seconds: dict[TierName, _Average] = {}
        self._block_seconds: dict[TierName, _Average] = {}
        self._token_seconds: dict[int, _Average] = {}  # by the number of bits of the context's length

    def observe_block(self, tier: TierName, seconds: float) -> None:
        """Record how long it took to read one block from a tier; from disk, to host memory."""
        self._block_seconds.setdefault(tier, _Average()).add(1, seconds)

    def observe_state(self, tier: TierName, seconds: float) -> None:
        """Record how long it took to read a side state from a tier; from disk, to host memory."""
        self._state_seconds.setdefault(tier, _Average()).add(1, seconds)

    def observe_prefill(self, context_tokens: int, num_tokens: int, seconds: float) -> None:
        """Record a step that computed prompt tokens up to a context's length; shorter ones than a block are ignored."""
        if num_tokens >= self._block_tokens:
            self._token_seconds.setdefault(context_tokens.bit_length(), _Average()).add(num_tokens, seconds)

    def block_seconds(self, tier: TierName) -> float:
        """Seconds to restore a block to the device; 0 before the first one. One on disk passes through host memory."""
        return sum(self._block_seconds[each].seconds_per_unit for each in _ways(tier) if each in self._block_seconds)

    @property
    def disk_seconds(self) -> float:
        """Seconds to read a block from disk to host memory; 0 before the first one."""
        return self._block_seconds["disk"].seconds_per_unit if "disk" in self._block_seconds else 0.0

    def state_seconds(self, tier: TierName) -> float:
        """Seconds to restore a side state to the device; by its size, until one was."""
        total = 0.0
        for each in _ways(tier):
            if each in self._state_seconds:
                total += self._state_seconds[each].seconds_per_unit
            elif each in self._block_seconds:
                total += self._block_seconds[each].seconds_per_unit * self._state_blocks
        return total

    def token_seconds(self, context_tokens: int) -> float | None:
        """Seconds to compute a prompt's token, from the nearest length that was measured; None before any was."""
        if not self._token_seconds:
            return None
        bits = context_tokens.bit_length()
        nearest = min(self._token_seconds, key=lambda each: (abs(each - bits), each))
        return self._token_seconds[nearest].seconds_per_unit

    def decide(
        self, tiers: Sequence[BlockPlace], num_cached_tokens: int, states: Mapping[int, TierName] | None = None
    ) -> Decision:
        """Choose how many blocks to restore of those that continue a computed prefix, given the place of each.

        states  for a model with side state: after how many of the blocks a tier has the state, and which tier
        """
        if not tiers:
            return Decision(0, None, "no tier has a block that continues the prefix")
        if states is not None and not states:
            return Decision(0, None, "no tier has the side state after any of the blocks")
        if self._rule == "always":
            reason = "all that is stored is restored, because kv_restore is 'always'"
            return Decision(max(states or [len(tiers)]), None, reason)
        counts = range(1, len(tiers) + 1) if states is None else states
        if self.token_seconds(num_cached_tokens) is None:
            return Decision(max(counts), None, "no prompt was computed yet, so restoring is assumed to be faster")
        restore = self._restore_seconds(tiers)
        for count, tier in (states or {}).items():
            restore[count] += self.state_seconds(tier)
        compute = self._compute_seconds(len(tiers), num_cached_tokens)
        gains = {0: 0.0} | {count: compute[count] - restore[count] for count in counts}
        best = max(gains, key=lambda count: (gains[count], count))
        shown = best or max(counts)
        verb = "restoring" if best else "computing"
        reason = f"{verb} is faster: {restore[shown] * 1e3:.2f} ms to restore, {compute[shown] * 1e3:.2f} ms to compute"
        return Decision(best, gains[best], reason)

    def _restore_seconds(self, tiers: Sequence[BlockPlace]) -> list[float]:
        """Seconds to restore none of these blocks, the first, the first two and so on."""
        seconds: dict[BlockPlace, float] = {tier: self.block_seconds(tier) for tier in set(tiers) if tier != "device"}
        return list(accumulate((seconds.get(tier, 0.0) for tier in tiers), initial=0.0))

    def _compute_seconds(self, num_blocks: int, start: int) -> list[float]:
        """Seconds to compute none of the blocks after `start` tokens, the first, the first two and so on."""
        size = self._block_tokens
        bits = [(start + count * size).bit_length() for count in range(1, num_blocks + 1)]
        seconds = {each: size * (self.token_seconds(1 << each - 1) or 0.0) for each in set(bits)}
        return list(accumulate((seconds[each] for each in bits), initial=0.0))


def _ways(tier: TierName) -> tuple[TierName, ...]:
    """Copies on the way to the device: what is on disk passes through host memory."""
    return ("disk", "host") if tier == "disk" else ("host",)
