"""The training step's own operations have the values and gradients of transformers' and torch's."""

# mypy: disable-error-code="no-untyped-call"
# torch leaves some of its methods without annotations.

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
    assert abs(ours.item() - theirs.item()) < NEAR
    assert [distance(*pair) < NEAR for pair in zip(found, expected, strict=True)] == [True, True]


def test_a_teacher_has_half_of_the_gradients_of_a_loss() -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(300, 24, requires_grad=True), torch.randn(50, 24, requires_grad=True)
    teacher = torch.randn(300, 24), torch.randn(50, 24)
    targets = torch.randint(0, 50, (300,))
    ours = HeadLoss.apply(hidden, head, targets, teacher, 0.5)
    found = torch.autograd.grad(ours, (hidden, head))
    logits, taught = hidden @ head.T, teacher[0] @ teacher[1].T
    theirs = torch.nn.functional.cross_entropy(logits, targets)
    divergence = torch.nn.functional.kl_div(logits.log_softmax(-1), taught.softmax(-1), reduction="batchmean")
    expected = torch.autograd.grad(0.5 * theirs + 0.5 * divergence, (hidden, head))
    assert abs(ours.item() - theirs.item()) < NEAR
    assert [distance(*pair) < NEAR for pair in zip(found, expected, strict=True)] == [True, True]


def mixture(chosen: int) -> Any:
    """A layer of six experts, of which each token has so many."""
    torch.manual_seed(0)
    register()
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 8}
    experts = {"num_experts": 6, "num_experts_per_tok": chosen, "moe_intermediate_size": 16, "norm_topk_prob": True}
    config = transformers.Qwen3MoeConfig(**sizes, **experts, num_key_value_heads=2, initializer_range=0.2)
    return transformers.Qwen3MoeForCausalLM(config)


def test_sorted_experts_compute_as_those_of_transformers() -> None:
    model = mixture(2)
    experts = model.model.layers[0].mlp.experts
    hidden = torch.randn(40, 32, requires_grad=True)
    chosen = torch.stack([torch.tensor([1, 4])] * 10 + [torch.randperm(5)[:2] for _ in range(30)])  # the last: none
    found = []
    for kind in ("eager", SORTED_EXPERTS):
        model.set_experts_implementation(kind)
        with torch.autocast("cpu", torch.bfloat16):
            output = experts(hidden, chosen, torch.rand(40, 2, generator=torch.Generator().manual_seed(3)))
        found.append([output.detach(), *torch.autograd.grad(output.square().sum(), [hidden, *experts.parameters()])])
    assert max(distance(*pair) for pair in zip(*found, strict=True)) < NEAR


def test_a_model_with_attention_by_sequence_has_the_loss_and_gradients_of_transformers() -> None:
    model = mixture(6)  # all: no choice depends on rounding
    tokens = torch.randint(0, 64, (3, 20))
    found = []
    for attention in ("eager", ATTENTION_BY_SEQUENCE):
        model.set_attn_implementation(attention)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens, labels=tokens).loss
        found.append([loss.detach(), *torch.autograd.grad(loss, [*model.parameters()])])
    assert max(distance(*pair) for pair in zip(*found, strict=True)) < 2 * NEAR
