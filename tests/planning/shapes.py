"""Shapes of models for tests of plans, in the planner's own terms."""

from dataclasses import replace

from ingot.artifact import KVGeometry, ModelFacts
from ingot.artifact.programs.expert_choices import Reach
from ingot.planning.memory import ProgramMemory
from ingot.planning.model_shape import Matmuls, ModelShape
from ingot.planning.plan import PlannedModel


def dense_shape(
    layers: int = 32, hidden: int = 4096, inner: int = 14336, heads: int = 32, kv_heads: int = 8, bits: float = 16
) -> ModelShape:
    """A decoder of heads of 128 dims; Llama-3-8B by default."""
    width, vocab = heads * 128, 128256

    def matmul(rows: int, columns: int, count: int) -> Matmuls:
        return Matmuls("linear", rows, columns, count, int(rows * columns * count * bits / 8))

    linears = (
        matmul(width + 2 * kv_heads * 128, hidden, layers),
        matmul(hidden, width, layers),
        matmul(inner, hidden, 3 * layers),
    )
    head = Matmuls("head", vocab, hidden, 1, vocab * hidden * 2)
    parameters = sum(one.elements for one in linears) + 2 * head.elements
    kv = KVGeometry(num_layers=layers, num_kv_heads=kv_heads, head_dim=128, dtype="float16")
    return ModelShape(
        "llama", parameters, layers, hidden, vocab, 131072, (*linears, head), head.bytes, (heads,) * layers, kv
    )


def subject(shape: ModelShape | None = None, on_cpu: bool = False) -> PlannedModel:
    """A subject of that shape, of programs with 256 sequences in a step."""
    shape = shape or dense_shape()
    facts = ModelFacts(
        family="llama",
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        context_tokens=shape.context_tokens,
        num_parameters=shape.num_parameters,
        eos_token_ids=(2,),
        bos_token_id=1,
    )
    program = ProgramMemory(shape.matmul_bytes + shape.embedding_bytes, 10**8, 2048, 256, on_cpu)
    return PlannedModel("a test", facts, shape, program, "a test")


COUNTED: Reach = ((1, 1 / 16), (8, 1 / 4), (32, 1 / 2))
"""Experts that rows reach where some are chosen far more often than others."""


def mixture_shape(layers: int = 32, experts: int = 128, chosen: int = 8, reach: Reach = ()) -> ModelShape:
    """A mixture with heads of its own weights: small attention, and experts of 2048 x 768 in each layer."""
    dense = dense_shape(layers, 2048, 1024, 32, 4)
    expert = Matmuls("expert", 768, 2048, 3 * experts * layers, 2 * 768 * 2048 * 3 * experts * layers, experts, chosen)
    router = Matmuls("router", experts, 2048, layers, 2 * experts * 2048 * layers)
    return replace(
        dense, matmuls=(*dense.matmuls, expert, router), num_parameters=expert.elements, measured_reach=reach
    )
