"""Compares a run's answer with the plain path's, and names the first difference."""

from dataclasses import dataclass

import numpy as np

from ingot.runtime.asking.outputs import Completion, SampledToken
from ingot.runtime.forward_batch import FloatArray
from ingot.validation.verify.plan import VerifiedAnswer


@dataclass(frozen=True)
class Difference:
    """The first difference of one answer. `position` is an index of the output's tokens; -1 where it has none."""

    request: str
    what: str
    position: int
    expected: str
    found: str

    def __str__(self) -> str:
        place = f" at output token {self.position}" if self.position >= 0 else ""
        return (
            f"request {self.request}: {self.what} differ{place}: {self.expected} on the plain path, here {self.found}"
        )


def difference(answer: VerifiedAnswer, logits_bound: float) -> Difference | None:
    """The first difference of a complete answer, None when it is equal; see Subject.logits_bound."""
    expected, found = answer.expected.completion, answer.completion
    if found.error:
        return _of(answer, "errors", -1, "no error", str(found.error))
    return (
        _tokens(answer, expected.token_ids, found.token_ids)
        or _value(answer, "finish reasons", expected.finish_reason, found.finish_reason)
        or _value(answer, "stop reasons", expected.stop_reason, found.stop_reason)
        or _value(answer, "texts", expected.text, found.text)
        or _logits(answer, expected.logits, found.logits, logits_bound)
        or _logprobs(answer, logits_bound)
    )


def apart_difference(answer: VerifiedAnswer, logits_bound: float) -> Difference | None:
    """The first difference of an answer that must not come from the cache of others."""
    cached = answer.completion.cached_tokens
    if cached:
        return _of(answer, "cached tokens of another tenant", -1, 0, cached)
    return difference(answer, logits_bound)


def beginning_difference(answer: VerifiedAnswer) -> Difference | None:
    """The first difference of a cancelled answer, whose tokens are the beginning of the plain path's."""
    if answer.completion.error:
        return _of(answer, "errors", -1, "no error", str(answer.completion.error))
    found = answer.completion.token_ids
    return _tokens(answer, answer.expected.completion.token_ids[: len(found)], found)


def _of(answer: VerifiedAnswer, what: str, position: int, expected: object, found: object) -> Difference:
    return Difference(answer.expected.request.name, what, position, str(expected), str(found))


def _value(answer: VerifiedAnswer, what: str, expected: object, found: object) -> Difference | None:
    return None if expected == found else _of(answer, what, -1, repr(expected), repr(found))


def _tokens(answer: VerifiedAnswer, expected: tuple[int, ...], found: tuple[int, ...]) -> Difference | None:
    if expected == found:
        return None
    pairs = enumerate(zip(expected, found, strict=False))
    position = next((index for index, (one, other) in pairs if one != other), None)
    if position is not None:
        return _of(answer, "tokens", position, expected[position], found[position])
    lengths = f"{len(expected)} tokens", f"{len(found)} tokens"
    return _of(answer, "lengths", min(len(expected), len(found)), *lengths)


def _logits(
    answer: VerifiedAnswer, expected: FloatArray | None, found: FloatArray | None, bound: float
) -> Difference | None:
    """Rows of logits [tokens, vocab]; none are compared where the run kept none."""
    if expected is None or found is None:
        return None
    if expected.shape != found.shape:
        return _of(answer, "shapes of logits", -1, expected.shape, found.shape)
    if bound == 0:
        wrong = (expected.view(np.int32) != found.view(np.int32)).any(axis=1)
    else:
        wrong = np.abs(expected - found).max(axis=1) > bound * np.abs(expected).max(axis=1)
    if not wrong.any():
        return None
    row = int(wrong.argmax())
    token = int(np.abs(expected[row] - found[row]).argmax())
    unit = f"logit {expected[row, token]:.9g} of token {token}"
    return _of(answer, "logits", row, unit, f"{found[row, token]:.9g}")


def _logprobs(answer: VerifiedAnswer, bound: float) -> Difference | None:
    expected, found = answer.expected.completion.logprobs or (), answer.completion.logprobs or ()
    if len(expected) != len(found):
        return _of(answer, "log-probabilities", -1, f"{len(expected)} of them", len(found))
    scale = _scale(answer.expected.completion) * 2 * bound
    for index, (one, other) in enumerate(zip(expected, found, strict=True)):
        if not _are_equal(one, other, scale):
            return _of(answer, "log-probabilities", index, one, other)
    return None


def _scale(completion: Completion) -> float:
    return float(np.abs(completion.logits).max()) if completion.logits is not None and completion.logits.size else 0.0


def _are_equal(one: SampledToken, other: SampledToken, bound: float) -> bool:
    if bound == 0:
        return one == other
    return one.token_id == other.token_id and abs((one.logprob or 0.0) - (other.logprob or 0.0)) <= bound
