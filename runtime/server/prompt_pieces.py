"""How much of the prompts was seen before, wherever in a prompt: what a prefix cache could have at best.

Pieces are runs of 16 tokens, chosen by their hash alone, so that the same text has the same pieces at any place. Only
hashes are kept. Next to the hits of the prefix cache the share shows templates that begin with what differs.
"""

from collections import OrderedDict

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ingot.runtime.prompts import TokenIds

_PIECE_TOKENS = 16
_ONE_IN = 16  # of all runs that begin at a token
_MOST_TOKENS = 8192  # of a prompt that are looked at
_KEPT = 16384
_SAMPLED = 4  # one prompt in so many is looked at
_FACTORS = np.random.default_rng(0).integers(1, 2**63, _PIECE_TOKENS, dtype=np.uint64) | np.uint64(1)


class PromptPieces:
    """Counts pieces of sampled prompts, and those that an earlier sampled prompt had."""

    def __init__(self) -> None:
        self.num_pieces = 0
        self.num_repeated = 0
        self._num_prompts = 0
        self._seen: OrderedDict[int, None] = OrderedDict()

    def observe(self, tokens: TokenIds) -> None:
        """Look at a prompt, if it is its turn."""
        self._num_prompts += 1
        if self._num_prompts % _SAMPLED != 1 or len(tokens) < _PIECE_TOKENS:
            return
        runs = sliding_window_view(np.asarray(tokens[:_MOST_TOKENS], np.uint64), _PIECE_TOKENS)
        hashes = (runs * _FACTORS).sum(1, dtype=np.uint64) >> np.uint64(20)  # [runs]; the low bits mix least
        pieces = set(hashes[hashes % np.uint64(_ONE_IN) == 0].tolist())
        self.num_pieces += len(pieces)
        for piece in pieces:
            if piece in self._seen:
                self.num_repeated += 1
                self._seen.move_to_end(piece)
            else:
                self._seen[piece] = None
        while len(self._seen) > _KEPT:
            self._seen.popitem(last=False)
