"""Write the defaults of the families' config.json from transformers: python -m tests.oracle.make_defaults

They go to pipeline/checkpoint/families/defaults.json, an object for each model_type:

config              values of the keys that Ingot reads and that are fields of the family's configuration
rope_theta          theta of rope parameters without one. local_rope_theta: that of sliding layers, where it is another
rope_parameters     rope parameters of a config.json without any, where they are more than a theta and a fraction
"""

from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ingot.pipeline.checkpoint.families import FAMILIES
from ingot.pipeline.checkpoint.json_files import write_json
from tests.data_paths import ROOT

FILE = ROOT / "pipeline/checkpoint/families/defaults.json"
_KEYS = """
    _remove_final_layer_norm activation activation_function activation_sparsity_pattern add_cross_attention afn alibi
    altup_active_idx attention_heads attention_types bias d_model ffn_hidden_size multi_query new_decoder_architecture
    num_heads num_kv_heads num_layers num_ln_in_parallel_attn parallel_attn scale_embedding window_size
    word_embed_proj_dim
    altup_correct_scale altup_num_inputs attention_bias attention_in_multiplier attention_k_eq_v attention_multiplier
    attention_out_bias attention_out_multiplier attn_layer_indices attn_logit_softcapping block_auto_adjust_ff_dim
    block_ffn_dim_multiplier block_multiple_of bos_token_id clip_qkv conv_L_cache conv_bias conv_kernel
    decoder_sparse_step dim_model_base do_layer_norm_before embedding_multiplier enable_bias enable_moe_block
    eos_token_id ffn_dim final_logit_softcapping first_k_dense_replace full_attn_idxs global_attn_every_n_layers
    global_head_dim head_dim hidden_act hidden_activation hidden_size hidden_size_per_layer_input intermediate_size
    key_multiplier kv_lora_rank laurel_rank layer_norm_elementwise_affine layer_norm_eps layer_norm_epsilon
    layer_rope_theta layer_types layers_block_type linear_allow_neg_eigval linear_conv_kernel_dim linear_key_head_dim
    linear_num_key_heads linear_num_value_heads linear_value_head_dim lm_head_multiplier logit_scale logits_scaling
    mamba_conv_bias mamba_d_conv mamba_d_head mamba_d_ssm mamba_d_state mamba_expand mamba_head_dim mamba_hidden_act
    mamba_n_groups mamba_n_heads mamba_norm_before_gate mamba_num_heads mamba_proj_bias mamba_rms_norm
    max_position_embeddings max_window_layers mlp_bias mlp_hidden_act mlp_layer_types mlp_multipliers mlp_only_layers
    moe_intermediate_size moe_k moe_latent_size moe_layer_end_index moe_layer_interval moe_layer_start_index
    moe_norm_min moe_num_experts moe_num_shared_experts moe_shared_expert_intermediate_size moe_topk multi_query
    mup_enabled n_embd n_group n_groups n_head n_inner n_layer n_positions n_routed_experts n_shared_experts
    no_rope_layer_interval no_rope_layers norm_eps norm_epsilon norm_topk_prob num_attention_heads num_dense_layers
    num_experts num_experts_per_tok num_global_key_value_heads num_hidden_layers num_key_value_heads
    num_kv_shared_layers num_local_experts num_nextn_predict_layers num_shared_experts original_max_position_embeddings
    per_layer_config position_embedding_type projectors_bias q_lora_rank qk_layernorm qk_nope_head_dim qk_rope_head_dim
    qkv_bias query_pre_attn_scalar residual_multiplier rms_norm_eps rope_interleave rotary_dim route_scale
    lm_head_bias router_jitter_noise
    n_heads n_layers max_seq_len attn_config.kv_n_heads attn_config.clip_qkv attn_config.rope_theta
    ffn_config.ffn_hidden_size ffn_config.ffn_act_fn.name ffn_config.moe_num_experts ffn_config.moe_top_k
    ffn_config.moe_normalize_expert_weights
    routed_scaling_factor router_scaling_factor scale_attn_by_inverse_layer_idx scale_attn_weights scale_depth scale_emb
    shared_expert_intermediate_size shared_intermediate_size sliding_window sliding_window_pattern ssm_in_multiplier
    ssm_multipliers ssm_out_multiplier ssm_state_size swiglu_alpha swiglu_limit tie_word_embeddings time_step_limit
    time_step_min top_k_experts topk_group topk_method use_bias use_bidirectional_attention use_conv_bias
    use_double_wide_mlp use_expert_bias use_parallel_residual use_post_norm use_qk_norm use_qkv_bias use_sliding_window
    v_head_dim vocab_size vocab_size_per_layer_input
""".split()  # noqa: SIM905 (a list would have a line for each)
# Fields that the rules of the family do not read: latent attention has head sizes of its own, nemotron_h other keys,
# and noise of routers counts in SparseMixer alone.
_UNREAD = {
    "deepseek_v2": ["head_dim"],
    "minicpm3": ["head_dim"],
    "minimax_m2": ["router_jitter_noise"],
    "mixtral": ["router_jitter_noise"],
    "nemotron_h": [
        "mamba_proj_bias",
        "n_shared_experts",
        "num_nextn_predict_layers",
        "sliding_window",
        "time_step_limit",
    ],
}
# Keys of default rope parameters that are not written: `type` is the older name of rope_type,
# max_position_embeddings is the model's, and the rotated fraction of Mistral 4 is that of a head with its latent part.
_UNREAD_ROPE = ["type", "max_position_embeddings"]
_UNREAD_ROPE_OF = {"mistral4": ["partial_rotary_factor"]}
# Model types that are not in transformers -> the one whose configuration theirs extends.
EXTENDED = {"mimo": "qwen2"}
_MARKER = -1.0  # a theta that no model has


def main() -> None:
    """Write the file."""
    write_json(FILE, all_defaults())


def all_defaults() -> dict[str, dict[str, Any]]:
    """The defaults of each family."""
    return {model_type: _defaults_of(model_type) for model_type in FAMILIES}


def _defaults_of(model_type: str) -> dict[str, Any]:
    """Defaults of the configuration's class, and those that its constructor sets."""
    configuration: Any = CONFIG_MAPPING[EXTENDED.get(model_type, model_type)]
    fields = configuration.__dataclass_fields__
    keys = [key for key in _KEYS if key in fields and key not in _UNREAD.get(model_type, [])]
    found: dict[str, Any] = {"config": {key: _as_json(fields[key].default) for key in keys}}
    found["config"] |= _of_inner_configurations(configuration)
    theta = configuration.default_theta
    if isinstance(theta, dict):
        found |= {"rope_theta": theta["global"], "local_rope_theta": theta["local"]}
    else:
        found["rope_theta"] = theta
    rope = _rope_parameters(model_type, configuration)
    return {**found, "rope_parameters": rope} if rope else found


def _of_inner_configurations(configuration: Any) -> dict[str, Any]:
    """Those of the paths that begin with the name of an object, whose configuration has a class of its own."""
    found = {}
    for path in _KEYS:
        first, *parts = path.split(".")
        if parts and first in configuration.sub_configs:
            value: Any = configuration.sub_configs[first]().to_dict()
            for part in parts:
                value = value.get(part)
            found[path] = _as_json(value)
    return found


def _rope_parameters(model_type: str, configuration: Any) -> dict[str, Any]:
    """Those that the constructor sets itself: another default_theta shows which are made from that."""
    is_local = isinstance(configuration.default_theta, dict)
    marker = {"global": _MARKER, "local": _MARKER} if is_local else _MARKER
    marked = type("Marked", (configuration,), {"default_theta": marker})()
    rope = getattr(marked, "rope_parameters", None) or {}
    dropped = _UNREAD_ROPE + _UNREAD_ROPE_OF.get(model_type, [])
    kept = {key: value for key, value in rope.items() if key not in dropped and value != _MARKER}
    by_layer_type = [part["rope_theta"] for part in kept.values() if isinstance(part, dict)]
    if by_layer_type:
        return {} if _MARKER in by_layer_type else kept
    return {} if kept.get("rope_type", "default") == "default" else kept


def _as_json(value: Any) -> Any:
    """The value as transformers writes it in a config.json, where an infinite number is an object."""
    if isinstance(value, tuple):
        return [_as_json(item) for item in value]
    return {"__float__": "Infinity"} if value == float("inf") else value


if __name__ == "__main__":
    main()
