"""The same steps in torch, in the same run and on the same GPU.

A Llama of a given shape with random weights, packed projections and a contiguous cache. Decode is captured into a CUDA
graph, as ours is; attention is scaled_dot_product_attention over contiguous keys, simpler than a paged pool; 4-bit
matmuls are torch's own (_weight_int4pack_mm, group 128, bfloat16), made for few rows. `compiled_peers` compiles a layer
with torch.compile first: a part of its own, because compiling takes long.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from benchmarks.gpu.device import Bench
from benchmarks.gpu.figures import Spread, Work
from benchmarks.gpu.parts import Record, Task
from benchmarks.gpu.programs.models import DRY_SPECS, SPECS, ProgramSpec
from benchmarks.gpu.times.steps import DECODE_CONTEXT, LONG_SHARES
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
        """ids [sequences, tokens], positions [tokens] -> the greedy next token of each sequence."""
        x = functional.embedding(ids, self.embedding)
        cos, sin = self.cos[positions], self.sin[positions]
        for index, layer in enumerate(self.layers):
            x = self._layer(x, layer, cos, sin, positions, cache.keys[index], cache.values[index], causal)
        last = functional.rms_norm(x[:, -1], (self.shape.hidden_size,), self.norm, 1e-5)
        return _matmul(last, self.head).float().argmax(-1)

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
        heads = _matmul(normed, layer["qkv"]).view(sequences, tokens, -1, shape.head_dim).transpose(1, 2)
        q, k, v = torch.split(heads, [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
        keys.index_copy_(2, positions, _turned(k, cos, sin))
        values.index_copy_(2, positions, v)
        attended = functional.scaled_dot_product_attention(
            _turned(q, cos, sin), keys, values, is_causal=causal, enable_gqa=shape.num_heads != shape.num_kv_heads
        )
        x = x + _matmul(attended.transpose(1, 2).reshape(sequences, tokens, hidden), layer["o"])
        normed = functional.rms_norm(x, (hidden,), self.norm, 1e-5)
        gate, up = _matmul(normed, layer["gate_up"]).chunk(2, dim=-1)
        return x + _matmul(functional.silu(gate) * up, layer["down"])


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _matmul(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    if isinstance(weight, torch.Tensor):
        return functional.linear(x, weight)
    codes, scales = weight
    multiply: Any = torch.ops.aten._weight_int4pack_mm
    found: torch.Tensor = multiply(x.reshape(-1, x.shape[-1]), codes, _GROUP, scales)
    return found.view(*x.shape[:-1], -1)


def _plain_weight(n: int, columns: int) -> torch.Tensor:
    return torch.randn(n, columns, dtype=DTYPE).mul_(columns**-0.5)


def _int4_weight(n: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes in the layout of torch's kernel; scale and zero [columns / group, n, 2]."""
    size = (n // 8, columns // (_INNER_TILES * 16), 32, _INNER_TILES // 2)
    codes = torch.randint(-(2**31), 2**31, size, dtype=torch.int32)
    return codes, torch.full((columns // _GROUP, n, 2), 1e-3, dtype=DTYPE)


_SECONDS_A_MODEL = 15.0
_SECONDS_TO_COMPILE = 60.0


def torch_seconds(bench: Bench, work: Callable[[], object]) -> Spread:
    """Seconds of the work by CUDA events, or by the host's clock without a GPU."""
    if bench.machine.torch_device == "cpu":
        begin = time.perf_counter()
        work()
        return Spread.of([time.perf_counter() - begin])
    for _ in range(3):
        work()
    count = min(40, max(7, int(0.2 / max(_events(work, 2)))))
    return Spread.of(_events(work, count))


def _events(work: Callable[[], object], count: int) -> list[float]:
    marks = [_event() for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize()
    return [first.elapsed_time(last) / 1e3 for first, last in itertools.pairwise(marks)]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def peers(bench: Bench) -> list[Task]:
    """Every shape and form of weights that Ingot is measured in, and attention over long contexts."""
    models = [Task(spec.name, partial(_peer, bench, spec), least=_SECONDS_A_MODEL) for spec in _specs(bench)]
    return [*models, Task("long attention", partial(_long_attention, bench))]


def compiled_peers(bench: Bench) -> list[Task]:
    """Prefill with compiled layers, 16-bit weights."""
    specs = [spec for spec in _specs(bench) if spec.weights != "int4"]
    return [Task(spec.name, partial(_compiled, bench, spec), 90.0, _SECONDS_TO_COMPILE) for spec in specs]


def _peer(bench: Bench, spec: ProgramSpec) -> Iterator[Record]:
    facts: Record = {"figure": "torch step", "model": spec.shape.name, "weights": spec.weights}
    with torch.device(bench.machine.torch_device), torch.inference_mode():
        model = TorchLlama(_shape(spec), spec.weights == "int4")
        for record in (*_decode(bench, spec, model), *_prefill(bench, spec, model, "eager")):
            yield {**facts, **record}
        del model
        _release(bench)


def _compiled(bench: Bench, spec: ProgramSpec) -> Iterator[Record]:
    if bench.machine.is_dry:
        return
    facts: Record = {"figure": "torch step", "model": spec.shape.name, "weights": spec.weights}
    with torch.device(bench.machine.torch_device), torch.inference_mode():
        model = TorchLlama(_shape(spec), is_int4=False)
        model.compile()
        for record in _prefill(bench, spec, model, "compile"):
            yield {**facts, **record}
        del model
        _release(bench)


def _specs(bench: Bench) -> list[ProgramSpec]:
    return list(DRY_SPECS[:1]) if bench.machine.is_dry else peer_specs(SPECS)


def peer_specs(specs: Sequence[ProgramSpec]) -> list[ProgramSpec]:
    """Each dense model and form of weights once: TorchLlama has no experts, recurrent layers or latent attention."""
    unusual = {spec for spec in specs if spec.batch_invariant or spec.dependent_launches or spec.more_buckets}
    usual = [spec for spec in specs if spec.kv == "16-bit" and spec not in unusual]
    return [spec for spec in usual if isinstance(spec.shape, ModelShape) and not spec.shape.num_experts]


def _shape(spec: ProgramSpec) -> ModelShape:
    assert isinstance(spec.shape, ModelShape)
    return spec.shape


def _decode(bench: Bench, spec: ProgramSpec, model: TorchLlama) -> Iterator[Record]:
    context = min(DECODE_CONTEXT, spec.context_tokens)
    for rows in spec.decode_rows:
        cache = KVCache.empty(_shape(spec), rows, context)
        seconds = torch_seconds(bench, _graphed(bench, _step(model, rows, 1, context, cache)))
        yield {"phase": "decode", "rows": rows, "context": context, "how": "graph", "seconds": seconds.record()}


def _prefill(bench: Bench, spec: ProgramSpec, model: TorchLlama, how: str) -> Iterator[Record]:
    """None for 4-bit weights: torch's kernel is for few rows."""
    for rows in () if spec.weights == "int4" else spec.prefill_rows:
        seconds = torch_seconds(bench, _step(model, 1, rows, rows, KVCache.empty(_shape(spec), 1, rows)))
        yield {"phase": "prefill", "rows": rows, "context": rows, "how": how, "seconds": seconds.record()}


def _step(model: TorchLlama, sequences: int, tokens: int, context: int, cache: KVCache) -> Callable[[], object]:
    """The last `tokens` of each sequence's context."""
    ids = torch.zeros(sequences, tokens, dtype=torch.long)
    positions = torch.arange(context - tokens, context)
    return lambda: model.step(ids, positions, cache, causal=tokens > 1)


def _long_attention(bench: Bench) -> Iterator[Record]:
    """Attention of one query over the same contexts, all layers in one graph: seconds of one layer."""
    spec = _specs(bench)[0]
    for share in LONG_SHARES:
        shape, context = _shape(spec), spec.context_tokens // share
        with torch.device(bench.machine.torch_device), torch.inference_mode():
            cache = KVCache.empty(shape, 1, context)
            query = torch.randn(1, shape.num_heads, 1, shape.head_dim, dtype=DTYPE)
            seconds = torch_seconds(bench, _graphed(bench, partial(_attend, query, cache, shape)))
        layer = seconds.scaled(1 / shape.num_layers)
        read = Work(2.0 * shape.kv_size * context * 2)
        facts: Record = {"phase": "decode", "rows": 1, "context": context, "model": shape.name}
        yield {"figure": "torch attention", **facts, **read.record(layer, bench.peaks)}


def _attend(query: torch.Tensor, cache: KVCache, shape: ModelShape) -> None:
    grouped = shape.num_heads != shape.num_kv_heads
    for keys, values in zip(cache.keys, cache.values, strict=True):
        functional.scaled_dot_product_attention(query, keys, values, enable_gqa=grouped)


def _release(bench: Bench) -> None:
    if bench.machine.torch_device != "cpu":
        torch.cuda.empty_cache()


def _graphed(bench: Bench, work: Callable[[], object]) -> Callable[[], object]:
    """Capture the work as a CUDA graph; without a GPU, return it unchanged."""
    if bench.machine.torch_device == "cpu":
        return work
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay
