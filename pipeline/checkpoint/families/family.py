"""Differences of a family of decoders from Llama: the fields of a row of the table."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from ingot.pipeline.checkpoint.config.experts import ExpertRules
from ingot.pipeline.checkpoint.config.latent import LatentRules
from ingot.pipeline.checkpoint.config.recurrent import RecurrentRules

WindowRule = Literal[
    "none",
    "all",
    "from-max-window-layers",
    "even-before-max-window-layers",
    "alternating",
    "pattern",
    "pattern-or-none",
    "unrotated",
    "listed-or-all",
    "listed-or-none",
    "local",
]
NormPlace = Literal["before", "after", "around", "stream"]
RotatedLayers = Literal["all", "listed", "sliding", "sliding-or-all", "thetas", "typed", "given", "none"]

NO_BIAS: dict[str, Any] = {"qkv_bias": False, "output_bias": False}
USE_BIAS: dict[str, Any] = {"qkv_bias": "use_bias", "output_bias": "use_bias", "mlp_bias": "use_bias"}
ALL_BIASES: dict[str, Any] = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}


@dataclass(frozen=True)
class MtpRules:
    """Names of the tensors of a layer for multi-token prediction; see pipeline/checkpoint/config/mtp.py.

    layer          the decoder layer; {layer} is the number of layers of the decoder
    names          embedding_norm, hidden_norm, projection and norm; one with a leading dot is below `layer`
    count_key      key of the number of such layers, where they are numbered after the decoder's
    hidden_first   columns of the projection are those of the hidden state, then those of the embedding
    hidden_state   the decoder's hidden state that it reads: before or after the last norm
    """

    layer: str
    names: Mapping[str, str]
    count_key: str = ""
    hidden_first: bool = False
    hidden_state: Literal["raw", "normed"] = "normed"


NEXTN = MtpRules(
    "model.layers.{layer}",
    {"embedding_norm": ".enorm", "hidden_norm": ".hnorm", "projection": ".eh_proj", "norm": ".shared_head.norm"},
    count_key="num_nextn_predict_layers",
)


@dataclass(frozen=True)
class Family:
    """Differences of a family from Llama.

    more_defaults        values of keys that config.json may omit, where transformers' configuration has no field for
                         the key; the others are in defaults.json
    keys                 Ingot's name of a key -> the family's own
    older_keys           key -> its older name, which counts where both are there, as in transformers
    only                 key -> the one value that is supported, and why no other
    names                part of a tensor's path -> the family's own; "" leaves the part out. saved_names: others, each
                         of which counts where the checkpoint has such a part
    other_activations    name of an activation -> the one that it means
    buffers              pattern of tensors that the decoder does not read: buffers in older checkpoints, MTP layers
    mtp                  layers that predict further tokens
    norm                 RMS norm or LayerNorm, with a bias or not, or without a weight either. epsilon_key: its key, ""
                         for 1e-5 always. embedding_norm: there is one after the embedding, too
    norm_place           before: norms on the input of attention and feed-forward; after: on their output; around: both;
                         stream: on the residual stream after each of the two is added, with no norm after the last
                         layer. norm_before_key: a key that chooses between before (true) and stream.
                         last_norm_off_key: a key that leaves out the norm after the last layer
    norm_adds_one        the norm multiplies by (1 + weight)
    inner_norms          attention's result and the input of down_proj are normed
    parallel             attention and feed-forward read the same hidden state: always, never, or a key says so.
                         parallel_norms: 1, the input's norm for both, or 2, one for each, or the key that sets it:
                         null for 2 where grouped_key is true
    qk_norm              head: queries and keys are normed per head; row: over all heads at once. qk_norm_key: a key
                         switches it on. qk_norm_after_rope: norms follow the rotation
    qkv_bias             always, never, or the key that sets it; so are output_bias (of o_proj), mlp_bias, head_bias
    fused_qkv            one qkv_proj. fused_gate_up: one gate_up_proj
    multi_query_key      a key: true for one head of keys and values, false for as many as of queries. grouped_key: a
                         key that, where it is true, leaves the number to num_key_value_heads
    gated                the feed-forward is down(act(gate) * up); else down(act(up))
    transposed           linear layers are stored [in, out]
    heads_interleaved    rows of qkv_proj are the queries, the key and the value of the first head of keys, then of the
                         next head. qkv_blocks: they are in so many blocks, each of queries, then values, then keys
    windows              layers that attend within sliding_window:
                         none; all; from-max-window-layers: layer max_window_layers and later, if use_sliding_window;
                         even-before-max-window-layers: every other layer before it, starting with the first, if so;
                         alternating: every other layer, starting with the first; pattern: all but every
                         sliding_window_pattern-th (full_every, where that is not a key); pattern-or-none: so, or none
                         if the window is null; unrotated: layers without rope, if use_sliding_window.
                         listed-or-all, listed-or-none: all or none; local: those that attention_layers calls so,
                         or attention_types.
                         layer_types in config.json overrides the rule, except for none and all
    last_is_full         the last layer is full in any case
    full_first           the first layer of each pattern is the full one, not the last
    rotated              layers with rope: all; listed: by no_rope_layers; sliding: those with a window;
                         sliding-or-all: so, or all if the window is null; thetas: by layer_rope_theta;
                         typed: all if position_embedding_type is rope; given: all if there is a rope_theta; none
    positions            learned: a table of positions is added to the embeddings; sinusoidal: one that is computed;
                         position_offset: its unused rows
    scale_key            key of the attention scale: query_pre_attn_scalar (its inverse square root),
                         attention_multiplier (as it is), or scale_attn_weights (false: 1); one: it is 1; None: it
                         is the inverse square root of head_dim
    fixed_head_dim       head_dim is hidden_size / num_attention_heads, whatever the key says
    heads_divide_width   transformers loads only a number of heads that divides hidden_size
    sinks                each head has a learned logit that takes its share of the softmax and adds nothing
    attention_softcap    attn_logit_softcapping is applied (Gemma 3 has the key but does not apply it)
    scaled_embedding     embeddings are multiplied by the square root of hidden_size: always, never, or a key says so
    interleaved_rope     rope rotates neighbours (2i, 2i + 1), not halves (i, i + rotary_dim / 2)
    backward_rope        rope rotates by the negative angle
    rope_by_layer_type   sliding and full layers have different rope parameters. local_theta_key: key of the theta of
                         sliding layers
    partial_rotary       partial_rotary_factor is read. rotary_fraction: its default
    mrope                rope parameters may be those of positions with several axes, which are equal in text
    query_scale          rope parameters have llama_4_scaling_beta: queries grow with the logarithm of their position
    ntk_alpha            the rope type dynamic with a fixed alpha is one of the theta
    longrope_aliases     older names of the rope type longrope. longrope_mscales: its factors of cos and sin are
                         short_mscale and long_mscale
    experts              layers with a mixture of experts
    recurrent            layers that are recurrent in place of attention, or next to it
    attention_gate       rows of q_proj are the first head's query and its gate, then the next head's: what attention
                         makes is multiplied by the sigmoid of the gates
    gate_layer           so, but by the sigmoid of a linear layer of its own, self_attn.attention_gate
    branch_multipliers   inputs and results of attention and feed-forward have multipliers (BranchMultipliers)
    value_norm           values are normed per head, without a weight
    global_heads         full layers have heads of their own: global_head_dim, num_global_key_value_heads,
                         per_layer_config; with attention_k_eq_v their values are made from the projection of keys
    shares_kv            num_kv_shared_layers is read: the last layers have no keys and values of their own
    layer_inputs         each layer has inputs of its own: hidden_size_per_layer_input, vocab_size_per_layer_input
    layer_scale          a layer's result is multiplied by a number of its own
    altup                several residual streams, LAuReL blocks and sparse gates
    latent               keys and values are made of a latent, which is what the KV cache holds
    """

    model_type: str
    more_defaults: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    older_keys: Mapping[str, str] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    saved_names: Mapping[str, str] = field(default_factory=dict)
    other_activations: Mapping[str, str] = field(default_factory=dict)
    buffers: str = ""
    mtp: MtpRules | None = None
    norm: Literal["rms", "rms-without-weights", "layer", "layer-with-bias", "layer-without-weights"] = "rms"
    epsilon_key: str = "rms_norm_eps"
    embedding_norm: bool = False
    norm_place: NormPlace = "before"
    norm_before_key: str = ""
    last_norm_off_key: str = ""
    norm_adds_one: bool = False
    inner_norms: bool = False
    parallel: bool | str = False
    parallel_norms: Literal[1, 2] | str = 1
    qk_norm: Literal["none", "head", "row"] = "none"
    qk_norm_key: str = ""
    qk_norm_after_rope: bool = False
    qkv_bias: bool | str = "attention_bias"
    output_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = False
    head_bias: bool | str = False
    fused_qkv: bool = False
    multi_query_key: str = ""
    grouped_key: str = ""
    fused_gate_up: bool = False
    gated: bool = True
    transposed: bool = False
    heads_interleaved: bool = False
    qkv_blocks: int = 0
    windows: WindowRule = "none"
    full_every: int = 0
    last_is_full: bool = False
    full_first: bool = False
    rotated: RotatedLayers = "all"
    positions: Literal["rope", "learned", "sinusoidal"] = "rope"
    position_offset: int = 0
    scale_key: Literal["query_pre_attn_scalar", "attention_multiplier", "scale_attn_weights", "one"] | None = None
    fixed_head_dim: bool = False
    heads_divide_width: bool = False
    sinks: bool = False
    attention_softcap: bool = False
    scaled_embedding: bool | str = False
    interleaved_rope: bool = False
    backward_rope: bool = False
    rope_by_layer_type: bool = False
    local_theta_key: str = ""
    partial_rotary: bool = False
    rotary_fraction: float = 1.0
    mrope: bool = False
    query_scale: bool = False
    ntk_alpha: bool = False
    longrope_aliases: tuple[str, ...] = ()
    longrope_mscales: bool = False
    experts: ExpertRules | None = None
    recurrent: RecurrentRules | None = None
    attention_gate: bool = False
    gate_layer: bool = False
    branch_multipliers: bool = False
    value_norm: bool = False
    global_heads: bool = False
    shares_kv: bool = False
    layer_inputs: bool = False
    layer_scale: bool = False
    altup: bool = False
    latent: LatentRules | None = None

    @cached_property
    def defaults(self) -> Mapping[str, Any]:
        """Values of the keys that config.json may omit. A key without one is null."""
        return MappingProxyType({**self._transformers["config"], **self.more_defaults})

    @property
    def default_theta(self) -> float:
        """The theta of rope parameters without one."""
        return float(self._transformers["rope_theta"])

    @property
    def local_theta(self) -> float:
        """The theta of sliding layers without one."""
        return float(self._transformers.get("local_rope_theta", self.default_theta))

    @property
    def default_rope(self) -> Mapping[str, Any]:
        """Rope parameters of a config.json without any."""
        return dict(self._transformers.get("rope_parameters", {}))

    @property
    def _transformers(self) -> Mapping[str, Any]:
        """Defaults that transformers has, as tests/oracle/make_defaults.py writes them."""
        return _all_defaults()[self.model_type]

    @property
    def norms_have_weights(self) -> bool:
        """Return whether norms have weights."""
        return not self.norm.endswith("-without-weights")

    @property
    def rewritten_weights(self) -> str:
        """Description of linear layers that are not stored [out, in] with each projection's rows together, or ""."""
        if self.transposed:
            return "linear layers stored [in, out]"
        if self.attention_gate:
            return "queries and their gates stored head by head in one matrix"
        by_head = self.heads_interleaved or self.qkv_blocks
        return "queries, keys and values stored head by head in one matrix" if by_head else ""


def by_model_type(*families: Family) -> Mapping[str, Family]:
    """A table of families."""
    return MappingProxyType({family.model_type: family for family in families})


@cache
def _all_defaults() -> dict[str, dict[str, Any]]:
    text = Path(__file__).with_name("defaults.json").read_text(encoding="utf-8")
    return dict(json.loads(text))
