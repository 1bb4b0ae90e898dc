"""Prompt lookup: drafts copied from where the last tokens occurred before, in the prompt or in the output.

It costs no model and pays where text repeats itself: edits, summaries, code, structured output. The method is Saxena's
"Prompt Lookup Decoding" (2023); the index is that of LZ77 compressors. All places with the same MATCH_TOKENS tokens
before them are in one chain, newest first:

    heads   tokens -> newest place that follows them
    links   place  -> the place before it in its chain, -1 at the end

A draft is looked for along the chain, at most MOST_PLACES places back, and is copied from the place where the longest
run of tokens before it is the same; of several such places, from the newest. A token costs one entry in each table, so
memory is proportional to the sequence and goes with it.

With a history of outputs (`output_history`), the draft is copied from there where it has a longer match.
"""

from array import array
from collections.abc import Sequence

from ingot.runtime.kv.blocks import TokenArray
from ingot.runtime.scheduling import sequence as steps
from ingot.runtime.speculation.drafter import NUM_GRADES, DraftRequest, Proposal
from ingot.runtime.speculation.history_file import HistoryFile
from ingot.runtime.speculation.output_history import LONGEST_MATCH, MOST_PLACES, OutputHistory
from ingot.runtime.speculation_options import LOOKUP, SUFFIX

MATCH_TOKENS = 2  # `NGramIndex` has keys of two
# Tokens of a history that a step may wait for: 0.3 ms, as long as a look at ten sequences.
_SETTLED_PER_CALL = 256


class PromptLookup:
    """A drafter. Grades are lengths of the match: MATCH_TOKENS has grade 0, each further token one more.

    Drafts from the history are of the kind "suffix", those from the request itself "lookup".

    kept_in   file that the history is read from at the start, and written to at the end
    """

    is_free = True

    def __init__(self, history: OutputHistory | None = None, kept_in: HistoryFile | None = None) -> None:
        self.kind = LOOKUP if history is None else SUFFIX
        self._indexes: dict[int, NGramIndex] = {}
        self._history = history
        self._kept_in = kept_in
        if history is not None and kept_in:
            kept_in.load(history)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Copies of what followed the longest earlier occurrence of each sequence's last tokens."""
        if self._history is not None:
            for request in requests:
                self._history.grow(request.sequence)
            self._history.settle(_SETTLED_PER_CALL)
        return [self._propose(request.sequence, request.num_tokens) for request in requests]

    def catch_up_tokens(self, sequence: steps.Sequence) -> int:
        """Always 0."""
        return 0

    def forget(self, sequence: steps.Sequence) -> None:
        """Drop a sequence's index; keep its output in the history."""
        self._indexes.pop(sequence.id, None)
        if self._history is not None:
            self._history.end(sequence)

    def close(self) -> None:
        """Drop all indexes, and keep the history in its file."""
        self._indexes.clear()
        if self._history is not None:
            if self._kept_in:
                self._kept_in.save(self._history)
            self._history.clear()

    def _propose(self, sequence: steps.Sequence, num_tokens: int) -> Proposal:
        tokens, index = sequence.tokens, self._indexes.get(sequence.id)
        if index is None:
            index = self._indexes[sequence.id] = NGramIndex()
        index.extend(tokens)
        place, longest = index.find(tokens) or (0, 0)
        if self._history is not None:
            match = self._history.find(tokens, sequence.scope, num_tokens, longer_than=longest)
            if match is not None:
                return _graded(*match, SUFFIX)
        return _graded(copied(tokens, place, num_tokens), longest, LOOKUP) if longest else Proposal()


class NGramIndex:
    """Places of one sequence by the MATCH_TOKENS tokens before them. Tokens are only ever appended to a sequence."""

    __slots__ = ("_heads", "_links")

    def __init__(self) -> None:
        self._heads: dict[tuple[int, int], int] = {}
        self._links = array("i", [-1] * MATCH_TOKENS)  # [place]; no full match ends before the first places

    def extend(self, tokens: TokenArray) -> None:
        """Add the places up to the last token: the place after it has no token to copy yet."""
        heads, links = self._heads, self._links
        for place in range(len(links), len(tokens)):
            key = (tokens[place - 2], tokens[place - 1])
            links.append(heads.get(key, -1))
            heads[key] = place

    def find(self, tokens: TokenArray) -> tuple[int, int] | None:
        """The place to copy from and the length of its match; None when the last tokens occur nowhere before."""
        end = len(tokens)
        if end < MATCH_TOKENS:
            return None
        place = self._heads.get((tokens[end - 2], tokens[end - 1]), -1)
        best, longest = -1, 0
        for _ in range(MOST_PLACES):
            if place < 0 or longest == LONGEST_MATCH:
                break
            length = _matched(tokens, place, end)
            if length > longest:
                best, longest = place, length
            place = self._links[place]
        return (best, longest) if longest else None


def _graded(drafts: tuple[int, ...], num_matched: int, kind: str) -> Proposal:
    """Drafts that follow a match, each with the number of tokens that are equal before it as its grade."""
    first = num_matched - MATCH_TOKENS
    return Proposal(drafts, tuple(min(first + j, NUM_GRADES - 1) for j in range(len(drafts))), kind)


def copied(tokens: TokenArray, place: int, count: int) -> tuple[int, ...]:
    """The `count` tokens from `place` on; past the end of the sequence the copy repeats itself, as in LZ77."""
    drafts = tokens[place : place + count].tolist()
    period = len(tokens) - place
    while len(drafts) < count:
        drafts.append(drafts[len(drafts) - period])
    return tuple(drafts)


def _matched(tokens: TokenArray, place: int, end: int) -> int:
    """Number of equal tokens before `place` and before `end`, at least MATCH_TOKENS; the last of these are known."""
    length = MATCH_TOKENS
    most = min(LONGEST_MATCH, place)
    while length < most and tokens[place - 1 - length] == tokens[end - 1 - length]:
        length += 1
    return length
