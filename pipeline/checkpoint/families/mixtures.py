"""Families with mixtures of experts."""

from collections.abc import Mapping
from typing import Any

from ingot.pipeline.checkpoint.config.experts import ExpertRules
from ingot.pipeline.checkpoint.families.family import NEXTN, NO_BIAS, USE_BIAS, Family, by_model_type

QWEN_EXPERTS: dict[str, Any] = {
    "count": "num_experts",
    "chosen": "num_experts_per_tok",
    "width": "moe_intermediate_size",
    "other_keys": {"num_experts": "num_local_experts"},
    "sparse": "step",
    "optional": True,
}
_W = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
SHARED_MLP = {"gate_up_proj": "input_linear", "down_proj": "output_linear"}
GRANITE_EXPERTS = {"mlp": "block_sparse_moe", "mlp.shared_expert": "shared_mlp", **SHARED_MLP}
_GRANITE_SHARED = ExpertRules(
    "num_local_experts",
    "num_experts_per_tok",
    "intermediate_size",
    shared="shared_intermediate_size",
    names=(
        {
            **GRANITE_EXPERTS,
            "fused_gate_up": "input_linear.weight",
            "fused_down": "output_linear.weight",
            "router": "router.layer",
        },
        {**GRANITE_EXPERTS, "router": "router"},
    ),
)
GATE_CORRECTION = {"shared_expert": "shared_experts", "correction_bias": "gate.e_score_correction_bias"}
# DeepSeek-V2's experts, without its changes of their weights.
SOFTMAX_GROUPS: dict[str, Any] = {
    "count": "n_routed_experts",
    "chosen": "num_experts_per_tok",
    "width": "moe_intermediate_size",
    "other_keys": {"n_routed_experts": "num_local_experts"},
    "sparse": "after-dense",
    "groups": True,
    "shared": "n_shared_experts",
    "shared_count": True,
    "names": ({"shared_expert": "shared_experts"},),
}
# DeepSeek-V3's experts.
SIGMOID_GROUPS: dict[str, Any] = {
    **SOFTMAX_GROUPS,
    "score": "sigmoid",
    "normalise": "norm_topk_prob",
    "least_sum": 1e-20,
    "correction": "vector",
    "names": (GATE_CORRECTION,),
}
_LINEARS = {"fused_gate_up": "input_linear.weight", "fused_down": "output_linear.weight", "router": "router.layer"}
# Experts of hy_v3 and afmoe, which have no groups.
_SIGMOID: dict[str, Any] = {
    "count": "num_experts",
    "chosen": "num_experts_per_tok",
    "width": "moe_intermediate_size",
    "other_keys": {"num_experts": "num_local_experts"},
    "score": "sigmoid",
    "least_sum": 1e-20,
    "correction": "vector",
    "scaled": True,
    "shared": "num_shared_experts",
    "shared_count": True,
}

MIXTURES: Mapping[str, Family] = by_model_type(
    Family(
        "mixtral",
        **NO_BIAS,
        windows="all",
        experts=ExpertRules(
            "num_local_experts",
            "num_experts_per_tok",
            "intermediate_size",
            other_keys={"num_local_experts": "num_experts"},
            names=({"mlp": "block_sparse_moe", **_W}, {}),
        ),
    ),
    Family(
        "phimoe",
        only={"num_experts_per_tok": (2, "SparseMixer chooses two experts for each token")},
        norm="layer-with-bias",
        head_bias="lm_head_bias",
        windows="all",
        longrope_mscales=True,
        experts=ExpertRules(
            "num_local_experts",
            "num_experts_per_tok",
            "intermediate_size",
            other_keys={"num_local_experts": "num_experts"},
            score="sparsemixer",
            jitter_key="router_jitter_noise",
            normalise=False,
            names=({"mlp": "block_sparse_moe", **_W}, {"router": "router"}),
        ),
    ),
    Family(
        "dbrx",
        keys={
            "hidden_size": "d_model",
            "num_attention_heads": "n_heads",
            "num_hidden_layers": "n_layers",
            "max_position_embeddings": "max_seq_len",
            "num_key_value_heads": "attn_config.kv_n_heads",
            "clip_qkv": "attn_config.clip_qkv",
            "rope_theta": "attn_config.rope_theta",
            "intermediate_size": "ffn_config.ffn_hidden_size",
            "hidden_act": "ffn_config.ffn_act_fn.name",
        },
        older_keys={"attn_config.rope_theta": "rope_theta"},
        names={
            "model": "transformer",
            "layers": "blocks",
            "embed_tokens": "wte",
            "self_attn": "norm_attn_norm.attn",
            "qkv_proj": "Wqkv",
            "o_proj": "out_proj",
            "input_layernorm": "norm_attn_norm.norm_1",
            "post_attention_layernorm": "norm_attn_norm.norm_2",
            "mlp": "ffn",
            "norm": "norm_f",
        },
        norm="layer",
        epsilon_key="",
        **NO_BIAS,
        fused_qkv=True,
        fixed_head_dim=True,
        experts=ExpertRules(
            "ffn_config.moe_num_experts",
            "ffn_config.moe_top_k",
            "ffn_config.ffn_hidden_size",
            order_key="ffn_config.moe_normalize_expert_weights",
            stacked=True,
            names=(
                {
                    "router": "router.layer",
                    "stacked": "experts.mlp",
                    "gate_proj": "w1",
                    "up_proj": "v1",
                    "down_proj": "w2",
                },
            ),
        ),
    ),
    Family(
        "gpt_oss",
        windows="alternating",
        sinks=True,
        experts=ExpertRules(
            "num_local_experts",
            "num_experts_per_tok",
            "intermediate_size",
            other_keys={"num_local_experts": "num_experts"},
            biases=True,
            in_turns=True,
            clamp=("swiglu_alpha", "swiglu_limit"),
            names=({"router": "router"},),
        ),
    ),
    Family(
        "qwen2_moe",
        qkv_bias="qkv_bias",
        output_bias=False,
        windows="even-before-max-window-layers",
        experts=ExpertRules(
            **QWEN_EXPERTS,
            normalise="norm_topk_prob",
            shared="shared_expert_intermediate_size",
            shared_gate=True,
        ),
    ),
    Family(
        "qwen3_moe",
        qk_norm="head",
        windows="all",
        experts=ExpertRules(**QWEN_EXPERTS, normalise="norm_topk_prob"),
    ),
    Family(
        "olmoe",
        qk_norm="row",
        fixed_head_dim=True,
        experts=ExpertRules(
            "num_experts",
            "num_experts_per_tok",
            "intermediate_size",
            other_keys={"num_experts": "num_local_experts"},
            normalise="norm_topk_prob",
        ),
    ),
    Family(
        "granitemoe",
        scale_key="attention_multiplier",
        experts=ExpertRules(
            "num_local_experts",
            "num_experts_per_tok",
            "intermediate_size",
            names=(
                {"mlp": "block_sparse_moe", **_LINEARS},
                {"mlp": "block_sparse_moe", "router": "router"},
            ),
        ),
    ),
    Family("granitemoeshared", fused_gate_up=True, scale_key="attention_multiplier", experts=_GRANITE_SHARED),
    Family(
        "granitemoe_swa",
        fused_gate_up=True,
        windows="pattern",
        full_every=4,
        full_first=True,
        rotated="thetas",
        scale_key="attention_multiplier",
        sinks=True,
        experts=_GRANITE_SHARED,
    ),
    Family(
        "flex_olmo",
        norm_place="after",
        qk_norm="row",
        experts=ExpertRules(
            "num_experts",
            "num_experts_per_tok",
            "intermediate_size",
            other_keys={"num_experts": "num_local_experts"},
            normalise="norm_topk_prob",
        ),
    ),
    Family(
        "minimax_m2",
        more_defaults={"rotary_dim": None},
        **NO_BIAS,
        qk_norm="row",
        partial_rotary=True,
        experts=ExpertRules(
            "num_local_experts",
            "num_experts_per_tok",
            "intermediate_size",
            other_keys={"num_local_experts": "num_experts"},
            score="sigmoid",
            correction="vector",
            names=(
                {"mlp": "block_sparse_moe", **_W, "correction_bias": "e_score_correction_bias"},
                {"correction_bias": "e_score_correction_bias"},
            ),
        ),
    ),
    Family(
        "hy_v3",
        keys={"routed_scaling_factor": "router_scaling_factor"},
        qk_norm="head",
        mlp_bias="mlp_bias",
        experts=ExpertRules(
            **_SIGMOID,
            sparse="listed",
            names=(
                {"router": "router.gate", "shared_expert": "shared_mlp", "correction_bias": "expert_bias"},
                {"shared_expert": "shared_experts", "correction_bias": "e_score_correction_bias"},
            ),
        ),
    ),
    Family(
        "mellum",
        buffers=r"^mtp\.",
        qk_norm="head",
        windows="listed-or-none",
        rope_by_layer_type=True,
        partial_rotary=True,
        experts=ExpertRules(
            "num_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            other_keys={"num_experts": "num_local_experts"},
            sparse="listed-or-all",
            normalise="norm_topk_prob",
        ),
    ),
    Family(
        "exaone_moe",
        **NO_BIAS,
        buffers=r"^mtp",
        qk_norm="head",
        windows="pattern-or-none",
        rotated="sliding-or-all",
        experts=ExpertRules(
            **SIGMOID_GROUPS
            | {
                "count": "num_experts",
                "other_keys": {"num_experts": "num_local_experts"},
                "sparse": "listed-or-after-dense",
                "shared": "num_shared_experts",
                "names": (
                    GATE_CORRECTION,
                    {"shared_expert": "shared_experts", "correction_bias": "e_score_correction_bias"},
                ),
            }
        ),
    ),
    Family(
        "dots1",
        qk_norm="head",
        windows="from-max-window-layers",
        experts=ExpertRules(**SIGMOID_GROUPS),
    ),
    Family(
        "solar_open",
        output_bias=False,
        experts=ExpertRules(**SIGMOID_GROUPS | {"sparse": "all"}),
    ),
    Family(
        "afmoe",
        keys={
            "sliding_window_pattern": "global_attn_every_n_layers",
            "first_k_dense_replace": "num_dense_layers",
            "routed_scaling_factor": "route_scale",
        },
        names={
            "attention_gate": "gate_proj",
            "pre_feedforward_layernorm": "pre_mlp_layernorm",
            "post_feedforward_layernorm": "post_mlp_layernorm",
        },
        norm_place="around",
        qk_norm="head",
        windows="pattern",
        rotated="sliding",
        scaled_embedding="mup_enabled",
        gate_layer=True,
        experts=ExpertRules(
            **_SIGMOID,
            sparse="after-dense",
            names=({"router": "router.gate", "shared_expert": "shared_experts", "correction_bias": "expert_bias"},),
        ),
    ),
    Family(
        "glm4_moe",
        more_defaults={"num_nextn_predict_layers": 1},
        qk_norm="head",
        qk_norm_key="use_qk_norm",
        output_bias=False,
        partial_rotary=True,
        rotary_fraction=0.5,
        mtp=NEXTN,
        experts=ExpertRules(**SIGMOID_GROUPS),
    ),
    Family(
        "ernie4_5_moe",
        **USE_BIAS,
        head_bias="use_bias",
        buffers=r"^model\.mtp_|^mtp\.",
        interleaved_rope=True,
        experts=ExpertRules(
            "moe_num_experts",
            "moe_k",
            "moe_intermediate_size",
            other_keys={"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"},
            sparse="range",
            least_sum="moe_norm_min",
            correction="row",
            shared="moe_num_shared_experts",
            shared_count=True,
            names=(
                {"shared_expert": "shared_experts", "correction_bias": "moe_statics.e_score_correction_bias"},
                {"shared_expert": "shared_experts", "correction_bias": "gate.moe_statics.e_score_correction_bias"},
            ),
        ),
    ),
    Family(
        "hunyuan_v1_moe",
        names={"q_norm": "query_layernorm", "k_norm": "key_layernorm"},
        qk_norm="head",
        qk_norm_after_rope=True,
        ntk_alpha=True,
        experts=ExpertRules(
            "num_experts",
            "moe_topk",
            "intermediate_size",
            other_keys={"num_experts": "num_local_experts", "moe_topk": "num_experts_per_tok"},
            shared="intermediate_size",
            names=({"router": "gate.wg", "shared_expert": "shared_mlp"},),
        ),
    ),
)
