"""A multi-token prediction (MTP) layer in the form of MiMo (Xiaomi 2025, arXiv 2505.07608) on a frozen model.

In slot s the layer reads the model's hidden state of token s, before the final norm, and the embedding of token s + 1;
it predicts token s + 2. For a longer draft it reads its own result in the next slot: depth 2, 3 and so on.
"""

# mypy: disable-error-code="no-untyped-call"
# torch and transformers leave some of their methods without annotations.

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel, Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm

_PENALTY = 1e-3  # ridge penalty, as a share of the inputs' mean square
_SHARED = (  # keys of both configurations
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
)


class MtpLayer(Qwen2DecoderLayer):
    """Two norms and a projection of hidden state and embedding, then a Qwen2 decoder layer and a final norm."""

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__(config, layer_idx=0)
        width, epsilon = config.hidden_size, config.rms_norm_eps
        self.token_layernorm = Qwen2RMSNorm(width, epsilon)
        self.hidden_layernorm = Qwen2RMSNorm(width, epsilon)
        self.input_proj = torch.nn.Linear(2 * width, width, bias=False)
        self.final_layernorm = Qwen2RMSNorm(width, epsilon)

    def predict(self, embedded: torch.Tensor, hidden: torch.Tensor, **options: Any) -> torch.Tensor:
        """Hidden states [sequences, slots, width] for the head; `options` are those of a decoder layer."""
        found: torch.Tensor = self.final_layernorm(self(self.input_proj(self.fuse(embedded, hidden)), **options))
        return found

    def fuse(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Inputs of the projection [..., 2 * width]: the hidden state first."""
        return torch.cat([self.hidden_layernorm(hidden), self.token_layernorm(embedded)], dim=-1)


@dataclass(frozen=True)
class BaseStates:
    """The frozen model's part of a batch [sequences, tokens].

    embedded  [sequences, tokens, width]
    hidden    before the final norm, [sequences, tokens, width]
    normed    after it
    rope      cosines and sines of the positions
    """

    embedded: torch.Tensor
    hidden: torch.Tensor
    normed: torch.Tensor
    rope: tuple[torch.Tensor, torch.Tensor]


def run_base(base: PreTrainedModel, tokens: torch.Tensor) -> BaseStates:
    """Compute the frozen model's states, without gradients."""
    before_norm: list[torch.Tensor] = []
    hook = base.model.norm.register_forward_pre_hook(lambda _, arguments: before_norm.append(arguments[0]))
    with torch.no_grad():
        normed = base.model(tokens, use_cache=False).last_hidden_state
        rope = base.model.rotary_emb(normed, torch.arange(tokens.shape[1])[None])
        embedded = base.model.embed_tokens(tokens)
    hook.remove()
    return BaseStates(embedded, before_norm[0], normed, rope)


def make_layer(base: PreTrainedModel, tokens: torch.Tensor) -> MtpLayer:
    """A layer that begins as a linear map, the one that best predicts the next hidden state of `tokens`.

    Its attention and feed-forward are those of the model's last decoder layer, with nothing added by them yet.
    """
    config = Qwen2Config(**{name: getattr(base.config, name) for name in _SHARED}, num_hidden_layers=1)
    config._attn_implementation = "sdpa"
    layer = MtpLayer(config)
    layer.load_state_dict(base.model.layers[-1].state_dict(), strict=False)
    added = (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight)
    biases = (parameter for name, parameter in layer.self_attn.named_parameters() if name.endswith("bias"))
    for parameter in (*added, *biases):
        torch.nn.init.zeros_(parameter)
    layer.final_layernorm.load_state_dict(base.model.norm.state_dict())
    with torch.no_grad():
        layer.input_proj.weight.copy_(_fitted_projection(base, layer, tokens))
    return layer


def _fitted_projection(base: PreTrainedModel, layer: MtpLayer, tokens: torch.Tensor) -> torch.Tensor:
    """Weights [width, 2 * width] nearest to the next token's hidden state, each of size 1, by ridge regression."""
    width = layer.hidden_size
    gram, moments = torch.zeros(2 * width, 2 * width), torch.zeros(2 * width, width)
    for row in tokens.split(1):
        states = run_base(base, row)
        inputs = layer.fuse(states.embedded[0, 1:], states.hidden[0, :-1])  # [slots, 2 * width]
        wanted = functional.rms_norm(states.hidden[0, 1:], (width,))
        gram += inputs.T @ inputs
        moments += inputs.T @ wanted
    penalty = _PENALTY * gram.diagonal().mean() * torch.eye(2 * width)
    found: torch.Tensor = torch.linalg.solve(gram + penalty, moments)
    return found.T


def unroll(layer: MtpLayer, states: BaseStates, depths: int) -> list[torch.Tensor]:
    """The layer's results [sequences, tokens - 1, width] of depths 1, 2 and so on; of depth d from slot d - 1 on.

    As in a draft, slot s of depth d reads the result of depth d - 1 in slot s - 1, and attends to the keys of depth 1
    in the slots up to s - d + 1, to those of the depths between, one slot each, and to its own.
    """
    embedded, hidden = states.embedded[:, 1:], states.hidden[:, :-1]
    slots = hidden.shape[1]
    rope = (states.rope[0][:, :slots], states.rope[1][:, :slots])
    back = torch.arange(slots)[:, None] - torch.arange(slots)  # [slots, key slots]
    cache, found = DynamicCache(), []
    for depth in range(depths):
        seen = [back >= depth, *(back == depth - earlier for earlier in range(1, depth + 1))]
        mask = torch.cat(seen, dim=1)[None, None]  # [1, 1, slots, (depth + 1) * slots]
        hidden = layer.predict(
            embedded, hidden, position_embeddings=rope, attention_mask=mask, past_key_values=cache, use_cache=True
        )
        found.append(hidden)
        hidden = functional.pad(hidden[:, :-1], (0, 0, 1, 0))
    return found
