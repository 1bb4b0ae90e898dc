"""Rotary position embedding: frequencies for each kind of scaling, and the cos and sin tables.

The arithmetic is that of transformers' modeling_rope_utils.py, frequencies and angles in float32, so that a table
holds the values that the model was trained with. Sources: RoFormer (arXiv 2104.09864), position interpolation (linear,
2306.15595), YaRN (2309.00071), LongRoPE (2402.13753), Llama 3.1 (2407.21783).
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ingot.errors import UsageError

FloatArray = NDArray[np.float32]
RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"]
MAX_TABLE_BYTES = 1 << 30
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn", "longrope", "proportional")


@dataclass(frozen=True)
class RopeParameters:
    """Rotation of queries and keys in one kind of layer.

    rotary_dim               leading elements of each head that are rotated; head_dim unless partial
    max_positions            max_position_embeddings of the model
    original_max_positions   longest sequence before the scaling was applied (llama3, yarn, longrope)
    factor                   ratio of scaled to original context; None for yarn and longrope: computed from the two
    attention_factor         factor of cos and sin; None: the one of the kind's paper
    rotated                  share of the frequencies that are not 0 (proportional)
    query_scale              queries are multiplied by 1 + query_scale * log(1 + position // original_max_positions)
    short_factors            per frequency, for contexts up to original_max_positions; long_factors: for longer ones
    long_attention_factor    attention_factor of these longer contexts; None: the same
    """

    kind: RopeKind
    theta: float
    rotary_dim: int
    max_positions: int
    original_max_positions: int
    factor: float | None = None
    attention_factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    rotated: float = 1.0
    query_scale: float = 0.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    long_attention_factor: float | None = None

    @property
    def default_context_tokens(self) -> int:
        """max_positions; for longrope original_max_positions, up to which the short factors apply."""
        return min(self.original_max_positions, self.max_positions) if self.kind == "longrope" else self.max_positions

    @property
    def scaling(self) -> float:
        """`factor`, or the ratio of the context lengths where it is absent."""
        return self.factor if self.factor is not None else self.max_positions / self.original_max_positions


def rope_tables(parameters: RopeParameters, context_tokens: int) -> tuple[FloatArray, FloatArray]:
    """Cos and sin, each [context_tokens, rotary_dim / 2], scaled by the attention factor.

    longrope has two sets of frequencies. transformers chooses one per call by the longest sequence in the batch, which
    would make a token's key depend on the other requests and on how long its sequence grows. Here the choice is made
    once: short up to original_max_positions of context, long beyond.
    """
    if context_tokens > parameters.max_positions:
        raise UsageError(
            f"context_tokens is {context_tokens}; the model's max_position_embeddings allow at most "
            f"{parameters.max_positions}"
        )
    table_bytes = context_tokens * parameters.rotary_dim // 2 * 4
    if table_bytes > MAX_TABLE_BYTES:
        raise UsageError(
            f"a context of {context_tokens} tokens needs rope tables of {table_bytes} bytes, at most {MAX_TABLE_BYTES} "
            "are allowed; give a smaller context_tokens"
        )
    frequencies = inverse_frequencies(parameters, context_tokens)
    angles = np.outer(np.arange(context_tokens, dtype=np.float32), frequencies)  # [context_tokens, rotary_dim / 2]
    scale = np.float32(attention_factor(parameters, context_tokens))
    return np.cos(angles) * scale, np.sin(angles) * scale


def query_scales(parameters: RopeParameters, context_tokens: int) -> FloatArray | None:
    """Factor of the query at each position (Llama 4's temperature), [context_tokens]; None where all are 1."""
    periods = np.floor_divide(np.arange(context_tokens), parameters.original_max_positions)
    if not parameters.query_scale or not periods.any():
        return None
    return (1 + np.float32(parameters.query_scale) * np.log1p(periods.astype(np.float32))).astype(np.float32)


def inverse_frequencies(parameters: RopeParameters, context_tokens: int) -> FloatArray:
    """Radians per position, [rotary_dim / 2]."""
    exponents = np.arange(0, parameters.rotary_dim, 2, dtype=np.float32) / np.float32(parameters.rotary_dim)
    wavelengths = np.power(np.float64(parameters.theta), exponents.astype(np.float64)).astype(np.float32)
    plain = np.float32(1.0) / wavelengths
    match parameters.kind:
        case "default":
            return plain
        case "linear":
            return plain / np.float32(parameters.scaling)
        case "proportional":
            turning = int(parameters.rotated * parameters.rotary_dim // 2)
            return np.where(np.arange(len(plain)) < turning, plain, 0).astype(np.float32) / np.float32(
                parameters.scaling
            )
        case "llama3":
            return _llama3(parameters, plain)
        case "yarn":
            return _yarn(parameters, plain)
        case "longrope":
            long = context_tokens > parameters.original_max_positions
            factors = parameters.long_factors if long else parameters.short_factors
            return np.float32(1.0) / (np.array(factors, np.float32) * wavelengths)


def attention_factor(parameters: RopeParameters, context_tokens: int = 0) -> float:
    """Factor of cos and sin: 1 except for yarn and longrope."""
    if parameters.kind not in ("yarn", "longrope"):
        return 1.0
    if parameters.long_attention_factor is not None and context_tokens > parameters.original_max_positions:
        return parameters.long_attention_factor
    if parameters.attention_factor is not None:
        return parameters.attention_factor
    factor = parameters.scaling
    if parameters.kind == "longrope":
        original = parameters.original_max_positions
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    if parameters.mscale and parameters.mscale_all_dim:
        return yarn_scale(factor, parameters.mscale) / yarn_scale(factor, parameters.mscale_all_dim)
    return yarn_scale(factor, 1.0)


def yarn_scale(factor: float, mscale: float) -> float:
    """YaRN's factor of queries and of keys, whose share of a larger context it is; 1 without one."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(parameters: RopeParameters, plain: FloatArray) -> FloatArray:
    """Divide the frequencies of long waves by the factor, keep those of short ones, blend those between."""
    factor, original = np.float32(parameters.scaling), np.float32(parameters.original_max_positions)
    low, high = parameters.low_freq_factor, parameters.high_freq_factor
    waves = np.float32(2 * math.pi) / plain
    blend = (original / waves - np.float32(low)) / np.float32(high - low)
    blended = (np.float32(1.0) - blend) * plain / factor + blend * plain
    return np.where(waves > original / low, plain / factor, np.where(waves < original / high, plain, blended)).astype(
        np.float32
    )


def _yarn(parameters: RopeParameters, plain: FloatArray) -> FloatArray:
    """Keep high frequencies, divide low ones by the factor, with a linear ramp between them."""
    dim = parameters.rotary_dim
    low, high = (_yarn_dimension(parameters, turns) for turns in (parameters.beta_fast, parameters.beta_slow))
    if parameters.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # the ramp becomes a step, as in transformers
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    slowed = plain / np.float32(parameters.scaling)
    blended: FloatArray = (slowed * ramp + plain * (np.float32(1.0) - ramp)).astype(np.float32)
    return blended


def _yarn_dimension(parameters: RopeParameters, turns: float) -> float:
    """The dimension that makes `turns` full turns over the original context."""
    positions = parameters.original_max_positions
    return parameters.rotary_dim * math.log(positions / (turns * 2 * math.pi)) / (2 * math.log(parameters.theta))
