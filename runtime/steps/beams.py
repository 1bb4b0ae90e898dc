"""Beam search in the steps of an engine: each beam is a sequence, and all of them advance together.

A beam whose logits were read waits for those of the others. Then `BeamSearch` chooses the next beams: one continuation
of each beam goes on in its sequence, further ones are forked from it (copy on write), and beams without any are
removed. A beam that waits while nothing else can run gives up its blocks (`Scheduler`), so a search needs no more of
the pool than its longest sequence.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ingot.runtime.asking.outputs import Completion, EarlyEnd, RequestOutput, SampledToken, ranked_outputs
from ingot.runtime.forward_batch import FloatArray
from ingot.runtime.requests.beam_search import BeamParams, BeamSearch, Candidates, Hypothesis, candidates_of
from ingot.runtime.requests.request import Request
from ingot.runtime.scheduling.sequence import SequenceState


@dataclass(frozen=True)
class BeamMoves:
    """What to do with the sequences of a group: remove some, fork some, and let all that are left go on."""

    removed: Sequence[Request]
    forked: Sequence[tuple[Request, Sequence[Request]]]  # with the beams that share the first's blocks
    continued: Sequence[tuple[Request, int]]  # and the token to append; those that were forked have theirs


class BeamGroup:
    """The beams of one request. `new` makes a request for the same prompt, with another sequence."""

    def __init__(self, params: BeamParams, eos_token_ids: frozenset[int], new: Callable[[], Request]) -> None:
        self._new = new
        self.first = _as_beam(new())
        self.id = self.first.id
        self.beams = [self.first]
        most = self.first.sampler.params.max_tokens  # as many as the context has room for
        self._params = replace(params, max_tokens=most)
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
        self._search = BeamSearch(self._params, ends)
        self._candidates: dict[int, Candidates] = {}  # by sequence id
        self._first_token_seconds: float | None = None
        self.num_steps = 0

    @property
    def is_complete(self) -> bool:
        """Whether the logits after every beam were read."""
        return len(self._candidates) == len(self.beams)

    @property
    def is_done(self) -> bool:
        """Whether the search has ended."""
        return self._search.is_done

    def read(self, beam: Request, row: FloatArray) -> None:
        """Keep the most likely tokens of logits [vocab] after a beam. Raises NonFiniteLogits."""
        mask = beam.matcher.mask() if beam.matcher else None
        self._candidates[beam.sequence.id] = candidates_of(row, self._search.num_candidates, mask)

    def advance(self, now: float) -> BeamMoves:
        """Choose the next beams."""
        self._first_token_seconds = self._first_token_seconds or now
        self.num_steps += 1
        chosen = self._search.advance([self._candidates[beam.sequence.id] for beam in self.beams])
        self._candidates.clear()
        tokens: dict[int, list[int]] = {}
        for continuation in chosen:
            tokens.setdefault(continuation.parent, []).append(continuation.token)
        removed = [beam for index, beam in enumerate(self.beams) if index not in tokens]
        parents = {index: self.beams[index] for index in tokens}
        forked = {index: [self._forked(parents[index], each) for each in tokens[index][1:]] for index in tokens}
        places = {index: iter([parents[index], *forked[index]]) for index in tokens}
        self.beams = [next(places[continuation.parent]) for continuation in chosen]
        return BeamMoves(
            removed,
            [(parents[index], forked[index]) for index in tokens if forked[index]],
            [(parents[index], tokens[index][0]) for index in tokens],
        )

    def result(self, now: float, reason: EarlyEnd = "abort") -> list[RequestOutput]:
        """An output for each sequence to return, the best first; `reason` is that of beams which have not finished."""
        found = self._search.ranked()[: self._params.num_return] or [Hypothesis((), (), 0.0, 0.0)]
        return ranked_outputs([self._completed(hypothesis, now, reason) for hypothesis in found])

    def replayed(self) -> Request:
        """The best beam so far as a request, for the output of a search that failed."""
        return self._replayed(self._search.beams[0])[0]

    def _forked(self, parent: Request, token: int) -> Request:
        child = _as_beam(self._new())
        child.sequence.state = SequenceState.UNFORKED
        child.follow(parent)
        child.sequence.tokens.extend(parent.sequence.generated)
        child.matcher = parent.matcher.fork() if parent.matcher else None
        child.extend(token)
        return child

    def _completed(
        self, hypothesis: Hypothesis, now: float, reason: EarlyEnd
    ) -> tuple[Completion, tuple[SampledToken, ...]]:
        request, completion = self._replayed(hypothesis, now)
        completion = completion or request.abort(now, reason).completion
        assert completion is not None
        return replace(completion, score=hypothesis.score), request.tokens

    def _replayed(self, hypothesis: Hypothesis, now: float = 0.0) -> tuple[Request, Completion | None]:
        """A request with the tokens of a hypothesis, and its completion if the last ends it."""
        request, completion = self._new(), None
        request.follow(self.first)
        request.matcher = None  # the search has followed the constraint
        request.sequence.cached_tokens = self.first.sequence.cached_tokens
        for token, logprob in zip(hypothesis.tokens, hypothesis.logprobs, strict=True):
            moment = now if request.tokens else self._first_token_seconds or now
            completion = request.push(SampledToken(token, logprob), moment).completion
        return request, completion


def _as_beam(request: Request) -> Request:
    request.needs_logits = request.reads_logits = request.is_beam = True
    request.speculate = False
    return request
