"""Simulated engines of tests: step times that are linear in their counts, and models on rows of hardware."""

from dataclasses import dataclass
from typing import Any

from ingot.artifact import KVGeometry
from ingot.planning.model_shape import Matmuls, ModelShape
from ingot.planning.simulation.replica import TimedRequest
from ingot.planning.simulation.simulated_executor import EngineShape
from ingot.planning.simulation.traces import RequestLengths
from ingot.planning.step_model import StepShape

KV = KVGeometry(num_layers=2, num_kv_heads=2, head_dim=16)


@dataclass(frozen=True)
class LinearTimes:
    """Seconds of a step, of a sequence, of a token of a prompt, of a token in context, of a draft."""

    fixed: float = 5e-3
    sequence: float = 1e-4
    token: float = 2e-5
    context: float = 1e-8
    draft: float = 5e-5

    def seconds(self, step: StepShape) -> float:
        prompts = self.token * step.prefill_tokens + self.context * step.prefill_context_tokens
        return (
            self.fixed
            + self.sequence * step.num_sequences
            + prompts
            + self.context * step.context_tokens
            + self.draft * step.draft_rows
        )


def shape_of(**sizes: Any) -> EngineShape:
    """An engine with 2,000 blocks of 16 tokens."""
    defaults = {"num_blocks": 2000, "max_batch_tokens": 512, "max_sequences": 32, "context_tokens": 8192}
    return EngineShape(**{"kv": KV, **defaults, **sizes})


def request(seconds: float, prompt: int, output: int, line: int = 1, blocks: tuple[int, ...] = ()) -> TimedRequest:
    return TimedRequest(seconds, RequestLengths(line, prompt, output, blocks))


def decoder(layers: int, hidden: int, inner: int, heads: int, kv_heads: int, bits: float = 16) -> ModelShape:
    """A Llama of these sizes, whose weights have so many bits."""
    columns, vocab = hidden // heads * kv_heads, 32000
    sizes = [(hidden, hidden, 2), (columns, hidden, 2), (inner, hidden, 2), (hidden, inner, 1)]
    inputs: Any = "int8" if bits == 8 else "fp16"
    matmuls = [
        Matmuls("linear", rows, width, count * layers, int(rows * width * count * layers * bits / 8), inputs=inputs)
        for rows, width, count in sizes
    ]
    head = Matmuls("head", vocab, hidden, 1, vocab * hidden * 2)
    return ModelShape(
        name="llama",
        num_parameters=sum(each.elements for each in matmuls) + 2 * head.elements,
        num_layers=layers,
        hidden_size=hidden,
        vocab_size=vocab,
        context_tokens=8192,
        matmuls=(*matmuls, head),
        embedding_bytes=0,
        query_heads=(heads,) * layers,
        kv=KVGeometry(num_layers=layers, num_kv_heads=kv_heads, head_dim=hidden // heads, dtype="float16"),
    )


def seven_billion(bits: float = 16) -> ModelShape:
    return decoder(32, 4096, 11008, 32, 32, bits)


def seventy_billion(bits: float = 16) -> ModelShape:
    return decoder(80, 8192, 28672, 64, 8, bits)
