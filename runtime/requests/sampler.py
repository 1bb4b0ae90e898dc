"""Sampling: from one row of logits to one token. Tokens depend on logits, parameters, seed and position alone.

The order of operations is that of transformers' generation: penalties (repetition, presence, frequency), biases,
forbidden tokens and the mask of a constraint here, then temperature, top-k, top-p and min-p in `truncation_sampling`.
To add a warper, narrow the candidates there and in `cpu/native/sample_tokens.c`, and compare the surviving set in
tests/oracle. Every token that the host samples is chosen by `sample_tokens`, alone or with the other rows of its step:
the same token either way.

A pipelined executor samples on its device from `SamplingArrays`. To let devices do more, add an array there, fill it in
`sampling_arrays`, and drop the condition in `sampled_on_device`.
"""

import secrets
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from hashlib import sha256

import numpy as np
from numpy.random import Philox

from ingot.errors import EngineError
from ingot.runtime.asking.outputs import SampledToken, TokenLogprob
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.constraints.matcher import ConstraintFailed, Mask
from ingot.runtime.cpu.native.sample_tokens import mask_logits, sample_tokens
from ingot.runtime.forward_batch import FloatArray, Int64Array, SamplingArrays
from ingot.runtime.truncation_sampling import TokenChoice, at_least_kth

_UNIFORMS_AT_ONCE = 32  # one costs as much to generate as these

_FLOAT32 = np.finfo(np.float32)
_LARGEST_TOP_K = np.iinfo(np.int32).max
_BELOW_ONE = np.nextafter(np.float32(1), np.float32(0))
_LARGEST, _SMALLEST = float(_FLOAT32.max), float(_FLOAT32.tiny)


class NonFiniteLogits(EngineError):
    """No token can be sampled: the logits contain NaN or have no finite maximum."""

    def __init__(self, found: str) -> None:
        super().__init__(
            f"{found}; logits must be finite to sample a token: check the checkpoint's weights, or build with less"
            " quantization"
        )


class NothingAllowed(EngineError):
    """No token can be sampled: those that the parameters allow have no probability."""

    field = "allowed_token_ids"

    def __init__(self, *, has_mask: bool) -> None:
        others = "the constraint, " if has_mask else ""
        super().__init__(
            f"the model gives the tokens that {others}allowed_token_ids and min_tokens leave no probability"
        )


class Sampler:
    """Samples the tokens of one request. Sampling changes no state, so calls may be repeated.

    `seed` is that of the parameters or, if they have none, a random one; with it the output can be reproduced.
    `end_tokens` are what `min_tokens` forbids at first.
    """

    def __init__(self, params: SamplingParams, prompt_tokens: Sequence[int], end_tokens: Collection[int] = ()) -> None:
        self.params = params
        self.choice = TokenChoice.of(params)
        self.seed = secrets.randbits(64) if params.seed is None else int(params.seed)
        penalized = prompt_tokens if params.repetition_penalty != 1 else ()
        self._prompt_tokens = np.array([*set(penalized)], np.int64)
        biases = dict(params.logit_bias)
        self._biased_tokens, self._biases = np.array([*biases], np.int64), np.array([*biases.values()], np.float32)
        self._end_tokens = np.array([*end_tokens], np.int64)
        self._allowed = None if params.allowed_token_ids is None else np.array(params.allowed_token_ids, np.int64)
        self._uniforms: tuple[float, ...] = ()  # of the tokens from `_first_uniform` on, generated on demand
        self._first_uniform = 0

    def uniform(self, index: int) -> float:
        """The uniform random number in [0, 1) for token `index` of the output."""
        if not 0 <= index - self._first_uniform < len(self._uniforms):
            self._first_uniform, self._uniforms = index, _uniforms(self.seed, index, _UNIFORMS_AT_ONCE)
        return self._uniforms[index - self._first_uniform]

    def sample(self, logits: FloatArray, generated: Sequence[int], mask: Mask | None = None) -> SampledToken:
        """Sample the token that follows `generated` (the tokens after the prompt) from logits [vocab].

        With a mask, from the tokens that it allows. Raises NonFiniteLogits, and ConstraintFailed where none is allowed.
        """
        token_id = self.choose(logits, generated, mask)
        count = 0 if self.params.logprobs is None and self.params.ranks_samples else self.params.logprobs
        return _with_logprobs(logits, token_id, count)

    def known(self, logits: FloatArray, token_id: int) -> SampledToken:
        """A token of the prompt with its log-probability, from the logits [vocab] before it. Raises NonFiniteLogits."""
        _require_finite(logits)
        return _with_logprobs(logits, token_id, self.params.prompt_logprobs)

    def choose(self, logits: FloatArray, generated: Sequence[int], mask: Mask | None = None) -> int:
        """The token of `sample` alone."""
        if self.params.changes_logits or mask is not None:
            _require_finite(logits)
        scores = self._adjusted(logits, generated)
        if mask is not None:
            scores = masked_scores(scores, mask)
        uniform = 0.0 if self.params.is_greedy else self.uniform(len(generated))
        (token_id,) = sample_tokens(scores[None], [self.choice], [uniform])
        if token_id < 0:
            _require_finite(logits)
            if mask is None or self.params.forbids_tokens:
                raise NothingAllowed(has_mask=mask is not None)
            raise ConstraintFailed("it allows no token that the model has")
        return token_id

    def _adjusted(self, logits: FloatArray, generated: Sequence[int]) -> FloatArray:
        """Logits after penalties and biases, and without forbidden tokens; the same array where nothing changes."""
        if not self.params.changes_logits:
            return logits
        scores = self._penalized(logits, generated)
        if len(generated) < self.params.min_tokens:
            scores[self._end_tokens] = -np.inf
        if self._allowed is None:
            return scores
        kept = np.full_like(scores, -np.inf)
        kept[self._allowed] = scores[self._allowed]
        return kept

    def _penalized(self, logits: FloatArray, generated: Sequence[int]) -> FloatArray:
        """A copy of the logits after penalties and biases."""
        scores = logits.copy()
        uses = Counter(generated)  # np.unique would import numpy.ma, 10 ms in the first request
        own, counts = np.array([*uses], np.int64), np.array([*uses.values()], np.int64)
        with np.errstate(over="ignore"):  # an extreme penalty saturates at the largest number
            if self.params.repetition_penalty != 1:
                self._penalize_repetition(scores, np.concatenate([self._prompt_tokens, own]))
            frequency = np.clip(counts * self.params.frequency_penalty, -_LARGEST, _LARGEST).astype(np.float32)
            scores[own] = scores[own] - min(max(self.params.presence_penalty, -_LARGEST), _LARGEST) - frequency
            scores[self._biased_tokens] += self._biases
        # A difference of infinities would be NaN. A token that the model forbids stays at minus infinity.
        return np.clip(scores, -_LARGEST, _LARGEST, out=scores, where=np.isfinite(logits))

    def _penalize_repetition(self, scores: FloatArray, seen: Int64Array) -> None:
        """A token that occurs twice is read before it is written, so that it is penalized once."""
        penalty = min(max(self.params.repetition_penalty, _SMALLEST), _LARGEST)
        scores[seen] = np.where(scores[seen] > 0, scores[seen] / penalty, scores[seen] * penalty)


def masked_scores(scores: FloatArray, mask: Mask) -> FloatArray:
    """A copy of scores [vocab] with minus infinity for the tokens that a mask forbids."""
    masked = np.empty(len(scores), np.float32)
    mask_logits(scores, mask, masked)
    return masked


def choice_seed(seed: int, index: int) -> int:
    """Seed of choice `index` of a request with this seed: its own for choice 0, a hash of both for the others.

    The hash is the first 8 bytes, little-endian, of SHA-256 over the decimal text "SEED INDEX". Each choice equals the
    request for one completion with the seed of that choice.
    """
    if index == 0:
        return seed
    return int.from_bytes(sha256(f"{seed} {index}".encode()).digest()[:8], "little")


def choice_params(params: SamplingParams) -> list[SamplingParams]:
    """The parameters of each choice that is sampled, with its seed."""
    if params.num_samples == 1:
        return [params]
    seed = secrets.randbits(64) if params.seed is None else int(params.seed)
    return [replace(params, seed=choice_seed(seed, index)) for index in range(params.num_samples)]


def sampled_in_batch(params: SamplingParams) -> bool:
    """Whether a token is chosen from the logits as they are, and they are not reported: together with other rows."""
    reports_logprobs = params.logprobs is not None or params.ranks_samples
    return not params.changes_logits and not reports_logprobs and params.prompt_logprobs is None


def sampled_on_device(params: SamplingParams) -> bool:
    """Whether `SamplingArrays` can express these parameters; otherwise the host samples, from the logits."""
    return sampled_in_batch(params) and params.min_p == 0 and params.constraint is None


def sampling_arrays(samplers: Sequence[Sampler], indices: Sequence[int]) -> SamplingArrays:
    """Arrays to sample token `indices[row]` of the output of each row's request."""
    params = [sampler.params for sampler in samplers]
    if all(one.is_greedy for one in params):
        zeros = np.zeros(len(params), np.float32)
        return SamplingArrays(zeros, np.zeros(len(params), np.int32), np.ones(len(params), np.float32), zeros)
    uniforms = [
        0.0 if sampler.params.is_greedy else sampler.uniform(index)
        for sampler, index in zip(samplers, indices, strict=True)
    ]
    top_ps = np.array([one.top_p for one in params], np.float64)
    return SamplingArrays(
        temperatures=_temperatures(params),
        top_ks=np.array([min(one.top_k, _LARGEST_TOP_K) for one in params], np.int32),
        top_ps=np.maximum(top_ps, _FLOAT32.tiny).astype(np.float32),
        uniforms=np.minimum(np.array(uniforms, np.float32), _BELOW_ONE),
    )


def _uniforms(seed: int, index: int, count: int) -> tuple[float, ...]:
    """Numbers in [0, 1) for tokens `index` and following under `seed`: Philox 4x64 (Salmon et al., 2011).

    The token's index is the generator's counter, so a number does not depend on the rest of the batch, preemption or
    repeated calls. Each count gives four numbers, of which the first is used.
    """
    raw = Philox(key=seed, counter=index).random_raw(4 * count)[::4]
    return tuple(((raw >> np.uint64(11)) * 2.0**-53).tolist())


def _require_finite(logits: FloatArray) -> None:
    """Raise NonFiniteLogits if a logit is NaN or the largest is not finite. argmax returns a NaN if there is one."""
    best = int(logits.argmax())
    if not np.isfinite(logits[best]):
        raise NonFiniteLogits(f"the logit of token {best} is {logits[best]}")


def _with_logprobs(logits: FloatArray, token_id: int, count: int | None) -> SampledToken:
    if count is None:
        return SampledToken(token_id)
    wide = logits.astype(np.float64)
    logprobs = wide - wide.max()
    logprobs -= np.log(np.exp(logprobs).sum())
    best = at_least_kth(logits, count) if count else np.empty(0, dtype=np.int64)
    ranked = best[np.argsort(-wide[best], kind="stable")][:count]
    top = tuple(TokenLogprob(int(i), float(logprobs[i])) for i in ranked)
    return SampledToken(token_id, float(logprobs[token_id]), top)


def _temperatures(params: Sequence[SamplingParams]) -> FloatArray:
    """Temperatures [R] in float32. One above 0 is never rounded to 0, which would be greedy."""
    wide = np.array([one.temperature for one in params], np.float64)
    np.clip(wide, _FLOAT32.tiny, _FLOAT32.max, out=wide, where=wide > 0)
    return wide.astype(np.float32)
