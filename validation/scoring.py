"""Per-token scores from a pair of logits: negative log-likelihood, KL divergence, top-1 agreement."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ingot.validation.subject import LogitsArray

_SLICE_CELLS = 1 << 20
"""float64 cells worked on at once: three arrays of 8 MiB, whatever the vocabulary."""

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class TokenScores:
    """One value per predicted token, all [n].

    baseline_nll, candidate_nll  -log p(target), nats
    kl                           KL(baseline || candidate) of the next-token distributions, nats
    agrees                       both put the same token first (the lowest id among equals)
    """

    baseline_nll: FloatArray
    candidate_nll: FloatArray
    kl: FloatArray
    agrees: NDArray[np.bool_]

    @staticmethod
    def join(parts: list["TokenScores"]) -> "TokenScores":
        """The parts laid end to end."""
        names = ("baseline_nll", "candidate_nll", "kl", "agrees")
        return TokenScores(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def score(baseline: LogitsArray, candidate: LogitsArray, targets: NDArray[np.int64]) -> TokenScores:
    """Score logits [n, vocab] of both against the tokens [n] that followed. float32 in, float64 throughout."""
    assert baseline.shape == candidate.shape, (baseline.shape, candidate.shape)
    rows = max(1, _SLICE_CELLS // baseline.shape[1])
    slices = [slice(start, start + rows) for start in range(0, len(targets), rows)]
    return TokenScores.join([_score(baseline[part], candidate[part], targets[part]) for part in slices])


def _score(baseline: LogitsArray, candidate: LogitsArray, targets: NDArray[np.int64]) -> TokenScores:
    rows = np.arange(len(targets))
    base, cand = _log_softmax(baseline), _log_softmax(candidate)  # [n, vocab]
    kl = np.einsum("nv,nv->n", np.exp(base), base - cand)
    return TokenScores(
        baseline_nll=-base[rows, targets],
        candidate_nll=-cand[rows, targets],
        kl=np.maximum(kl, 0.0),  # rounding may leave -1e-17
        agrees=baseline.argmax(axis=1) == candidate.argmax(axis=1),
    )


def _log_softmax(logits: LogitsArray) -> FloatArray:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted
