"""What a device needs to choose tokens itself: a row of numbers for each request, and which requests it can serve.

To let the device do more, add an array to `TokenDraws`, fill it here, and drop the condition in `chosen_on_device`.
"""

from collections.abc import Sequence

import numpy as np

from ingot.runtime.batch import FloatArray, TokenDraws
from ingot.runtime.sampler import Sampler
from ingot.runtime.sampling import SamplingParams

_FLOAT32 = np.finfo(np.float32)
_LARGEST_TOP_K = np.iinfo(np.int32).max
_BELOW_ONE = np.nextafter(np.float32(1), np.float32(0))


def chosen_on_device(params: SamplingParams) -> bool:
    """Whether `TokenDraws` says all that these parameters ask for; the host must see the logits otherwise."""
    no_penalty = params.repetition_penalty == 1 and params.presence_penalty == 0
    return no_penalty and params.min_p == 0 and params.logprobs is None


def token_draws(samplers: Sequence[Sampler], indices: Sequence[int]) -> TokenDraws:
    """How to choose token `indices[row]` of the output of each row's request."""
    params = [sampler.params for sampler in samplers]
    if all(one.is_greedy for one in params):
        zeros = np.zeros(len(params), np.float32)
        return TokenDraws(zeros, np.zeros(len(params), np.int32), np.ones(len(params), np.float32), zeros)
    numbers = [
        0.0 if sampler.params.is_greedy else sampler.uniform(index)
        for sampler, index in zip(samplers, indices, strict=True)
    ]
    top_ps = np.array([one.top_p for one in params], np.float64)
    return TokenDraws(
        temperatures=_temperatures(params),
        top_ks=np.array([min(one.top_k, _LARGEST_TOP_K) for one in params], np.int32),
        top_ps=np.maximum(top_ps, _FLOAT32.tiny).astype(np.float32),
        uniforms=np.minimum(np.array(numbers, np.float32), _BELOW_ONE),
    )


def _temperatures(params: Sequence[SamplingParams]) -> FloatArray:
    """Temperatures [R], as near as float32 comes: never 0, which is greedy, for one that is not."""
    wide = np.array([one.temperature for one in params], np.float64)
    np.clip(wide, _FLOAT32.tiny, _FLOAT32.max, out=wide, where=wide > 0)
    return wide.astype(np.float32)
