"""A sequence's blocks, and its side state, on their way from a tier to the device."""

from dataclasses import dataclass
from typing import NamedTuple

from ingot.runtime.kv.cost_model import TierName
from ingot.runtime.kv.host_tier import HostBlock
from ingot.runtime.kv.keys import BlockContent, Tree
from ingot.runtime.kv.transfers.transfer import Transfer


class CachedTokens(NamedTuple):
    """Tokens of a prompt that were not computed, by the tier that had them."""

    device: int = 0
    host: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        """Tokens of all tiers."""
        return sum(self)


@dataclass(slots=True, eq=False)
class LoadingBlock:
    """A block, or a side state. `target` is its place in the pool, `source` its slot in host memory once it has one.

    Sequences that begin with the same blocks share one; it is restored as long as any of their loads needs it.
    """

    content: BlockContent
    tree: Tree
    target: int
    num_loads: int = 1  # that need it
    source: HostBlock | None = None
    tier: TierName = "host"
    transfer: Transfer | None = None
    arrived: bool | None = None  # None while it is on its way


@dataclass(slots=True, eq=False)
class RestoredPrefix:
    """Blocks that are being restored for one sequence, in order of position, and the side state after the last.

    It has none until it has begun.
    """

    blocks: list[LoadingBlock]
    state: LoadingBlock | None = None
    has_begun: bool = True
    num_given_up: int = 0  # parts, from the end, that this load does not need any more

    @property
    def parts(self) -> list[LoadingBlock]:
        """Blocks and state."""
        return [*self.blocks, self.state] if self.state else self.blocks

    @property
    def done(self) -> bool:
        """Whether nothing writes to its places any more."""
        return self.has_begun and all(part.arrived is not None for part in self.parts)

    @property
    def is_whole(self) -> bool:
        """Whether all arrived."""
        return all(part.arrived for part in self.parts)

    @property
    def arrived(self) -> list[LoadingBlock]:
        """The leading blocks that arrived; what follows a failed one is computed."""
        failed = next((index for index, block in enumerate(self.blocks) if not block.arrived), len(self.blocks))
        return self.blocks[:failed]

    def contents(self) -> list[BlockContent]:
        """Contents of the blocks that arrived."""
        return [block.content for block in self.arrived]

    def cached_tokens(self, on_device: int, block_tokens: int) -> CachedTokens:
        """Tokens by tier, of which `on_device` needed no transfer."""
        tiers = [block.tier for block in self.arrived]
        return CachedTokens(on_device, *(tiers.count(tier) * block_tokens for tier in ("host", "disk")))
