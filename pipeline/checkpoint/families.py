"""The decoder families: one row each, by config.json's model_type. Adding a family is adding a row.

Each row is checked against transformers 5.23: logits, and the defaults (family_defaults.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from ingot.pipeline.checkpoint import family_defaults as defaults
from ingot.pipeline.checkpoint.experts_config import ExpertRules

WindowRule = Literal[
    "none",
    "all",
    "from-max-window-layers",
    "even-before-max-window-layers",
    "alternating",
    "pattern",
    "pattern-or-none",
    "unrotated",
]
RotatedLayers = Literal["all", "listed", "sliding", "sliding-or-all", "thetas", "none"]


@dataclass(frozen=True)
class Family:
    """How a family differs from Llama.

    defaults             values of the keys that config.json may omit
    keys                 Ingot's name of a key -> the family's own
    only                 key -> the one value that is supported, and why no other
    names                part of a tensor's path -> the family's own; "" leaves the part out
    buffers              pattern of tensors that are not read: buffers in older checkpoints, heads that predict further
                         tokens. extra_layers_key: key of the number of layers after the last that predict such
    norm                 RMS norm or LayerNorm, with a bias or not. epsilon_key: its key, "" for 1e-5 always
    norm_place           before: norms on the input of attention and feed-forward; after: on their output; around: both
    norm_adds_one        the norm multiplies by (1 + weight)
    parallel             attention and feed-forward read the same hidden state: always, never, or a key says so.
                         parallel_norms: 1, the input's norm for both, or 2, one for each
    qk_norm              head: queries and keys are normed per head; row: over all heads at once. qk_norm_key: a key
                         switches it on. qk_norm_after_rope: norms follow the rotation
    qkv_bias             always, never, or the key that sets it; so are output_bias (of o_proj), mlp_bias, head_bias
    fused_qkv            one qkv_proj. fused_gate_up: one gate_up_proj
    gated                the feed-forward is down(act(gate) * up); else down(act(up))
    transposed           linear layers are stored [in, out]
    heads_interleaved    rows of qkv_proj are those of the first head's query, key and value, then of the next head's
    windows              layers that attend within sliding_window:
                         none; all; from-max-window-layers: layer max_window_layers and later, if use_sliding_window;
                         even-before-max-window-layers: every other layer before it, starting with the first, if so;
                         alternating: every other layer, starting with the first; pattern: all but every
                         sliding_window_pattern-th (full_every, where that is not a key); pattern-or-none: so, or none
                         if the window is null; unrotated: layers without rope, if use_sliding_window.
                         layer_types in config.json overrides the rule, except for none and all
    full_first           the first layer of each pattern is the full one, not the last
    rotated              layers with rope: all; listed: by no_rope_layers; sliding: those with a window;
                         sliding-or-all: so, or all if the window is null; thetas: by layer_rope_theta; none
    positions            learned: a table of positions is added to the embeddings; position_offset: its unused rows
    scale_key            key of the attention scale: query_pre_attn_scalar (its inverse square root),
                         attention_multiplier (as it is), or scale_attn_weights (false: 1); None: the inverse square
                         root of head_dim
    fixed_head_dim       head_dim is hidden_size / num_attention_heads, whatever the key says
    sinks                each head has a learned logit that takes its share of the softmax and adds nothing
    attention_softcap    attn_logit_softcapping is applied (Gemma 3 has the key but does not apply it)
    scaled_embedding     embeddings are multiplied by the square root of hidden_size
    interleaved_rope     rope rotates neighbours (2i, 2i + 1), not halves (i, i + rotary_dim / 2)
    rope_by_layer_type   sliding and full layers have different rope parameters. local_theta: of sliding layers, where
                         they have none; local_theta_key: its key
    partial_rotary       partial_rotary_factor is read. rotary_fraction: its default
    default_rope         rope parameters of a config.json without any
    query_scale          rope parameters have llama_4_scaling_beta: queries grow with the logarithm of their position
    ntk_alpha            the rope type dynamic with a fixed alpha is one of the theta
    longrope_aliases     older names of the rope type longrope
    experts              layers with a mixture of experts
    """

    defaults: Mapping[str, Any]
    keys: Mapping[str, str] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    buffers: str = ""
    extra_layers_key: str = ""
    norm: Literal["rms", "layer", "layer-with-bias"] = "rms"
    epsilon_key: str = "rms_norm_eps"
    norm_place: Literal["before", "after", "around"] = "before"
    norm_adds_one: bool = False
    parallel: bool | str = False
    parallel_norms: Literal[1, 2] = 1
    qk_norm: Literal["none", "head", "row"] = "none"
    qk_norm_key: str = ""
    qk_norm_after_rope: bool = False
    qkv_bias: bool | str = "attention_bias"
    output_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = False
    head_bias: bool | str = False
    fused_qkv: bool = False
    fused_gate_up: bool = False
    gated: bool = True
    transposed: bool = False
    heads_interleaved: bool = False
    windows: WindowRule = "none"
    full_every: int = 0
    full_first: bool = False
    rotated: RotatedLayers = "all"
    positions: Literal["rope", "learned"] = "rope"
    position_offset: int = 0
    scale_key: Literal["query_pre_attn_scalar", "attention_multiplier", "scale_attn_weights"] | None = None
    fixed_head_dim: bool = False
    sinks: bool = False
    attention_softcap: bool = False
    scaled_embedding: bool = False
    interleaved_rope: bool = False
    rope_by_layer_type: bool = False
    local_theta: float = 10_000.0
    local_theta_key: str = ""
    partial_rotary: bool = False
    rotary_fraction: float = 1.0
    default_theta: float = 10_000.0
    default_rope: Mapping[str, Any] = field(default_factory=dict)
    query_scale: bool = False
    ntk_alpha: bool = False
    longrope_aliases: tuple[str, ...] = ()
    experts: ExpertRules | None = None

    @property
    def rewritten_weights(self) -> str:
        """How the family stores linear layers other than [out, in], rows of each projection together; "" if so."""
        if self.transposed:
            return "linear layers stored [in, out]"
        return "queries, keys and values stored head by head in one matrix" if self.heads_interleaved else ""


_NO_BIAS: dict[str, Any] = {"qkv_bias": False, "output_bias": False}
_USE_BIAS: dict[str, Any] = {"qkv_bias": "use_bias", "output_bias": "use_bias", "mlp_bias": "use_bias"}
_ALL_BIASES: dict[str, Any] = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
_GEMMA: dict[str, Any] = {
    "norm_place": "around",
    "norm_adds_one": True,
    "scale_key": "query_pre_attn_scalar",
    "scaled_embedding": True,
}

_QWEN_EXPERTS: dict[str, Any] = {
    "count": "num_experts",
    "chosen": "num_experts_per_tok",
    "width": "moe_intermediate_size",
    "other_keys": {"num_experts": "num_local_experts"},
    "sparse": "step",
    "normalise": "norm_topk_prob",
}
_W = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_LINEARS = {"fused_gate_up": "input_linear.weight", "fused_down": "output_linear.weight", "router": "router.layer"}

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(defaults.LLAMA, mlp_bias="mlp_bias"),
        "mistral": Family(defaults.MISTRAL, **_NO_BIAS, windows="all"),
        "qwen2": Family(defaults.QWEN2, qkv_bias=True, output_bias=False, windows="from-max-window-layers"),
        "qwen3": Family(defaults.QWEN3, qk_norm="head", windows="from-max-window-layers"),
        "gemma2": Family(defaults.GEMMA2, **_GEMMA, windows="alternating", attention_softcap=True),
        "gemma3_text": Family(
            defaults.GEMMA3,
            **_GEMMA,
            qk_norm="head",
            windows="pattern",
            rope_by_layer_type=True,
            local_theta_key="rope_local_base_freq",
            default_theta=1_000_000.0,
        ),
        "phi3": Family(
            defaults.PHI3,
            **_NO_BIAS,
            fused_qkv=True,
            fused_gate_up=True,
            windows="all",
            partial_rotary=True,
            longrope_aliases=("su", "yarn"),
        ),
        "smollm3": Family(
            defaults.SMOLLM3, mlp_bias="mlp_bias", windows="unrotated", rotated="listed", default_theta=2_000_000.0
        ),
        "olmo2": Family(defaults.OLMO2, norm_place="after", qk_norm="row"),
        "granite": Family(defaults.GRANITE, mlp_bias="mlp_bias", scale_key="attention_multiplier"),
        "granite_swa": Family(
            defaults.GRANITE_SWA,
            mlp_bias="mlp_bias",
            windows="pattern",
            full_every=4,
            full_first=True,
            rotated="thetas",
            scale_key="attention_multiplier",
            sinks=True,
        ),
        "ministral3": Family(
            defaults.MINISTRAL3,
            **_NO_BIAS,
            windows="all",
            query_scale=True,
            default_rope=defaults.MINISTRAL3_ROPE,
            default_theta=10_000.0,
        ),
        "olmo3": Family(
            defaults.OLMO3,
            norm_place="after",
            qk_norm="row",
            windows="pattern",
            full_every=4,
            rope_by_layer_type=True,
            local_theta=500_000.0,
            default_theta=500_000.0,
        ),
        "seed_oss": Family(defaults.SEED_OSS, output_bias="attention_out_bias", mlp_bias="mlp_bias"),
        "apertus": Family(
            defaults.APERTUS,
            names={"input_layernorm": "attention_layernorm", "post_attention_layernorm": "feedforward_layernorm"},
            qk_norm="head",
            gated=False,
            default_rope=defaults.APERTUS_ROPE,
            default_theta=12_000_000.0,
        ),
        "exaone4": Family(
            defaults.EXAONE4,
            **_NO_BIAS,
            norm_place="after",
            qk_norm="head",
            windows="pattern-or-none",
            rotated="sliding-or-all",
        ),
        "arcee": Family(defaults.ARCEE, mlp_bias="mlp_bias", gated=False),
        "hunyuan_v1_dense": Family(
            defaults.HUNYUAN,
            names={"q_norm": "query_layernorm", "k_norm": "key_layernorm"},
            qk_norm="head",
            qk_norm_after_rope=True,
            ntk_alpha=True,
        ),
        "glm4": Family(
            defaults.GLM4,
            names={
                "post_attention_layernorm": "post_self_attn_layernorm",
                "pre_feedforward_layernorm": "post_attention_layernorm",
                "post_feedforward_layernorm": "post_mlp_layernorm",
            },
            norm_place="around",
            output_bias=False,
            fused_gate_up=True,
            interleaved_rope=True,
            partial_rotary=True,
            rotary_fraction=0.5,
        ),
        "ernie4_5": Family(defaults.ERNIE45, **_USE_BIAS, interleaved_rope=True, default_theta=500_000.0),
        "helium": Family(
            defaults.HELIUM, output_bias=False, mlp_bias="mlp_bias", interleaved_rope=True, default_theta=100_000.0
        ),
        "cohere2": Family(
            defaults.COHERE2,
            norm="layer",
            epsilon_key="layer_norm_eps",
            parallel=True,
            windows="pattern",
            rotated="sliding",
            fixed_head_dim=True,
            interleaved_rope=True,
        ),
        "nemotron": Family(
            defaults.NEMOTRON,
            norm="layer-with-bias",
            epsilon_key="norm_eps",
            norm_adds_one=True,
            mlp_bias="mlp_bias",
            gated=False,
            partial_rotary=True,
            rotary_fraction=0.5,
        ),
        "starcoder2": Family(
            defaults.STARCODER2,
            **_USE_BIAS,
            names={"up_proj": "c_fc", "down_proj": "c_proj"},
            norm="layer-with-bias",
            epsilon_key="norm_epsilon",
            gated=False,
            windows="all",
        ),
        "stablelm": Family(
            defaults.STABLELM,
            only={"qk_layernorm": (False, "norms of queries and keys with a weight of each head are not supported")},
            norm="layer-with-bias",
            epsilon_key="layer_norm_eps",
            parallel="use_parallel_residual",
            qkv_bias="use_qkv_bias",
            output_bias=False,
            fixed_head_dim=True,
            partial_rotary=True,
            rotary_fraction=0.25,
        ),
        "phi": Family(
            defaults.PHI,
            **_ALL_BIASES,
            names={
                "o_proj": "dense",
                "up_proj": "fc1",
                "down_proj": "fc2",
                "norm": "final_layernorm",
                "q_norm": "q_layernorm",
                "k_norm": "k_layernorm",
            },
            norm="layer-with-bias",
            epsilon_key="layer_norm_eps",
            parallel=True,
            qk_norm="head",
            qk_norm_key="qk_layernorm",
            head_bias=True,
            gated=False,
            partial_rotary=True,
            rotary_fraction=0.5,
        ),
        "gpt2": Family(
            defaults.GPT2,
            **_ALL_BIASES,
            keys=defaults.GPT2_KEYS,
            only={
                "scale_attn_by_inverse_layer_idx": (
                    False,
                    "attention scales that differ between layers are not supported",
                ),
                "add_cross_attention": (False, "cross attention is not supported"),
            },
            names={
                "model": "transformer",
                "layers": "h",
                "embed_tokens": "wte",
                "embed_positions": "wpe",
                "self_attn": "attn",
                "qkv_proj": "c_attn",
                "o_proj": "c_proj",
                "up_proj": "c_fc",
                "down_proj": "c_proj",
                "input_layernorm": "ln_1",
                "post_attention_layernorm": "ln_2",
                "norm": "ln_f",
            },
            buffers=r"\.attn\.(bias|masked_bias)$",
            norm="layer-with-bias",
            epsilon_key="layer_norm_epsilon",
            fused_qkv=True,
            gated=False,
            transposed=True,
            rotated="none",
            positions="learned",
            scale_key="scale_attn_weights",
            fixed_head_dim=True,
        ),
        "gpt_neox": Family(
            defaults.GPT_NEOX,
            keys={"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
            names={
                "model": "gpt_neox",
                "embed_tokens": "embed_in",
                "lm_head": "embed_out",
                "self_attn": "attention",
                "qkv_proj": "query_key_value",
                "o_proj": "dense",
                "up_proj": "dense_h_to_4h",
                "down_proj": "dense_4h_to_h",
                "norm": "final_layer_norm",
            },
            buffers=r"\.attention\.(bias|masked_bias)$",
            norm="layer-with-bias",
            epsilon_key="layer_norm_eps",
            parallel="use_parallel_residual",
            parallel_norms=2,
            mlp_bias=True,
            fused_qkv=True,
            gated=False,
            heads_interleaved=True,
            fixed_head_dim=True,
            partial_rotary=True,
            rotary_fraction=0.25,
        ),
        "opt": Family(
            defaults.OPT,
            keys={"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
            only={
                "do_layer_norm_before": (True, "norms of the residual stream itself are not supported"),
                "_remove_final_layer_norm": (False, "a decoder without a last norm is not supported"),
                "layer_norm_elementwise_affine": (True, "norms without weights are not supported"),
            },
            names={
                "model": "model.decoder",
                "o_proj": "out_proj",
                "mlp": "",
                "up_proj": "fc1",
                "down_proj": "fc2",
                "input_layernorm": "self_attn_layer_norm",
                "post_attention_layernorm": "final_layer_norm",
                "norm": "final_layer_norm",
            },
            norm="layer-with-bias",
            epsilon_key="",
            qkv_bias="enable_bias",
            output_bias="enable_bias",
            mlp_bias="enable_bias",
            gated=False,
            rotated="none",
            positions="learned",
            position_offset=2,
            fixed_head_dim=True,
        ),
        "mixtral": Family(
            defaults.MIXTRAL,
            **_NO_BIAS,
            windows="all",
            default_theta=1_000_000.0,
            experts=ExpertRules(
                "num_local_experts",
                "num_experts_per_tok",
                "intermediate_size",
                other_keys={"num_local_experts": "num_experts"},
                names=({"mlp": "block_sparse_moe", **_W}, {}),
            ),
        ),
        "gpt_oss": Family(
            defaults.GPT_OSS,
            windows="alternating",
            sinks=True,
            default_rope=defaults.GPT_OSS_ROPE,
            default_theta=150_000.0,
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
        "qwen2_moe": Family(
            defaults.QWEN2_MOE,
            qkv_bias="qkv_bias",
            output_bias=False,
            windows="even-before-max-window-layers",
            experts=ExpertRules(**_QWEN_EXPERTS, shared="shared_expert_intermediate_size", shared_gate=True),
        ),
        "qwen3_moe": Family(
            defaults.QWEN3_MOE,
            qk_norm="head",
            windows="all",
            experts=ExpertRules(**_QWEN_EXPERTS),
        ),
        "olmoe": Family(
            defaults.OLMOE,
            only={"clip_qkv": (None, "clipped queries, keys and values are not supported")},
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
        "granitemoe": Family(
            defaults.GRANITE_MOE,
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
        "glm4_moe": Family(
            defaults.GLM4_MOE,
            qk_norm="head",
            qk_norm_key="use_qk_norm",
            output_bias=False,
            partial_rotary=True,
            rotary_fraction=0.5,
            extra_layers_key="num_nextn_predict_layers",
            experts=ExpertRules(
                "n_routed_experts",
                "num_experts_per_tok",
                "moe_intermediate_size",
                other_keys={"n_routed_experts": "num_local_experts"},
                sparse="after-dense",
                score="sigmoid",
                normalise="norm_topk_prob",
                least_sum=1e-20,
                correction="vector",
                groups=True,
                shared="n_shared_experts",
                shared_count=True,
                names=({"shared_expert": "shared_experts", "correction_bias": "gate.e_score_correction_bias"},),
            ),
        ),
        "ernie4_5_moe": Family(
            defaults.ERNIE45_MOE,
            **_USE_BIAS,
            head_bias="use_bias",
            buffers=r"^model\.mtp_|^mtp\.",
            interleaved_rope=True,
            default_theta=500_000.0,
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
        "hunyuan_v1_moe": Family(
            defaults.HUNYUAN_MOE,
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
    }
)
