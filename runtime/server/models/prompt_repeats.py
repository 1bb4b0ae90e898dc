"""How much of the prompts was seen before, wherever in a prompt, and how much of it from the first token on.

Pieces are runs of 16 tokens, chosen by their hash alone, so that the same text has the same pieces at any place. Only
hashes are kept. What repeats from the first token on is what a prefix cache could have at best. What else repeats shows
templates that begin with what differs.

Prompts of different salts have no piece in common, as they share no cached block: the counters, which anyone may read,
do not tell one tenant what another has sent.

Hashes are in a table of 1 MiB, whose size does not depend on what was seen. A piece has one place in it, where it
replaces what was there; of pieces that are seen again after 16,384 others, 6 % are lost so.
"""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from xxhash import xxh3_64_intdigest

from ingot.runtime.asking.prompts import TokenIds

_PIECE_TOKENS = 16
_ONE_IN = 16  # of all runs that begin at a token
_MOST_TOKENS = 8192  # of a prompt that are looked at
_PLACES = 1 << 18
_SAMPLED = 4  # one prompt in so many is looked at
_SALT_SHIFT = 20  # salts have as many bits as hashes
_BEGINNING = np.uint64(0x5A5A5A5A5A0)
_FACTORS = np.random.default_rng(0).integers(1, 2**63, _PIECE_TOKENS, dtype=np.uint64) | np.uint64(1)


class PromptPieces:
    """Counts pieces of sampled prompts, and those that an earlier sampled prompt had.

    num_leading   of the repeated ones those before the first new one, if the first 16 tokens began a prompt before
    """

    def __init__(self) -> None:
        self.num_pieces = 0
        self.num_repeated = 0
        self.num_leading = 0
        self._num_prompts = 0
        self._seen = np.full(_PLACES, 0, np.uint32)  # written, so that its memory is in use from the start

    def observe(self, tokens: TokenIds, salt: str = "") -> None:
        """Look at a prompt, if it is its turn. `salt` as in `RequestOptions.cache_salt`."""
        self._num_prompts += 1
        if self._num_prompts % _SAMPLED != 1 or len(tokens) < _PIECE_TOKENS:
            return
        runs = sliding_window_view(np.asarray(tokens[:_MOST_TOKENS], np.uint64), _PIECE_TOKENS)
        hashes = (runs * _FACTORS).sum(1, dtype=np.uint64) >> np.uint64(20)  # [runs]; the low bits mix least
        if salt:
            hashes ^= np.uint64(xxh3_64_intdigest(salt.encode("utf-8", "surrogatepass")) >> _SALT_SHIFT)
        # In order, each once; np.unique imports numpy.ma when it is called first. The beginning has a mark of its own.
        chosen = dict.fromkeys(hashes[hashes % np.uint64(_ONE_IN) == 0].tolist())
        beginning = hashes[0] ^ _BEGINNING
        pieces = np.array([beginning, *chosen], np.uint64) // np.uint64(_ONE_IN)  # [1 + pieces], of 40 bits
        places = pieces % np.uint64(_PLACES)
        marks = (pieces >> np.uint64(8)).astype(np.uint32) | np.uint32(1)  # never 0, which is an empty place
        seen = self._seen[places] == marks
        self._seen[places] = marks
        self.num_pieces += len(chosen)
        self.num_repeated += int(np.count_nonzero(seen[1:]))
        self.num_leading += int(seen.cumprod()[1:].sum())  # 0 from the first new one on
