"""Beam search: the rules by which beams grow, finish and are ranked. No engine; see `steps.beams` for that.

Semantics are those of transformers' `generate(num_beams=...)`. A step takes the most likely continuations of all beams
together, by the sum of their log-probabilities. Those among the best `width` that end here are finished, with the score

    sum of log-probabilities / length ** length_penalty

where the end token counts in the length, and the best `width` finished ones are kept. The best continuations that do
not end are the next beams.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal

import numpy as np

from ingot.errors import RequestError, shown
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.constraints.constraint import Constraint
from ingot.runtime.constraints.matcher import Mask
from ingot.runtime.forward_batch import FloatArray
from ingot.runtime.requests.sampler import NonFiniteLogits, masked_scores

MAX_WIDTH = 64


@dataclass(frozen=True)
class BeamParams:
    """How to search for likely sequences. Raises RequestError for an invalid value.

    width            beams to keep, and finished sequences
    max_tokens       most tokens to generate, at least 1
    length_penalty   exponent of the length in the score: above 0 favours longer sequences, 0 ranks by the sum alone
    early_stopping   when to stop with `width` finished sequences: True at once; False when the best beam, at its
                     present length, scores no better than the worst of them; "never" when it could not at any length
    num_return       finished sequences to return, at most `width`
    stop_token_ids   tokens that end a sequence, in addition to the model's own end tokens
    ignore_eos       continue past the model's own end tokens
    constraint       what the text must be, as in SamplingParams; it forbids continuations, and changes no score
    """

    width: int = 4
    max_tokens: int = 128
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    num_return: int = 1
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        _require_whole("width", self.width, MAX_WIDTH)
        _require_whole("num_return", self.num_return, self.width)
        if self.early_stopping not in (True, False, "never"):
            raise RequestError(f'early_stopping is {shown(self.early_stopping)}; it must be True, False or "never"')
        if isinstance(self.length_penalty, bool) or not isinstance(self.length_penalty, Real):
            raise RequestError(f"length_penalty is {shown(self.length_penalty)}; it must be a number, such as 1.0")
        if not -16 <= self.length_penalty <= 16:  # False for NaN; beyond this a score may overflow
            raise RequestError(f"length_penalty is {self.length_penalty}; it must be from -16 to 16")
        object.__setattr__(self, "stop_token_ids", self.sampling.stop_token_ids)
        if self.constraint and self.ignore_eos and not self.stop_token_ids:
            raise RequestError(
                "a beam search with a constraint ends its sequences by end tokens, but ignore_eos is set: leave it out",
                field="ignore_eos",
            )

    @property
    def sampling(self) -> SamplingParams:
        """The same limits and ends for a single sequence."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            constraint=self.constraint,
        )


def _require_whole(name: str, value: object, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or not 1 <= int(value) <= most:
        raise RequestError(f"{name} is {shown(value)}; it must be a whole number from 1 to {most}")


def checked_beam_params(params: BeamParams | None) -> BeamParams:
    """The parameters, or the defaults for None; RequestError for anything else, such as SamplingParams."""
    if params is not None and not isinstance(params, BeamParams):
        raise RequestError(f"the parameters of a beam search must be BeamParams(...), not {shown(params)}")
    return params or BeamParams()


@dataclass(frozen=True)
class Hypothesis:
    """Generated tokens and their log-probabilities; `score` is that of a finished one, `total` the sum of a beam's."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    total: float
    score: float

    def extended(self, token: int, logprob: float, length_penalty: float) -> "Hypothesis":
        """With one more token."""
        total = self.total + logprob
        score = total / (len(self.tokens) + 1) ** length_penalty
        return Hypothesis((*self.tokens, token), (*self.logprobs, logprob), total, score)


@dataclass(frozen=True)
class Continuation:
    """A token that continues beam `parent`, by its place among the beams before."""

    parent: int
    token: int


Candidates = Sequence[tuple[int, float]]
"""Token ids and log-probabilities after one beam, the most likely first."""


def candidates_of(logits: FloatArray, count: int, mask: Mask | None = None) -> Candidates:
    """The `count` most likely tokens of logits [vocab] that a mask allows; ties go to the lowest id.

    Raises NonFiniteLogits.
    """
    best = int(logits.argmax())
    if not np.isfinite(logits[best]):
        raise NonFiniteLogits(f"the logit of token {best} is {logits[best]}")
    scores = logits if mask is None else masked_scores(logits, mask)
    kth = np.partition(scores, -count)[-count] if count < len(scores) else -np.inf
    wide = logits.astype(np.float64) - float(logits[best])
    found = np.flatnonzero((scores >= kth) & np.isfinite(scores))
    found = found[np.argsort(-wide[found], kind="stable")][:count]
    logprobs = wide[found] - np.log(np.exp(wide).sum())
    return list(zip(found.tolist(), logprobs.tolist(), strict=True))


class BeamSearch:
    """The beams of one request and its finished sequences."""

    def __init__(self, params: BeamParams, end_token_ids: frozenset[int]) -> None:
        self._params = params
        self._end_token_ids = end_token_ids
        self.num_candidates = max(2, 1 + len(end_token_ids)) * params.width  # enough beams are left if all others end
        self.beams = [Hypothesis((), (), 0.0, 0.0)]
        self.finished: list[Hypothesis] = []  # the best first
        self.is_done = False

    def advance(self, candidates: Sequence[Candidates]) -> list[Continuation]:
        """Choose the next beams, given the candidates after each. Empty when the search is done."""
        assert not self.is_done
        assert len(candidates) == len(self.beams)
        best = self._best_continuations(candidates)
        ends = [self._ends(hypothesis) for _, hypothesis in best]
        was_full = self._is_full
        ended = [hypothesis for (_, hypothesis), end in zip(best[: self._params.width], ends, strict=False) if end]
        if not (was_full and self._params.early_stopping is True):
            self.finished = sorted([*self.finished, *ended], key=lambda one: -one.score)[: self._params.width]
        following = [one for one, end in zip(best, ends, strict=True) if not end][: self._params.width]
        self.is_done = not following or not self._may_improve(following[0][1]) or self._stops_early
        if not self.is_done:
            self.beams = [hypothesis for _, hypothesis in following]
        return [] if self.is_done else [Continuation(parent, one.tokens[-1]) for parent, one in following]

    def ranked(self) -> list[Hypothesis]:
        """Finished sequences, the best first; beams that have tokens as well, if the search is not done."""
        found = self.finished if self.is_done else [*self.finished, *(beam for beam in self.beams if beam.tokens)]
        return sorted(found, key=lambda one: -one.score)

    @property
    def _is_full(self) -> bool:
        return len(self.finished) == self._params.width

    @property
    def _stops_early(self) -> bool:
        return self._is_full and self._params.early_stopping is True

    def _best_continuations(self, candidates: Sequence[Candidates]) -> list[tuple[int, Hypothesis]]:
        """The most likely continuations of all beams with the beam of each; ties go to the earlier beam."""
        found = [
            (self.beams[parent].total + logprob, parent, token, logprob)
            for parent, its_candidates in enumerate(candidates)
            for token, logprob in its_candidates
        ]
        found.sort(key=lambda one: -one[0])
        return [
            (parent, self.beams[parent].extended(token, logprob, self._params.length_penalty))
            for _, parent, token, logprob in found[: self.num_candidates]
        ]

    def _ends(self, hypothesis: Hypothesis) -> bool:
        return hypothesis.tokens[-1] in self._end_token_ids or len(hypothesis.tokens) == self._params.max_tokens

    def _may_improve(self, best: Hypothesis) -> bool:
        """Whether the best beam may still score better than the worst finished sequence."""
        if not self._is_full:
            return True
        at_most = self._params.early_stopping == "never" and self._params.length_penalty > 0
        length = self._params.max_tokens if at_most else len(best.tokens)
        return bool(best.total / length**self._params.length_penalty > self.finished[-1].score)
