"""An MTP layer on a frozen model: its training computes what drafting computes, and it begins as a fitted map."""

# mypy: disable-error-code="no-untyped-call"
# torch leaves some of its methods without annotations.

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="examples train with torch: pip install --group oracle")
transformers: Any = pytest.importorskip("transformers")

from examples.mtp_layer import BaseStates, MtpLayer, make_layer, run_base, unroll  # noqa: E402

from tests.examples.tiny_llama import tiny_llama  # noqa: E402


def random_layer(base: Any) -> MtpLayer:
    layer = make_layer(base, torch.randint(0, 320, (2, 20))).requires_grad_(False)
    for parameter in layer.parameters():
        parameter.normal_(std=0.3)
    return layer


def drafts_one_by_one(layer: MtpLayer, states: BaseStates, start: int, depths: int) -> list[Any]:
    """Results of a draft that begins in slot `start`, one call a depth with a cache, as a decoder makes them."""
    cache, found = transformers.DynamicCache(), []
    hidden, slots = states.hidden[:, : start + 1], slice(0, start + 1)
    for _ in range(depths):
        rope = tuple(part[:, slots] for part in states.rope)
        keys = slots.stop
        mask = torch.arange(slots.start, slots.stop)[:, None] >= torch.arange(keys)
        embedded = states.embedded[:, slots.start + 1 : slots.stop + 1]
        options = {"position_embeddings": rope, "attention_mask": mask[None, None], "past_key_values": cache}
        hidden = layer.predict(embedded, hidden, **options, use_cache=True)[:, -1:]
        found.append(hidden[:, 0])
        slots = slice(slots.stop, slots.stop + 1)
    return found


def test_the_unrolled_layer_computes_what_a_draft_computes_step_by_step() -> None:
    base = tiny_llama()
    layer, tokens = random_layer(base), torch.randint(0, 320, (2, 16))
    states = run_base(base, tokens)
    whole = unroll(layer, states, 3)
    for start in (0, 1, 5, 12):
        for depth, expected in enumerate(drafts_one_by_one(layer, states, start, 3)):
            assert torch.allclose(whole[depth][:, start + depth], expected, atol=1e-5)


def test_the_models_hidden_states_are_those_before_its_final_norm() -> None:
    base, tokens = tiny_llama(), torch.randint(0, 320, (2, 16))
    states = run_base(base, tokens)
    assert not torch.allclose(states.hidden, states.normed, atol=1e-2)
    assert torch.equal(base.model.norm(states.hidden), states.normed)
    assert torch.equal(base.lm_head(states.normed), base(tokens).logits)


def test_a_new_layer_is_a_linear_map_fitted_to_the_next_hidden_state() -> None:
    base, tokens = tiny_llama(), torch.randint(0, 320, (40, 30))
    states = run_base(base, tokens)
    distances = []
    layer = make_layer(base, tokens).requires_grad_(False)
    for _ in range(2):
        found = unroll(layer, states, 1)[0]
        inputs = layer.fuse(states.embedded[:, 1:], states.hidden[:, :-1])
        assert torch.allclose(found, layer.final_layernorm(layer.input_proj(inputs)), atol=1e-6)
        distances.append(float((found - states.normed[:, 1:]).norm()))
        layer.input_proj.weight.normal_(std=0.1)
    assert distances[0] < 0.7 * distances[1]
