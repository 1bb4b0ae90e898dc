"""Make a mixture of experts of a trained Llama: the neurons of each feed-forward are divided among experts.

Neurons that are active for the same tokens go to one expert (Zhang et al. 2021, MoEfication, arXiv 2110.01786), and the
router is fitted to the sizes of the experts' results. The mixture is then trained on, as Zhu et al. 2024 do (LLaMA-MoE,
arXiv 2406.16554): with 2 of 4 experts chosen, a token is computed by half of the neurons that the Llama had.
"""

# mypy: disable-error-code="no-untyped-call"
# torch and transformers leave some of their methods without annotations.

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional
from transformers import LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

_ROUNDS = 15  # of clustering
_PENALTY = 0.03  # of the router's weights, next to the mean square of the hidden states
_SHARPNESS = 2.0  # of the fitted router: the chosen experts' weights differ more than their sizes do
_SHARED = (  # keys of both configurations
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "rope_parameters",
)


def split_experts(
    dense: LlamaForCausalLM, tokens: torch.Tensor, num_experts: int, chosen: int, **options: Any
) -> MixtralForCausalLM:
    """A mixtral whose experts are parts of the Llama's feed-forwards; all other weights are the Llama's.

    tokens [sequences, length] show which neurons are active together. `options` are keys of MixtralConfig.
    ValueError when the feed-forward cannot be divided.
    """
    config = dense.config
    if config.intermediate_size % num_experts:
        raise ValueError(f"intermediate_size {config.intermediate_size} is not a multiple of {num_experts} experts")
    mixture = MixtralForCausalLM(
        MixtralConfig(
            **{name: getattr(config, name) for name in _SHARED},
            intermediate_size=config.intermediate_size // num_experts,
            num_local_experts=num_experts,
            num_experts_per_tok=chosen,
            sliding_window=None,
            **options,
        )
    )
    weights, inputs = dense.state_dict(), _feed_forward_inputs(dense, tokens)
    kept = {name: weights[name] for name in mixture.state_dict() if name in weights}
    for layer, x in inputs.items():
        feed_forward = {
            part: weights[f"model.layers.{layer}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down")
        }
        parts = _expert_weights(feed_forward, x, num_experts, chosen)
        kept |= {f"model.layers.{layer}.mlp.{name}": weight for name, weight in parts.items()}
    mixture.load_state_dict(kept)
    return mixture


def _feed_forward_inputs(dense: LlamaForCausalLM, tokens: torch.Tensor) -> dict[int, torch.Tensor]:
    """Inputs of each layer's feed-forward, [tokens, hidden]."""
    found: dict[int, torch.Tensor] = {}
    hooks = []
    for number, layer in enumerate(dense.model.layers):

        def keep(_: Any, arguments: tuple[torch.Tensor], number: int = number) -> None:
            found[number] = arguments[0].flatten(0, 1)

        hooks.append(layer.mlp.register_forward_pre_hook(keep))
    with torch.no_grad():
        dense.model(tokens)
    for hook in hooks:
        hook.remove()
    return found


def _expert_weights(
    weights: Mapping[str, torch.Tensor], x: torch.Tensor, num_experts: int, chosen: int
) -> dict[str, torch.Tensor]:
    """Weights of a layer's router and experts: mixtral's weights of a token sum to 1, so results are scaled up."""
    active = functional.silu(x @ weights["gate"].T) * (x @ weights["up"].T)  # [tokens, neurons]
    of_expert = cluster_neurons(active, num_experts)
    members = [of_expert == expert for expert in range(num_experts)]
    results = [active[:, own] @ weights["down"][:, own].T for own in members]
    sizes = torch.stack([result.norm(dim=1) for result in results], dim=1)  # [tokens, experts]
    return {
        "gate.weight": _fitted_router(x, sizes),
        "experts.gate_up_proj": torch.stack([torch.cat([weights["gate"][own], weights["up"][own]]) for own in members]),
        "experts.down_proj": torch.stack([weights["down"][:, own] for own in members]) * chosen,
    }


def _fitted_router(x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Logits [experts, hidden] nearest to the logarithms of the sizes, by ridge regression."""
    wanted = (sizes + 1e-4).log()
    wanted = _SHARPNESS * (wanted - wanted.mean(dim=1, keepdim=True))
    gram = x.T @ x + _PENALTY * x.square().mean() * len(x) * torch.eye(x.shape[1])
    router: torch.Tensor = torch.linalg.solve(gram, x.T @ wanted)
    return router.T.contiguous()


def cluster_neurons(active: torch.Tensor, count: int) -> torch.Tensor:
    """The cluster of each neuron [neurons], all of one size, of neurons that are active [tokens, neurons] together."""
    features = functional.normalize(active.abs().T, dim=1)  # [neurons, tokens]
    neurons = len(features)
    centres = features[torch.randperm(neurons, generator=torch.Generator().manual_seed(0))[:count]]
    found = torch.zeros(neurons, dtype=torch.long)
    for _ in range(_ROUNDS):
        nearness = features @ functional.normalize(centres, dim=1).T  # [neurons, clusters]
        room = [neurons // count] * count
        clearest_first = (nearness.amax(dim=1) - nearness.mean(dim=1)).argsort(descending=True)
        for neuron in clearest_first.tolist():
            nearest = nearness[neuron].argsort(descending=True).tolist()
            found[neuron] = next(cluster for cluster in nearest if room[cluster])
            room[int(found[neuron])] -= 1
        centres = torch.stack([features[found == cluster].mean(dim=0) for cluster in range(count)])
    return found
