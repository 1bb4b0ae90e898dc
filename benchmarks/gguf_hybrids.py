"""Metadata of a hybrid's GGUF file, and its weights in the order and form that llama.cpp reads.

A row of HYBRID_FORMATS is a model_type. Needs gguf (benchmarks/requirements.txt).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Config = Mapping[str, Any]
Tensors = Iterator[tuple[str, Array]]  # names as gguf's table of names has them


@dataclass(frozen=True)
class HybridFormat:
    """How llama.cpp stores a model_type.

    facts       writes the keys of recurrent layers and of attention
    changed     the tensors that one tensor of the checkpoint makes
    """

    architecture: Any  # gguf.MODEL_ARCH
    facts: Callable[[gguf.GGUFWriter, Config], None]
    changed: Callable[[str, Array, Config], Tensors]
    epsilon: str = "rms_norm_eps"
    feed_forward: str = "intermediate_size"


def kv_heads_by_layer(config: Config) -> list[int]:
    """Of each layer, 0 for a recurrent one: so llama.cpp finds them."""
    kinds = ("full_attention", "attention")
    return [config["num_key_value_heads"] if kind in kinds else 0 for kind in config["layer_types"]]


def _lfm2_facts(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_head_count_kv(kv_heads_by_layer(config))
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_shortconv_l_cache(config["conv_L_cache"])


def _lfm2_changed(name: str, values: Array, config: Config) -> Tensors:
    yield name, values.squeeze(1) if values.ndim == 3 else values


def _qwen_facts(writer: gguf.GGUFWriter, config: Config) -> None:
    rope, dim = config["rope_parameters"], config["head_dim"]
    rotated = int(dim * rope["partial_rotary_factor"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(rotated)
    writer.add_rope_dimension_sections([11, 11, 10, 0])  # axes of an image's positions: equal in text
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)


def _qwen_changed(name: str, values: Array, config: Config) -> Tensors:
    """Decay instead of its logarithm; norms that do not add one. As many key heads as value heads: no reordering."""
    if name.endswith(".A_log"):
        yield name, -np.exp(values.astype(np.float32))
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        yield name, values.astype(np.float32) + 1
    else:
        yield _time_bias(name), values.squeeze(1) if values.ndim == 3 else values


def _granite_facts(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_head_count_kv(kv_heads_by_layer(config))
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_rope_scaling_finetuned(False)  # no layer has a rope
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_group_count(config["mamba_n_groups"])
    writer.add_ssm_inner_size(config["mamba_n_heads"] * config["mamba_d_head"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])


def _granite_changed(name: str, values: Array, config: Config) -> Tensors:
    """Gate and up apart; decay instead of its logarithm; vectors of heads as columns."""
    if name.endswith("input_linear.weight"):
        layer = name.partition(".shared_mlp")[0]
        for part, half in zip(("gate_proj", "up_proj"), np.split(values, 2), strict=True):
            yield f"{layer}.mlp.{part}.weight", half
    elif name.endswith("output_linear.weight"):
        yield name.replace("shared_mlp.output_linear", "mlp.down_proj"), values
    elif name.endswith(".A_log"):
        yield name, -np.exp(values.astype(np.float32))[:, None]
    elif name.endswith("mamba.D"):
        yield name, values[:, None]
    elif name.endswith("mamba.norm.weight"):
        yield name, values.reshape(config["mamba_n_groups"], -1)
    else:
        yield _time_bias(name), values.squeeze(1) if values.ndim == 3 else values


def _time_bias(name: str) -> str:
    return name.replace(".dt_bias", ".dt_proj.bias")


HYBRID_FORMATS: Mapping[str, HybridFormat] = {
    "lfm2": HybridFormat(gguf.MODEL_ARCH.LFM2, _lfm2_facts, _lfm2_changed, epsilon="norm_eps"),
    "qwen3_5_text": HybridFormat(gguf.MODEL_ARCH.QWEN35, _qwen_facts, _qwen_changed),
    "granitemoehybrid": HybridFormat(
        gguf.MODEL_ARCH.GRANITE_HYBRID, _granite_facts, _granite_changed, feed_forward="shared_intermediate_size"
    ),
}
