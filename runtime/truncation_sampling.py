"""The choice of a token from scores: temperature, top-k, top-p and min-p, then one random number.

A token's weight is 2^44 exp((score - highest) / temperature), rounded to a whole number: the most likely token weighs
2^44, and one that is less likely by a factor of 2^45 is never sampled. Whole numbers add up exactly in any order, so
the token is the same on every CPU and however the work is divided. This module defines it, in numpy; the C code in
`cpu/native/sample_tokens.c` computes the same token many times as fast.
"""

import math
from dataclasses import dataclass, field
from struct import pack

import numpy as np

from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.forward_batch import FloatArray, Int64Array

UNIT_BITS = 44  # 2^19 tokens that are all as likely still add up to less than 2^63
_UNIT = 2.0**UNIT_BITS
_LEAST_EXPONENT = -48.0  # below which a weight is rounded to 0
_LOG2_E = 1.4426950408889634
_LARGEST = float(np.finfo(np.float64).max)
_LARGEST_TOP_K = np.iinfo(np.int64).max
_UNIFORM_BITS = 53

# 2^f = 1 + f (C[0] + f (C[1] + ...)) for f from -1/2 to 1/2, to 6e-16: interpolation at the Chebyshev nodes
_POWER = tuple(
    map(
        float.fromhex,
        (
            "0x1.62e42fefa39f7p-1",
            "0x1.ebfbdff82c590p-3",
            "0x1.c6b08d7044119p-5",
            "0x1.3b2ab6fba385fp-7",
            "0x1.5d87fe908f88ap-10",
            "0x1.4309130378460p-13",
            "0x1.ffcb76789860fp-17",
            "0x1.62bfe46117445p-20",
            "0x1.b6571de2f2351p-24",
            "0x1.e5e9f548e5725p-28",
        ),
    )
)


@dataclass(frozen=True)
class TokenChoice:
    """Parameters of a choice, as numpy and C need them.

    factor   log2(e) / temperature, finite; 0 takes the most likely token (ties go to the lowest id)
    top_p    keep the fewest most likely tokens that reach this share of the weight; 1 keeps all
    top_k    keep the k most likely tokens, and those as likely as the last of them; 0 keeps all
    least    weight that a token must have: that of min-p
    packed   these as `struct choice` of sample_tokens.c
    """

    factor: float
    top_p: float = 1.0
    top_k: int = 0
    least: int = 0
    packed: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "packed", pack("=ddqq", self.factor, self.top_p, self.top_k, self.least))

    @classmethod
    def of(cls, params: SamplingParams) -> "TokenChoice":
        """The choice that sampling parameters describe."""
        if params.is_greedy:
            return cls(0.0)
        factor = min(_LOG2_E / max(float(params.temperature), _LOG2_E / _LARGEST), _LARGEST)
        top_k = min(int(params.top_k), _LARGEST_TOP_K)
        return cls(factor, float(params.top_p), top_k, math.ceil(float(params.min_p) * _UNIT))


def choose_token(scores: FloatArray, choice: TokenChoice, uniform: float) -> int:
    """Invert the cumulative distribution of the surviving tokens, in order of id, at `uniform`; scores are [vocab].

    `uniform` is in [0, 1) and counts in units of 2^-53. Returns -1 if a score is NaN or none is a finite maximum.
    """
    best = int(scores.argmax())  # the index of a NaN, if there is one
    if not np.isfinite(scores[best]) or not choice.factor:
        return best if np.isfinite(scores[best]) else -1
    token_ids, weights = _candidates(scores, choice)
    cumulative = weights.cumsum()
    point = int(uniform * 2.0**_UNIFORM_BITS) * int(cumulative[-1]) >> _UNIFORM_BITS
    return int(token_ids[cumulative.searchsorted(point, side="right")])


def surviving_tokens(scores: FloatArray, params: SamplingParams) -> Int64Array:
    """Token ids that temperature, top-k, top-p and min-p leave to sample from, ascending, for scores [vocab]."""
    return _candidates(scores, TokenChoice.of(params))[0]


def token_weights(scores: FloatArray, factor: float) -> Int64Array:
    """Weights of scores [count]; the largest weighs 2^44."""
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf, as it should
        exponents = (scores.astype(np.float64) - float(scores.max())) * factor
    np.maximum(exponents, _LEAST_EXPONENT, out=exponents)
    whole = np.rint(exponents)
    exponents -= whole
    power = np.full(len(scores), _POWER[-1])
    for coefficient in (*_POWER[-2::-1], 1.0):
        power *= exponents
        power += coefficient
    weights: Int64Array = np.rint(np.ldexp(power, whole.astype(np.int32)) * _UNIT).astype(np.int64)
    return weights


def _candidates(scores: FloatArray, choice: TokenChoice) -> tuple[Int64Array, Int64Array]:
    """Surviving token ids, ascending, and their weights."""
    token_ids = at_least_kth(scores, choice.top_k)
    weights = token_weights(scores[token_ids], choice.factor)
    if choice.top_p == 1 and choice.least == 0:
        return token_ids, weights
    mask = weights >= choice.least
    if choice.top_p < 1:
        mask &= _in_top_p(weights, choice.top_p)
    return token_ids[mask], weights[mask]


def at_least_kth(values: FloatArray, k: int) -> Int64Array:
    """Indices of the k largest values and of all ties with the k-th; all indices for k = 0."""
    if k == 0 or k >= len(values):
        return np.arange(len(values))
    return np.flatnonzero(values >= np.partition(values, -k)[-k])


def _in_top_p(weights: Int64Array, top_p: float) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    """Mask of the fewest most likely tokens that reach `top_p` of the total; ties go to the lowest id."""
    total = int(weights.sum())
    enough = min(math.ceil(float(total) * top_p), total)
    likely = np.flatnonzero(
        weights >= (total - enough) // len(weights)
    )  # all lighter ones weigh less than what is left
    ranked = likely[np.argsort(-weights[likely], kind="stable")]
    before = weights[ranked].cumsum() - weights[ranked]  # weight of all more likely tokens
    mask = np.zeros(len(weights), dtype=np.bool_)
    mask[ranked[before < enough]] = True
    return mask
