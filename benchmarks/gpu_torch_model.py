"""A Llama of a given shape in torch: random weights, packed projections, a contiguous cache, torch's own attention."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from benchmarks.shapes import ModelShape

DTYPE = torch.bfloat16
_GROUP, _INNER_TILES = 128, 8
Weight = torch.Tensor | tuple[torch.Tensor, torch.Tensor]  # [n, columns], or codes and scales of 4 bits


@dataclass
class KVCache:
    """keys, values [layers, sequences, kv heads, context, dim]."""

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def empty(cls, shape: ModelShape, sequences: int, context: int) -> "KVCache":
        """Of random numbers."""
        size = (shape.num_layers, sequences, shape.num_kv_heads, context, shape.head_dim)
        return cls(torch.randn(size, dtype=DTYPE), torch.randn(size, dtype=DTYPE))


class TorchLlama:
    """A decoder of random weights."""

    def __init__(self, shape: ModelShape, is_int4: bool) -> None:
        self.shape = shape
        make = _int4_weight if is_int4 else _plain_weight
        self.layers = [
            {linear.name: make(linear.out_features, linear.in_features) for linear in shape.layer_linears}
            for _ in range(shape.num_layers)
        ]
        self.norm = torch.ones(shape.hidden_size, dtype=DTYPE)
        self.embedding = torch.randn(shape.vocab_size, shape.hidden_size, dtype=DTYPE)
        self.head = _plain_weight(shape.vocab_size, shape.hidden_size)
        angles = torch.randn(32768, shape.head_dim // 2)
        self.cos, self.sin = angles.cos().to(DTYPE), angles.sin().to(DTYPE)
        self._layer: Callable[..., torch.Tensor] = self._plain_layer

    def compile(self) -> None:
        """Compile the layer, once for all of them."""
        self._layer = torch.compile(self._plain_layer, dynamic=False)

    def step(self, ids: torch.Tensor, positions: torch.Tensor, cache: KVCache, *, causal: bool) -> torch.Tensor:
        """ids [sequences, tokens], positions [tokens] -> the likeliest next token of each sequence."""
        x = functional.embedding(ids, self.embedding)
        cos, sin = self.cos[positions], self.sin[positions]
        for index, layer in enumerate(self.layers):
            x = self._layer(x, layer, cos, sin, positions, cache.keys[index], cache.values[index], causal)
        last = functional.rms_norm(x[:, -1], (self.shape.hidden_size,), self.norm, 1e-5)
        return _product(last, self.head).float().argmax(-1)

    def _plain_layer(
        self,
        x: torch.Tensor,
        layer: Mapping[str, Weight],
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        causal: bool,
    ) -> torch.Tensor:
        shape = self.shape
        sequences, tokens, hidden = x.shape
        normed = functional.rms_norm(x, (hidden,), self.norm, 1e-5)
        heads = _product(normed, layer["qkv"]).view(sequences, tokens, -1, shape.head_dim).transpose(1, 2)
        q, k, v = torch.split(heads, [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
        keys.index_copy_(2, positions, _turned(k, cos, sin))
        values.index_copy_(2, positions, v)
        attended = functional.scaled_dot_product_attention(
            _turned(q, cos, sin), keys, values, is_causal=causal, enable_gqa=shape.num_heads != shape.num_kv_heads
        )
        x = x + _product(attended.transpose(1, 2).reshape(sequences, tokens, hidden), layer["o"])
        normed = functional.rms_norm(x, (hidden,), self.norm, 1e-5)
        gate, up = _product(normed, layer["gate_up"]).chunk(2, dim=-1)
        return x + _product(functional.silu(gate) * up, layer["down"])


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _product(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    if isinstance(weight, torch.Tensor):
        return functional.linear(x, weight)
    codes, scales = weight
    multiply: Any = torch.ops.aten._weight_int4pack_mm
    found: torch.Tensor = multiply(x.reshape(-1, x.shape[-1]), codes, _GROUP, scales)
    return found.view(*x.shape[:-1], -1)


def _plain_weight(n: int, columns: int) -> torch.Tensor:
    return torch.randn(n, columns, dtype=DTYPE).mul_(columns**-0.5)


def _int4_weight(n: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes in the layout that torch's kernel reads; scale and zero [columns / group, n, 2]."""
    size = (n // 8, columns // (_INNER_TILES * 16), 32, _INNER_TILES // 2)
    codes = torch.randint(-(2**31), 2**31, size, dtype=torch.int32)
    return codes, torch.full((columns // _GROUP, n, 2), 1e-3, dtype=DTYPE)
