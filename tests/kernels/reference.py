"""References of the kernels in numpy and float64, and a paged KV pool for them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Float64Array = NDArray[np.float64]
FLOAT, FP8, INT8, INT4 = range(4)
KINDS = ("float16", "fp8", "int8", "int4")
POOL_DTYPES = {FLOAT: torch.float16, FP8: torch.float8_e4m3fn, INT8: torch.int8, INT4: torch.uint8}
# Largest error of a stored vector over its largest magnitude: half a step of the precision.
STEPS = {FLOAT: 2.0**-11, FP8: 2.0**-4, INT8: 0.5 / 127 * 1.01, INT4: 0.5 / 7 * 1.01}


def numpy64(tensor: torch.Tensor) -> Float64Array:
    """Convert a tensor of any dtype to float64."""
    array: Float64Array = tensor.to(torch.float64).numpy()
    return array


def rope(x: Float64Array, positions: NDArray[np.int64], cos: Float64Array, sin: Float64Array) -> Float64Array:
    """Rotate the first 2 * cos.shape[1] dims of x [tokens, heads, dim]."""
    half = cos.shape[1]
    c, s = cos[positions][:, None], sin[positions][:, None]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([first * c - second * s, second * c + first * s, rest], axis=-1)


def attend(
    query: Float64Array,
    keys: Float64Array,
    values: Float64Array,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    sinks: Float64Array | None = None,
) -> Float64Array:
    """One query [heads, dim] over keys and values [tokens, kv heads, dim]: [heads, dim]."""
    if window:
        keys, values = keys[-window:], values[-window:]
    group = len(query) // keys.shape[1]
    scores = np.einsum("hd,nhd->hn", query, np.repeat(keys, group, axis=1)) * scale
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    largest = scores.max(axis=1, keepdims=True)
    if sinks is not None:
        largest = np.maximum(largest, sinks[:, None])
    shares = np.exp(scores - largest)
    total = shares.sum(axis=1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None] - largest)
    found: Float64Array = np.einsum("hn,nhd->hd", shares / total, np.repeat(values, group, axis=1))
    return found


@dataclass
class Pool:
    """One layer of a paged pool: codes [blocks, 2, kv heads, tokens, width], scales [blocks, 2, kv heads, tokens]."""

    codes: torch.Tensor
    scales: torch.Tensor
    kind: int
    dim: int

    @classmethod
    def empty(cls, blocks: int, kv_heads: int, tokens: int, dim: int, kind: int, dtype: Any = None) -> "Pool":
        width = dim // 2 if kind == INT4 else dim
        codes = torch.zeros(blocks, 2, kv_heads, tokens, width, dtype=dtype or POOL_DTYPES[kind])
        return cls(codes, torch.ones(blocks, 2, kv_heads, tokens, dtype=torch.float16), kind, dim)

    @classmethod
    def random(cls, rng: np.random.Generator, shape: tuple[int, int, int, int], kind: int, dtype: Any = None) -> "Pool":
        """Every slot filled: floats around 0, or codes of the whole range with scales around 1 / largest code."""
        pool = cls.empty(*shape, kind=kind, dtype=dtype)
        size = tuple(pool.codes.shape)
        if kind in (FLOAT, FP8):
            pool.codes = torch.from_numpy(rng.standard_normal(size)).to(pool.codes.dtype)
        else:
            low, high = (-127, 128) if kind == INT8 else (0, 256)
            pool.codes = torch.from_numpy(rng.integers(low, high, size)).to(pool.codes.dtype)
        largest = {FLOAT: 1.0, FP8: 1.0, INT8: 50.0, INT4: 4.0}[kind]
        scales = rng.uniform(0.5, 1.5, tuple(pool.scales.shape)) / largest
        pool.scales = torch.from_numpy(scales).to(torch.float16)
        return pool

    @property
    def strides(self) -> dict[str, int]:
        """The kernels' arguments."""
        _, _, kv_heads, tokens, width = self.codes.shape
        return {
            "block_stride": 2 * kv_heads * tokens * width,
            "head_stride": tokens * width,
            "value_offset": kv_heads * tokens * width,
            "scale_block_stride": 2 * kv_heads * tokens,
            "scale_value_offset": kv_heads * tokens,
        }

    def vectors(self) -> Float64Array:
        """Decode the pool: [blocks, 2, kv heads, tokens, dim]."""
        if self.kind == INT4:
            packed = self.codes.to(torch.int32)
            halves = torch.stack([((packed & 15) ^ 8) - 8, ((packed >> 4) ^ 8) - 8], dim=-1)
            values = numpy64(halves).reshape(*self.codes.shape[:-1], self.dim)
        else:
            values = numpy64(self.codes)
        return values if self.kind == FLOAT else values * numpy64(self.scales)[..., None]

    def sequence(self, table: NDArray[np.int32], length: int) -> tuple[Float64Array, Float64Array]:
        """Keys and values [length, kv heads, dim] of a sequence with these blocks."""
        blocks = self.vectors()[table]  # [n, 2, kv heads, tokens, dim]
        lined_up = blocks.transpose(1, 0, 3, 2, 4).reshape(2, -1, blocks.shape[2], self.dim)
        return lined_up[0, :length], lined_up[1, :length]
