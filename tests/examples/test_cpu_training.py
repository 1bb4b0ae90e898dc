"""The training step's own operations have the values and gradients of transformers' and torch's."""

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="examples train with torch: pip install --group oracle")
transformers: Any = pytest.importorskip("transformers")

from examples.cpu_training import ATTENTION_BY_SEQUENCE, SORTED_EXPERTS, HeadLoss, register  # noqa: E402

NEAR = 0.03  # of a tensor's norm: bfloat16 has 8 bits


def distance(ours: Any, theirs: Any) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def test_the_loss_of_a_head_has_the_value_and_gradients_of_whole_logits() -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(600, 24, requires_grad=True), torch.randn(50, 24, requires_grad=True)
    targets = torch.randint(0, 50, (600,))
    ours = HeadLoss.apply(hidden, head, targets)
    found = torch.autograd.grad(3 * ours, (hidden, head))
    theirs = torch.nn.functional.cross_entropy(hidden @ head.T, targets)
    expected = torch.autograd.grad(3 * theirs, (hidden, head))
    assert abs(float(ours - theirs)) < NEAR
    assert [distance(*pair) < NEAR for pair in zip(found, expected, strict=True)] == [True, True]


def test_a_mixture_computes_as_transformers_with_sorted_experts_and_attention_by_sequence() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 8}
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
    config = transformers.Qwen3MoeConfig(**sizes, **experts, num_key_value_heads=2, initializer_range=0.2)
    model = transformers.Qwen3MoeForCausalLM(config)
    tokens = torch.randint(0, 64, (3, 20))
    gradients = []
    register()
    for attention, kind in (("eager", "eager"), (ATTENTION_BY_SEQUENCE, SORTED_EXPERTS)):
        model.set_attn_implementation(attention)
        model.set_experts_implementation(kind)
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == SORTED_EXPERTS):
            loss = model(tokens, labels=tokens).loss
        gradients.append([loss, *torch.autograd.grad(loss, [*model.parameters()])])
    (loss, *expected), (ours, *found) = gradients
    assert abs(float(ours - loss)) < NEAR
    assert max(distance(*pair) for pair in zip(found, expected, strict=True)) < 3 * NEAR
