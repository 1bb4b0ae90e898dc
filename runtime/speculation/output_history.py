"""Suffix decoding: drafts copied from what finished requests of the same tenant got.

Agents, retries and repeated tasks write again what was written before: tool calls, edited files, standard phrases.
Prompt lookup finds only what the request itself holds. Oliaro et al., "SuffixDecoding" (2024), keep a suffix tree of
the finished outputs; the index here is that of LZ77 compressors with a sliding window, whose memory is fixed:

    tokens   the last `window` tokens of outputs, each output after an END; owners has their tenants
    heads    hash of a tenant and KEY_TOKENS tokens -> newest place that follows them
    links    place -> the place before it in its chain

There is a table for each number of KEY_TOKENS: places that follow eight equal tokens are few and good, those that
follow two are many. A place is used only if its tenant and its tokens are the request's, so equal hashes do no harm.
Tenants are `PrefixScope`s: cache salt and adapter. A private sequence reads nothing and leaves nothing.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ingot.runtime.kv.blocks import TokenArray
from ingot.runtime.kv.keys import PrefixScope

KEY_TOKENS: Final = (8, 4, 2)
MOST_PLACES = 16
LONGEST_MATCH = 32
END = -1
_HEADS_BITS = 16
_FACTOR, _WORD = 0x9E3779B97F4A7C15, (1 << 64) - 1
# Scopes that the window may hold: salts are the clients' own, and may be new with every request.
_MOST_SCOPES = 4096


class Match(NamedTuple):
    """Tokens that followed an earlier occurrence, and the number of equal tokens before them."""

    copied: tuple[int, ...]
    num_tokens: int


class OutputHistory:
    """The last `window` tokens of finished outputs. Places count from the first ever, so that age tells what is gone.

    Outputs wait until `settle` indexes them, so that no step has to index a long one.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self.clear()

    def clear(self) -> None:
        """Forget all outputs."""
        self._tokens, self._owners = np.zeros((2, self._window), np.int32)
        self._links = np.zeros((len(KEY_TOKENS), self._window), np.int64)
        self._heads = np.full((len(KEY_TOKENS), 1 << _HEADS_BITS), -1, np.int64)
        # The same memory for single numbers, which numpy reads five times as slowly.
        self._token_at, self._owner_at = self._tokens.data, self._owners.data
        self._link_at = [links.data for links in self._links]
        self._head_at = [heads.data for heads in self._heads]
        self._end = 0
        self._scopes = OrderedDict[bytes, int]()
        self._num_scopes = 0
        self._waiting = deque[_Output]()
        self._num_waiting = 0

    def __len__(self) -> int:
        """Tokens that are kept, an END before each output included."""
        return min(self._end, self._window)

    def add(self, tokens: TokenArray, scope: PrefixScope) -> None:
        """Take the output of a finished sequence. Of more tokens than the window has, the last ones are kept."""
        if scope.private or len(tokens) <= min(KEY_TOKENS):
            return
        kept = np.array(tokens, np.int64)[1 - self._window :]
        self._waiting.append(_Output(kept, self._number(scope)))
        self._num_waiting += len(kept)
        while self._num_waiting > self._window:
            self._num_waiting -= self._waiting.popleft().num_left

    def settle(self, num_tokens: int) -> None:
        """Index at most so many tokens of the outputs that wait, the oldest first."""
        while self._waiting and num_tokens > 0:
            output = self._waiting[0]
            count = min(num_tokens, output.num_left)
            self._index(output, count)
            output.num_indexed += count
            self._num_waiting -= count
            num_tokens -= count
            if not output.num_left:
                self._waiting.popleft()

    def find(self, tokens: TokenArray, scope: PrefixScope, count: int, *, longer_than: int) -> Match | None:
        """Copy up to `count` tokens from after the longest match of a sequence's last ones; None without a longer one.

        Of equally long matches the one with the most tokens before its output ends, and of those the newest.
        """
        number = None if scope.private else self._scopes.get(scope.root)
        if number is None or longer_than >= LONGEST_MATCH:
            return None
        last = tokens[-LONGEST_MATCH:].tolist()
        for table, num_tokens in enumerate(KEY_TOKENS):
            if num_tokens <= len(last):
                best = self._longest(table, last, num_tokens, number, count)
                if best.copied:
                    return best if best.num_tokens > longer_than else None
        return None

    def _longest(self, table: int, last: list[int], num_tokens: int, owner: int, count: int) -> Match:
        """Return the best match of at least `num_tokens` tokens; nothing is copied without one."""
        window, at, owners, links = self._window, self._token_at, self._owner_at, self._link_at[table]
        oldest, best = max(0, self._end - window + LONGEST_MATCH), Match((), num_tokens - 1)
        place, last = self._head_at[table][_hash(last[-num_tokens:], owner)], last[::-1]
        for _ in range(MOST_PLACES):
            if place < oldest or (best.num_tokens == LONGEST_MATCH and len(best.copied) == count):
                break
            if owners[place % window] == owner:
                length, before = 0, place - 1
                for token in last:
                    if at[(before - length) % window] != token:
                        break
                    length += 1
                if length > best.num_tokens or (length == best.num_tokens and 0 < len(best.copied) < count):
                    match = Match(self._copied(place, count), length)
                    if length > best.num_tokens or len(match.copied) > len(best.copied):
                        best = match
            place = links[place % window]
        return best

    def _copied(self, place: int, count: int) -> tuple[int, ...]:
        """Return the tokens from `place` on, up to `count` and to the end of their output."""
        first, end = place % self._window, min(place + count, self._end)
        found = self._token_at[first : first + end - place].tolist()
        if len(found) < end - place:
            found += self._token_at[: end - place - len(found)].tolist()
        return tuple(found[: found.index(END)] if END in found else found)

    def _number(self, scope: PrefixScope) -> int:
        """The number of a scope. One that was not seen for long gets another, so that its outputs are lost."""
        number = self._scopes.get(scope.root)
        if number is None:
            self._num_scopes += 1
            number = self._scopes[scope.root] = self._num_scopes
        self._scopes.move_to_end(scope.root)
        if len(self._scopes) > _MOST_SCOPES:
            self._scopes.popitem(last=False)
        return number

    def _index(self, output: "_Output", count: int) -> None:
        """Append the next `count` tokens of an output, those of one output without a gap, and index their places."""
        first = output.num_indexed
        if not first:
            self._tokens[self._end % self._window] = END
            self._end += 1
        places = np.arange(self._end, self._end + count)
        self._tokens[places % self._window] = output.tokens[first : first + count]
        self._owners[places % self._window] = output.owner
        self._end += count
        for table, num_tokens in enumerate(KEY_TOKENS):
            skipped = max(0, num_tokens - first)
            if skipped < count:
                begin = first + skipped - num_tokens
                keys = _hashes(output.tokens[begin : first + count - 1], num_tokens, output.owner)
                self._link(table, keys, places[skipped:])

    def _link(self, table: int, keys: NDArray[np.int64], places: NDArray[np.int64]) -> None:
        """Put places, in their order, before the heads of their chains."""
        order = np.argsort(keys, kind="stable")
        keys, places = keys[order], places[order]
        is_first = np.r_[True, keys[1:] != keys[:-1]]
        before = np.r_[-1, places[:-1]]
        before[is_first] = self._heads[table, keys[is_first]]
        self._links[table, places % self._window] = before
        is_last = np.r_[is_first[1:], True]
        self._heads[table, keys[is_last]] = places[is_last]


@dataclass(slots=True)
class _Output:
    """Tokens [n] of a finished sequence, the number of its scope, and how many of them are indexed."""

    tokens: NDArray[np.int64]
    owner: int
    num_indexed: int = 0

    @property
    def num_left(self) -> int:
        return len(self.tokens) - self.num_indexed


def _hash(tokens: list[int], scope: int) -> int:
    """Index into `heads` for some tokens of a scope."""
    value = scope
    for token in tokens:
        value = (value * _FACTOR + token + 1) & _WORD
    return value >> 64 - _HEADS_BITS


def _hashes(tokens: NDArray[np.int64], num_tokens: int, scope: int) -> NDArray[np.int64]:
    """The same for each run of `num_tokens` tokens: [n - num_tokens + 1]."""
    count = len(tokens) - num_tokens + 1
    values = np.full(count, scope, np.uint64)
    for i in range(num_tokens):
        values = values * np.uint64(_FACTOR) + tokens[i : i + count].astype(np.uint64) + np.uint64(1)
    return (values >> np.uint64(64 - _HEADS_BITS)).astype(np.int64)
