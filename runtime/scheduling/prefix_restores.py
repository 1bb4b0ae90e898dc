"""Prefixes that are restored from tiers: for sequences that are admitted, and ahead for those that wait."""

from collections.abc import Iterable
from itertools import islice

from ingot.runtime.kv.blocks import Admission, BlockManager
from ingot.runtime.kv.states import StateCopy
from ingot.runtime.kv.tiers import TierManager
from ingot.runtime.kv.transfers.restored_prefix import CachedTokens
from ingot.runtime.scheduling.sequence import Sequence, SequenceState

_READ_AHEAD = 4  # waiting sequences whose blocks are read from disk
_MAX_FAILED_LOADS = 2  # of a sequence, which then does without tiers


class PrefixLoads:
    """Begins and ends the loads of sequences.

    A load that failed in part leaves the blocks before the failed one. The sequence computes what follows, unless it
    shares one of the blocks that did not arrive with another, which computes it too, or has no side state that belongs
    to what arrived. Then it starts over: it is admitted again, to what can be had by then.
    """

    def __init__(self, blocks: BlockManager, tiers: TierManager) -> None:
        self._blocks, self._tiers = blocks, tiers

    @staticmethod
    def are_allowed(sequence: Sequence) -> bool:
        """Whether a sequence may be admitted to blocks and state that a tier has."""
        return sequence.num_failed_loads <= _MAX_FAILED_LOADS

    def begin(self, sequence: Sequence, admission: Admission) -> bool:
        """Restore what tiers have of an admitted sequence's prefix; False if that is nothing, or slower to restore."""
        blocks, tiers, size = self._blocks, self._tiers, self._blocks.block_tokens
        on_device = blocks.hashes(sequence.id)
        tiers.touch(on_device)
        following = blocks.following(sequence.id, sequence.tokens)
        contents = list(islice(following, admission.num_arriving))
        if self.are_allowed(sequence):
            contents += tiers.plan(following, sequence.num_computed + len(contents) * size)
        if not contents and not admission.needs_state:
            return False
        state = None
        if blocks.states:
            state = blocks.states.arrive(sequence.id, sequence.num_computed + len(contents) * size)
        tree = blocks.tree(sequence.id, contents)
        if contents:
            targets = blocks.table(sequence.id)[len(on_device) : len(on_device) + len(contents)]
            sequence.load = tiers.load(contents, targets, tree, state)
        else:
            assert state is not None
            sequence.load = tiers.load_state(on_device[-1], tree, state)
        sequence.state = SequenceState.LOADING
        return True

    def end(self, sequence: Sequence) -> tuple[CachedTokens, tuple[StateCopy, ...]] | None:
        """Add what arrived to the prefix index, once a load is done; None if the sequence must start over.

        Otherwise the tokens that need not be computed, and the copy to make before it runs.
        """
        load, blocks = sequence.load, self._blocks
        assert load is not None
        assert load.done
        sequence.load = None
        copies = blocks.states.arrived(sequence.id, is_sound=load.is_whole) if blocks.states else ()
        blocks.adopt(sequence.id, load.contents())
        if load.is_whole:
            return load.cached_tokens(sequence.num_computed, blocks.block_tokens), copies
        first = len(blocks.hashes(sequence.id))
        end = first + len(load.blocks) - len(load.arrived)
        if blocks.states or any(blocks.is_shared(sequence.id, index) for index in range(first, end)):
            sequence.num_failed_loads += 1
            return None
        return load.cached_tokens(sequence.num_computed, blocks.block_tokens), ()

    def cancel(self, sequence: Sequence) -> None:
        """Restore nothing more for a sequence."""
        if sequence.load:
            self._tiers.cancel(sequence.load)
            sequence.load = None

    def read_ahead(self, waiting: Iterable[Sequence]) -> None:
        """Begin to read what the first waiting sequences will need from disk."""
        for sequence in islice(waiting, _READ_AHEAD):
            if not sequence.is_read_ahead and sequence.reuse_prefix and not sequence.scope.private:
                sequence.is_read_ahead = True
                self._tiers.read_ahead(self._blocks.contents(sequence.tokens, sequence.scope))
