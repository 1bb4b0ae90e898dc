"""A feed-forward that is split into experts: nothing is lost, and neurons that are active together stay together."""

# mypy: disable-error-code="no-untyped-call"
# torch leaves some of its methods without annotations.

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="examples train with torch: pip install --group oracle")
transformers: Any = pytest.importorskip("transformers")

from examples.split_experts import cluster_neurons, split_experts  # noqa: E402


def dense() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2)
    return transformers.LlamaForCausalLM(config).eval()


def test_all_experts_with_equal_weights_are_the_model_that_was_split() -> None:
    model, tokens = dense(), torch.randint(0, 64, (4, 20))
    mixture = split_experts(model, tokens, 4, 4).eval()
    for layer in mixture.model.layers:
        layer.mlp.gate.weight.data.zero_()
    with torch.no_grad():
        assert torch.allclose(mixture(tokens).logits, model(tokens).logits, atol=1e-4)


def test_the_router_chooses_better_experts_than_a_random_one() -> None:
    model, tokens = dense(), torch.randint(0, 64, (16, 40))
    expected = model(tokens).logits.detach()
    errors = []
    for is_random in (False, True):
        mixture = split_experts(model, tokens, 4, 2).eval()
        for layer in mixture.model.layers:
            if is_random:
                layer.mlp.gate.weight.data.normal_(std=float(layer.mlp.gate.weight.data.std()))
        errors.append(float((mixture(tokens).logits.detach() - expected).norm()))
    assert errors[0] < 0.9 * errors[1]


def test_neurons_that_are_active_together_are_one_cluster() -> None:
    torch.manual_seed(0)
    group = torch.arange(24) % 3  # of each neuron
    is_active = torch.randint(0, 3, (200, 1)) == group
    found = cluster_neurons(is_active * torch.randn(200, 24).abs(), 3)
    assert {tuple(found[group == each].unique().tolist()) for each in range(3)} == {(0,), (1,), (2,)}


def test_a_width_that_cannot_be_divided_is_refused() -> None:
    with pytest.raises(ValueError, match="intermediate_size 48 is not a multiple of 5 experts"):
        split_experts(dense(), torch.zeros(1, 4, dtype=torch.long), 5, 2)
