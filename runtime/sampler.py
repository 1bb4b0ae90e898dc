"""From one row of logits to one token: penalties, warpers, and a draw that depends on seed and position alone.

The order is that of transformers' generation: repetition and presence penalty, temperature, top-k, top-p, min-p.
To add a warper, narrow the candidates in `_candidates` and prove the surviving set in tests/oracle.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ingot.errors import EngineError
from ingot.runtime.sampling import SamplingParams

FloatRow = NDArray[np.float32]
TokenIds = NDArray[np.int64]
Probabilities = NDArray[np.float64]

# Top-p looks at about this many likeliest tokens, and at more only when they are not enough: sorting is dear.
_TOP_P_HEADS = (1024, 16384)

_UNIFORMS_AT_ONCE = 32  # making one costs as much as making these

_LARGEST = float(np.finfo(np.float32).max)
_SMALLEST = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class TokenLogprob:
    """A token and its log-probability (natural) in the model's own distribution."""

    token_id: int
    logprob: float


@dataclass(frozen=True)
class SampledToken:
    """The chosen token; with `logprobs` set, its log-probability and the likeliest tokens, likeliest first.

    Log-probabilities are those of the model: before penalties, temperature and warpers.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()


class Sampler:
    """Chooses the tokens of one request. Holds no state that a draw could change: calls may be repeated.

    `seed` is that of the parameters, or was drawn once here: recorded so that the output can be made again.
    """

    def __init__(self, params: SamplingParams, prompt_tokens: Sequence[int]) -> None:
        self.params = params
        self.seed = secrets.randbits(64) if params.seed is None else int(params.seed)
        self._prompt_tokens = np.unique(np.asarray(prompt_tokens, dtype=np.int64))
        self._uniforms: tuple[float, ...] = ()  # of the tokens from `_first_uniform` on, made when they are asked for
        self._first_uniform = 0

    def uniform(self, index: int) -> float:
        """The number in [0, 1) that decides token `index` of the output."""
        if not 0 <= index - self._first_uniform < len(self._uniforms):
            self._first_uniform, self._uniforms = index, _uniforms(self.seed, index, _UNIFORMS_AT_ONCE)
        return self._uniforms[index - self._first_uniform]

    def sample(self, logits: FloatRow, generated: Sequence[int]) -> SampledToken:
        """Choose the token that follows `generated` (the tokens after the prompt) from logits [vocab].

        Raises EngineError when the logits hold NaN or no finite maximum.
        """
        likeliest = _finite_argmax(logits)
        scores = self._penalised(logits, generated)
        if not self.params.is_greedy:
            token_id = draw_token(scores, self.params, self.uniform(len(generated)))
        else:
            token_id = likeliest if scores is logits else int(scores.argmax())
        return _with_logprobs(logits, token_id, self.params.logprobs)

    def _penalised(self, logits: FloatRow, generated: Sequence[int]) -> FloatRow:
        """Logits after both penalties; the very same array when there are none."""
        if self.params.repetition_penalty == 1 and self.params.presence_penalty == 0:
            return logits
        repetition = min(max(self.params.repetition_penalty, _SMALLEST), _LARGEST)
        presence = min(max(self.params.presence_penalty, -_LARGEST), _LARGEST)
        scores = logits.copy()
        own = np.asarray(generated, dtype=np.int64)
        seen = np.concatenate([self._prompt_tokens, own])
        # A token that occurs twice is read before it is written, so that it is penalised once.
        with np.errstate(over="ignore"):  # an extreme penalty ends at the largest number
            scores[seen] = np.where(scores[seen] > 0, scores[seen] / repetition, scores[seen] * repetition)
            scores[own] = scores[own] - presence
        # A difference of infinities would be NaN; a token that the model forbids stays at minus infinity.
        return np.clip(scores, -_LARGEST, _LARGEST, out=scores, where=np.isfinite(logits))


def draw_token(scores: FloatRow, params: SamplingParams, uniform: float) -> int:
    """The surviving token of scores [vocab], in order of token id, at whose share of the total `uniform` falls."""
    token_ids, weights = _candidates(scores, params)
    cumulative = weights.cumsum()
    point = min(uniform * cumulative[-1], np.nextafter(cumulative[-1], 0))
    return int(token_ids[cumulative.searchsorted(point, side="right")])


def surviving_tokens(scores: FloatRow, params: SamplingParams) -> TokenIds:
    """Token ids that temperature, top-k, top-p and min-p leave to draw from, ascending, for scores [vocab]."""
    return _candidates(scores, params)[0]


def _candidates(scores: FloatRow, params: SamplingParams) -> tuple[TokenIds, Probabilities]:
    """Surviving token ids, ascending, and their weights: likeliest 1, in double precision."""
    token_ids = _at_least_kth(scores, params.top_k)
    weights = _weights(scores[token_ids] if params.top_k else scores, params.temperature)
    if params.top_p == 1 and params.min_p == 0:
        return token_ids, weights
    mask = weights >= params.min_p  # the likeliest weighs 1
    if params.top_p < 1:
        mask &= _in_top_p(weights, params.top_p)
    return token_ids[mask], weights[mask]


def _weights(scores: FloatRow, temperature: float) -> Probabilities:
    """exp((score - highest) / temperature) in double precision."""
    shifted = scores.astype(np.float64)
    shifted -= shifted.max()
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the likeliest to -inf, as it should
        shifted /= temperature
    return np.exp(shifted, out=shifted)


def _at_least_kth(values: NDArray[np.floating], k: int) -> TokenIds:
    """Indices of the k largest values and of whatever ties with the k-th; all of them for k = 0."""
    if k == 0 or k >= len(values):
        return np.arange(len(values))
    return np.flatnonzero(values >= np.partition(values, -k)[-k])


def _in_top_p(weights: Probabilities, top_p: float) -> NDArray[np.bool_]:
    """Mask of the fewest likeliest tokens that hold at least `top_p` of the total; ties go to the lowest id."""
    enough = top_p * weights.sum()
    heads = (_at_least_kth(weights, size) for size in _TOP_P_HEADS)
    head = next((head for head in heads if weights[head].sum() >= enough), np.arange(len(weights)))
    ranked = head[np.argsort(-weights[head], kind="stable")]
    before = np.concatenate([[0.0], weights[ranked].cumsum()[:-1]])  # weight of all likelier tokens
    mask = np.zeros(len(weights), dtype=np.bool_)
    mask[ranked[before < enough]] = True
    return mask


def _uniforms(seed: int, index: int, count: int) -> tuple[float, ...]:
    """Numbers in [0, 1) of tokens `index` and following under `seed`: Philox 4x64 (Salmon et al., 2011).

    The index is its counter: counting instead of stepping makes a draw independent of batch mates, preemption and
    repeated calls. Each count gives four numbers, of which the first is taken.
    """
    raw = np.random.Philox(key=seed, counter=index).random_raw(4 * count)[::4]
    return tuple(((raw >> np.uint64(11)) * 2.0**-53).tolist())


def _finite_argmax(logits: FloatRow) -> int:
    """Lowest token id of the largest logit; argmax stops at a NaN, so that looking at the result is enough."""
    best = int(logits.argmax())
    if not np.isfinite(logits[best]):
        raise EngineError(
            f"the logit of token {best} is {logits[best]}; logits must be finite to choose a token: "
            "check the checkpoint's weights, or build with less quantization"
        )
    return best


def _with_logprobs(logits: FloatRow, token_id: int, count: int | None) -> SampledToken:
    if count is None:
        return SampledToken(token_id)
    wide = logits.astype(np.float64)
    logprobs = wide - wide.max()
    logprobs -= np.log(np.exp(logprobs).sum())
    best = _at_least_kth(logits, count) if count else np.empty(0, dtype=np.int64)
    ranked = best[np.argsort(-wide[best], kind="stable")][:count]
    top = tuple(TokenLogprob(int(i), float(logprobs[i])) for i in ranked)
    return SampledToken(token_id, float(logprobs[token_id]), top)
