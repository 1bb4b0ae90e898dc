"""Suffix decoding: drafts copied from what other requests of the same tenant got.

Agents, retries and repeated tasks write again what was written before: tool calls, edited files, standard phrases.
Prompt lookup finds only what the request itself holds. Oliaro et al., "SuffixDecoding" (2024), keep a suffix tree of
the finished outputs; the index here is that of LZ77 compressors with a sliding window, whose memory is fixed:

    tokens     the last `window` tokens of outputs, each piece of one after an END; owners has their tenants
    heads      hash of a tenant and KEY_TOKENS tokens -> newest place that follows them
    links      place -> the place before it in its chain
    continued  place after a piece -> place where the next piece of the same output goes on

An output that grows is taken in pieces of PIECE_TOKENS, so that requests that run at the same time draft for each
other, and the rest when it ends. A later piece begins with the LONGEST_MATCH tokens before it, which matches are
compared with and whose places are in no chain.

There is a table for each number of KEY_TOKENS: places that follow eight equal tokens are few and good, those that
follow two are many. A place is used only if its tenant and its tokens are the request's, so equal hashes do no harm.
Tenants are `PrefixScope`s: cache salt and adapter. A private sequence reads nothing and leaves nothing.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ingot.runtime.kv.blocks import TokenArray
from ingot.runtime.kv.keys import PrefixScope
from ingot.runtime.scheduling import sequence as steps

KEY_TOKENS: Final = (8, 4, 2)
MOST_PLACES = 16
LONGEST_MATCH = 32
PIECE_TOKENS: Final = 128
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
    """The last `window` tokens of outputs. Places count from the first ever, so that age tells what is gone.

    Outputs wait until `settle` indexes them, so that no step has to index a long one.
    """

    def __init__(self, window: int, piece_tokens: int = PIECE_TOKENS) -> None:
        self.window = window
        self._piece_tokens = piece_tokens
        self.clear()

    def clear(self) -> None:
        """Forget all outputs."""
        self._tokens, self._owners = np.zeros((2, self.window), np.int32)
        self._links = np.zeros((len(KEY_TOKENS), self.window), np.int64)
        self._heads = np.full((len(KEY_TOKENS), 1 << _HEADS_BITS), -1, np.int64)
        # The same memory for single numbers, which numpy reads five times as slowly.
        self._token_at, self._owner_at = self._tokens.data, self._owners.data
        self._link_at = [links.data for links in self._links]
        self._head_at = [heads.data for heads in self._heads]
        self._end = 0
        self._scopes = OrderedDict[bytes, int]()
        self._num_scopes = 0
        self._continued: dict[int, int] = {}
        self._growing: dict[int, _Growing] = {}
        self._waiting = deque[_Piece]()
        self._num_waiting = 0

    def __len__(self) -> int:
        """Tokens that are kept, an END before each piece included."""
        return min(self._end, self.window)

    def add(self, tokens: TokenArray, scope: PrefixScope) -> None:
        """Take a whole output. Of more tokens than the window has, the last ones are kept."""
        if not scope.private and len(tokens) > min(KEY_TOKENS):
            self._wait(_Piece(np.array(tokens, np.int64)[1 - self.window :], self._number(scope)))

    def grow(self, sequence: steps.Sequence) -> None:
        """Take the next piece of an output that has not ended, once there are `piece_tokens` more."""
        growing = self._growing.get(sequence.id)
        taken = growing.num_taken if growing else 0
        if sequence.num_generated - taken >= self._piece_tokens and not sequence.scope.private:
            piece = self._next_piece(sequence, growing)
            self._growing[sequence.id] = _Growing(sequence.num_generated, piece)
            self._wait(piece)

    def end(self, sequence: steps.Sequence) -> None:
        """Take what is left of an output that has ended."""
        growing = self._growing.pop(sequence.id, None)
        if growing is None:
            self.add(sequence.tokens[sequence.num_prompt_tokens :], sequence.scope)
        elif growing.num_taken < sequence.num_generated:
            self._wait(self._next_piece(sequence, growing))

    def settle(self, num_tokens: int) -> None:
        """Index at most so many tokens of the pieces that wait, the oldest first."""
        while self._waiting and num_tokens > 0:
            piece = self._waiting[0]
            count = min(num_tokens, piece.num_left)
            self._index(piece, count)
            piece.num_indexed += count
            self._num_waiting -= count
            num_tokens -= count
            if not piece.num_left:
                piece.end = self._end
                self._waiting.popleft()

    def outputs(self) -> Iterator[tuple[bytes, NDArray[np.int32]]]:
        """The root of the scope and the tokens [n] of each output, in the order of their ends; all are settled first.

        Of an output that the window has a part of, that part.
        """
        self.settle(self._num_waiting)
        roots = {number: root for root, number in self._scopes.items()}
        places = np.arange(max(0, self._end - self.window), self._end) % self.window
        tokens, owners, oldest = self._tokens[places], self._owners[places], self._end - len(places)
        before = {start: end for end, start in self._continued.items()}
        parts: dict[int, list[NDArray[np.int32]]] = {}  # keys: places after the last part
        owner_of: dict[int, int] = {}
        bounds = np.r_[-1, np.flatnonzero(tokens == END), len(tokens)]
        for first, last in pairwise(bounds.tolist()):
            begin, end = first + 1, oldest + last
            if begin < last:
                earlier = parts.pop(before.get(oldest + begin + LONGEST_MATCH, -1), [])
                parts[end] = [*earlier, tokens[begin + (LONGEST_MATCH if earlier else 0) : last]]
                owner_of[end] = int(owners[begin])
        for end, pieces in parts.items():
            if root := roots.get(owner_of[end]):
                yield root, np.concatenate(pieces)

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
        window, at, owners, links = self.window, self._token_at, self._owner_at, self._link_at[table]
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
        found = self._piece_from(place, count)
        while len(found) < count and (next_place := self._continued.get(place + len(found))) is not None:
            more = self._piece_from(next_place, count - len(found))
            place = next_place - len(found)
            found += more
        return tuple(found)

    def _piece_from(self, place: int, count: int) -> list[int]:
        """The tokens from `place` on, up to `count` and to the end of their piece."""
        first, end = place % self.window, min(place + count, self._end)
        found = self._token_at[first : first + end - place].tolist()
        if len(found) < end - place:
            found += self._token_at[: end - place - len(found)].tolist()
        return found[: found.index(END)] if END in found else found

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

    def _wait(self, piece: "_Piece") -> None:
        self._waiting.append(piece)
        self._num_waiting += piece.num_left
        while self._num_waiting > self.window:
            self._num_waiting -= self._waiting.popleft().num_left

    def _next_piece(self, sequence: steps.Sequence, growing: "_Growing | None") -> "_Piece":
        """The tokens of an output that were not taken, after those that matches are compared with."""
        number, first = self._number(sequence.scope), sequence.num_prompt_tokens
        most = self.window - 1 - LONGEST_MATCH
        if growing is None or sequence.num_generated - growing.num_taken > most:
            start = max(first, len(sequence.tokens) - most)
            return _Piece(np.array(sequence.tokens[start:], np.int64), number)
        start = first + growing.num_taken - LONGEST_MATCH
        return _Piece(np.array(sequence.tokens[start:], np.int64), number, LONGEST_MATCH, growing.piece)

    def _index(self, piece: "_Piece", count: int) -> None:
        """Append the next `count` tokens of a piece, those of one piece without a gap, and index their places."""
        first = piece.num_indexed
        if not first:
            self._tokens[self._end % self.window] = END
            self._end += 1
            self._continue(piece)
        places = np.arange(self._end, self._end + count)
        self._tokens[places % self.window] = piece.tokens[first : first + count]
        self._owners[places % self.window] = piece.owner
        self._end += count
        for table, num_tokens in enumerate(KEY_TOKENS):
            skipped = max(0, max(num_tokens, piece.num_context) - first)
            if skipped < count:
                begin = first + skipped - num_tokens
                keys = _hashes(piece.tokens[begin : first + count - 1], num_tokens, piece.owner)
                self._link(table, keys, places[skipped:])

    def _continue(self, piece: "_Piece") -> None:
        """Note where a piece that is about to be appended goes on with the one before it, if that was not dropped."""
        before, piece.before = piece.before, None
        if before is not None and before.end >= 0:
            self._continued[before.end] = self._end + piece.num_context
        while self._continued and (oldest := next(iter(self._continued))) < self._end - self.window:
            del self._continued[oldest]

    def _link(self, table: int, keys: NDArray[np.int64], places: NDArray[np.int64]) -> None:
        """Put places, in their order, before the heads of their chains."""
        order = np.argsort(keys, kind="stable")
        keys, places = keys[order], places[order]
        is_first = np.r_[True, keys[1:] != keys[:-1]]
        before = np.r_[-1, places[:-1]]
        before[is_first] = self._heads[table, keys[is_first]]
        self._links[table, places % self.window] = before
        is_last = np.r_[is_first[1:], True]
        self._heads[table, keys[is_last]] = places[is_last]


@dataclass(slots=True)
class _Piece:
    """Tokens [n] of an output, the number of its scope, and how many of them are indexed.

    num_context  tokens that the piece before it has, too
    end          place after the last token, once all are indexed
    """

    tokens: NDArray[np.int64]
    owner: int
    num_context: int = 0
    before: "_Piece | None" = None
    num_indexed: int = 0
    end: int = -1

    @property
    def num_left(self) -> int:
        return len(self.tokens) - self.num_indexed


class _Growing(NamedTuple):
    """Number of tokens that were taken of an output that has not ended, and the last piece of them."""

    num_taken: int
    piece: _Piece


def _hash(tokens: list[int], scope: int) -> int:
    """Index into `heads` for some tokens of a scope. Each is multiplied, so that the highest bits depend on it."""
    value = scope
    for token in tokens:
        value = (value + token + 1) * _FACTOR & _WORD
    return value >> 64 - _HEADS_BITS


def _hashes(tokens: NDArray[np.int64], num_tokens: int, scope: int) -> NDArray[np.int64]:
    """The same for each run of `num_tokens` tokens: [n - num_tokens + 1]."""
    count = len(tokens) - num_tokens + 1
    values = np.full(count, scope, np.uint64)
    for i in range(num_tokens):
        values = (values + tokens[i : i + count].astype(np.uint64) + np.uint64(1)) * np.uint64(_FACTOR)
    return (values >> np.uint64(64 - _HEADS_BITS)).astype(np.int64)
