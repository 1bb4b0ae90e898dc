"""config.json as typed facts: every key resolved in its old and new spellings, contradictions refused."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ingot.errors import ConfigError, in_columns, shown
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.config.experts import (
    expert_names,
    has_fused_experts,
    has_no_experts,
    has_transposed_experts,
)
from ingot.pipeline.checkpoint.config.latent import LatentConfig, read_latent
from ingot.pipeline.checkpoint.config.layers import LayerConfig, read_layers
from ingot.pipeline.checkpoint.config.recurrent import (
    BranchMultipliers,
    convolution_feed_forward,
    has_one_convolution,
    read_branch_multipliers,
)
from ingot.pipeline.checkpoint.config.text_tower import text_config
from ingot.pipeline.checkpoint.config.unequal_layers import (
    AltUp,
    LayerInputs,
    LayerShape,
    read_altup,
    read_layer_inputs,
)
from ingot.pipeline.checkpoint.families import FAMILIES, Family, NormPlace, missing_feature
from ingot.pipeline.checkpoint.json_files import ConfigReader

ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2", "silu", "xielu")
_EPSILON_WITHOUT_KEY = 1e-5
_DEFAULTS = {
    "rope_scaling": None,
    "rope_parameters": None,
    "partial_rotary_factor": None,
    "rope_theta": None,
}


@dataclass(frozen=True)
class DecoderConfig:
    """The resolved shape of a decoder.

    attention_scale      factor of the attention scores
    attention_softcap    scores become softcap * tanh(score / softcap); 0: unchanged. logit_softcap: the same for logits
    logits_multiplier, logits_divisor    factors of the logits
    parallel             attention and feed-forward read the same hidden state, through so many parallel_norms
    embedding_size       width of the embedding and of the head; another than hidden_size has a projection after the one
                         and before the other
    stream_norms         norms are on the residual stream (Family.norm_place). has_last_norm: one is after the layers
    clip_qkv             queries, keys and values are clipped to -clip_qkv .. clip_qkv; 0: not
    names                part of a tensor's path -> the checkpoint's own
    fused_experts        the weights of a layer's experts are one tensor [experts, rows, columns]
    transposed_experts   so, but [experts, columns, rows]
    layer_inputs         inputs of each layer; None for none. altup: several residual streams; None for one
    extra_layers         layers numbered after the last that predict further tokens (mtp.py)
    latent               sizes of latent attention, which has one KV head: num_kv_heads and head_dim are its
    eos_token_ids        from generation_config.json, or else from config.json
    """

    model_type: str
    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_epsilon: float
    activation: str
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    head_bias: bool
    parallel: bool
    parallel_norms: int
    embedding_size: int
    stream_norms: bool
    has_last_norm: bool
    clip_qkv: float
    has_qk_norm: bool
    attention_scale: float
    attention_softcap: float
    logit_softcap: float
    embedding_multiplier: float
    residual_multiplier: float
    logits_multiplier: float
    logits_divisor: float
    names: Mapping[str, str]
    layers: tuple[LayerConfig, ...]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    fused_experts: bool = False
    transposed_experts: bool = False
    extra_layers: int = 0
    multipliers: BranchMultipliers = field(default_factory=BranchMultipliers)
    layer_inputs: LayerInputs | None = None
    altup: AltUp | None = None
    latent: LatentConfig | None = None

    @property
    def default_context_tokens(self) -> int:
        """Context of a recipe without context_tokens: see RopeParameters.default_context_tokens."""
        return min(
            (layer.rope.default_context_tokens for layer in self.layers if layer.rope), default=self.max_positions
        )

    def norm_place(self, layer: LayerConfig) -> NormPlace:
        """Return the place of the layer's norms (see Family)."""
        if self.stream_norms:
            return "stream"
        rules = self.family.recurrent
        return (rules.norm_place if rules and layer.recurrent else "") or self.family.norm_place

    def feed_forward_norm(self, layer: LayerConfig) -> str:
        """Name of the norm of the feed-forward's input, where there is one."""
        rules = self.family.recurrent
        own = rules is not None and rules.norm_place and layer.recurrent is not None
        around = self.norm_place(layer) == "around"
        return "pre_feedforward_layernorm" if own or around else "post_attention_layernorm"

    def tensor_name(self, path: str) -> str:
        """The checkpoint's name of a tensor that Llama calls `path`, such as "model.layers.0.mlp.up_proj.weight".

        A name of two parts, such as "mlp.shared_expert", is replaced before those of one.
        """
        for pair in (name for name in self.names if "." in name):
            path = path.replace(f".{pair}.", f".{self.names[pair]}.")
        parts = (self.names.get(part, part) for part in path.split("."))
        return ".".join(part for part in parts if part)


def read_config(checkpoint: Checkpoint) -> DecoderConfig:
    """Read and resolve config.json and generation_config.json.

    Raises ConfigError: unknown model_type, activation or rope type (with the nearest name and the list), a value of the
    wrong type, head counts that do not divide, a feature that is not supported.
    """
    _refuse_draft_heads(checkpoint)
    family = _family(checkpoint)
    place = f"{checkpoint.config_file}{': text_config' if checkpoint.tower else ''}"
    inner = _inner_values(checkpoint.config, family, place)
    older = {new: checkpoint.config[old] for new, old in family.older_keys.items() if old in checkpoint.config}
    values = {**checkpoint.config, **inner, **older}
    reader = ConfigReader(place, values, {**_DEFAULTS, **family.defaults}, family.keys)
    _refuse_unsupported(reader, family)
    _check_layer_count(reader, checkpoint)
    latent = read_latent(reader, family.latent)
    num_heads, num_kv_heads, head_dim = _heads(reader, family, latent)
    activation_key = "hidden_activation" if reader.reads("hidden_activation") else "hidden_act"
    intermediate_size = _intermediate_size(reader, family)
    multipliers = reader.reads("residual_multiplier")
    names = _names(checkpoint, family)
    before_key = family.norm_before_key
    stream_norms = not reader.boolean(before_key) if before_key else family.norm_place == "stream"
    uniform = LayerShape(num_kv_heads, head_dim, intermediate_size)
    layers = read_layers(reader, family, uniform, latent, checkpoint.shapes)
    return DecoderConfig(
        model_type=str(reader.raw("model_type")),
        family=family,
        vocab_size=reader.integer("vocab_size"),
        hidden_size=reader.integer("hidden_size"),
        intermediate_size=intermediate_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_positions=reader.integer("max_position_embeddings"),
        norm_epsilon=reader.number(family.epsilon_key) if family.epsilon_key else _EPSILON_WITHOUT_KEY,
        activation=_activation(reader, family, activation_key),
        tied_embeddings=reader.boolean("tie_word_embeddings"),
        qkv_bias=_switch_of(reader, family.qkv_bias),
        output_bias=_switch_of(reader, family.output_bias),
        mlp_bias=_switch_of(reader, family.mlp_bias),
        head_bias=_switch_of(reader, family.head_bias),
        parallel=_switch_of(reader, family.parallel),
        parallel_norms=_parallel_norms(reader, family),
        embedding_size=reader.optional_integer("word_embed_proj_dim") or reader.integer("hidden_size"),
        stream_norms=stream_norms,
        has_last_norm=not stream_norms and not (family.last_norm_off_key and reader.boolean(family.last_norm_off_key)),
        clip_qkv=reader.optional_number("clip_qkv") or 0.0,
        has_qk_norm=family.qk_norm != "none" and _switch_of(reader, family.qk_norm_key or True),
        attention_scale=latent.attention_scale(layers[0].rope)
        if latent
        else _attention_scale(reader, family, head_dim),
        attention_softcap=(reader.optional_number("attn_logit_softcapping") or 0.0)
        if family.attention_softcap
        else 0.0,
        logit_softcap=reader.optional_number("final_logit_softcapping") or 0.0,
        embedding_multiplier=_embedding_multiplier(reader, family),
        residual_multiplier=reader.number("residual_multiplier") if multipliers else _depth_scale(reader),
        logits_multiplier=reader.number("logit_scale") if reader.reads("logit_scale") else 1.0,
        logits_divisor=reader.number("logits_scaling")
        if multipliers and not reader.reads("logit_scale")
        else _width_ratio(reader),
        names=names,
        layers=layers,
        eos_token_ids=_eos_token_ids(reader, checkpoint),
        bos_token_id=reader.optional_integer("bos_token_id", minimum=0),
        fused_experts=family.experts is not None and has_fused_experts(checkpoint.shapes, names),
        transposed_experts=family.experts is not None
        and family.experts.may_be_transposed
        and has_transposed_experts(checkpoint.shapes, names, reader.integer("hidden_size")),
        extra_layers=_extra_layers(reader, family),
        multipliers=read_branch_multipliers(reader) if family.branch_multipliers else BranchMultipliers(),
        layer_inputs=read_layer_inputs(reader, family),
        altup=read_altup(reader, family),
        latent=latent,
    )


def _inner_values(config: Mapping[str, Any], family: Family, place: str) -> dict[str, Any]:
    """Values in objects of config.json, by their paths, such as attn_config.clip_qkv."""
    found = {}
    for path in (key for key in family.defaults if "." in key):
        outer, _, last = path.rpartition(".")
        holder = _inner_object(config, outer, place)
        if last in holder:
            found[path] = holder[last]
    return found


def _inner_object(config: Mapping[str, Any], path: str, place: str) -> Mapping[str, Any]:
    """Return the object at the path; an empty one where it is absent or null."""
    outer, _, last = path.rpartition(".")
    holder = _inner_object(config, outer, place) if outer else config
    value: Any = holder.get(last)
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{place}: {path} is {shown(value)}; it must be an object or null")
    return value or {}


def _refuse_draft_heads(checkpoint: Checkpoint) -> None:
    """Raise ConfigError for a checkpoint of heads that draft for another model."""
    config = checkpoint.config
    architectures = config.get("architectures")
    named = [config.get("model_type"), *(architectures if isinstance(architectures, list) else ())]
    named = [name for name in named if isinstance(name, str)]
    kinds = {
        "EAGLE": any("eagle" in name.lower() for name in named) or {"d2t", "t2d"} & checkpoint.shapes.keys(),
        "Medusa": "medusa_num_heads" in config or any("medusa" in name.lower() for name in named),
        "Hydra": "hydra_num_heads" in config,
        "MLP speculator": "mlp_speculator" in named,
    }
    kind = next((name for name, is_kind in kinds.items() if is_kind), None)
    if kind is not None:
        base = config.get("base_model_name_or_path")
        of_base = f", {shown(base)}," if isinstance(base, str) else ""
        raise ConfigError(
            f"{checkpoint.config_file}: the checkpoint is {kind} heads, which draft for another model{of_base} from its"
            " hidden states and cannot be built alone. Ingot drafts by MTP layers in a model's own checkpoint"
            " (speculation: mtp) or by a smaller model: build the model itself"
        )


def _family(checkpoint: Checkpoint) -> Family:
    text = text_config(checkpoint.config, str(checkpoint.config_file)) or checkpoint.config
    model_type, outer = text.get("model_type"), checkpoint.config.get("model_type")
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    around = "" if text is checkpoint.config else f" of the text model in {outer}"
    found = f"{checkpoint.config_file}: model_type{around} is {shown(model_type)}"
    reasons = [reason for name in (model_type, outer) if isinstance(name, str) and (reason := missing_feature(name))]
    why = f"it has {reasons[0]}" if reasons else "no version of Ingot knows that architecture"
    if not isinstance(model_type, str):
        raise ConfigError(f"{found}; it must be a text, one of the {len(FAMILIES)} that `ingot models` lists")
    raise ConfigError(
        f"{found}, which Ingot does not import: {why}. `ingot models` lists the {len(FAMILIES)} that it imports:\n"
        f"{in_columns(sorted(FAMILIES))}"
    )


def _refuse_unsupported(reader: ConfigReader, family: Family) -> None:
    for key, (supported, reason) in family.only.items():
        if reader.raw(key) != supported:
            raise ConfigError(f"{reader.fail(key, shown(supported))}: {reason}")
    if reader.raw("use_bidirectional_attention") != "vision" and reader.boolean("use_bidirectional_attention"):
        raise ConfigError(f"{reader.place}: use_bidirectional_attention is true; only causal decoders can be compiled")
    if not family.attention_softcap and reader.raw("attn_logit_softcapping") is not None:
        raise reader.fail("attn_logit_softcapping", "null: this model_type does not apply it")
    _refuse_other_activation(reader)


def _refuse_other_activation(reader: ConfigReader) -> None:
    """Refuse a hidden_act without hidden_activation, the key that Gemma reads; with both, hidden_act is ignored."""
    given, default = reader.values.get("hidden_act"), reader.raw("hidden_activation")
    if reader.reads("hidden_activation") and "hidden_activation" not in reader.values and given not in (None, default):
        raise ConfigError(
            f"{reader.place}: hidden_act is {shown(given)}, but this model_type reads hidden_activation, which is "
            f"absent and defaults to {shown(default)}; set hidden_activation"
        )


def _check_layer_count(reader: ConfigReader, checkpoint: Checkpoint) -> None:
    """Refuse a wrong count before anything is allocated per layer: a billion layers must not fill the memory."""
    if reader.reads("num_hidden_layers") and reader.integer("num_hidden_layers") > len(checkpoint.shapes):
        raise ConfigError(
            f"{reader.place}: num_hidden_layers is {reader.raw('num_hidden_layers')}, but the checkpoint holds "
            f"{len(checkpoint.shapes)} tensors; config.json and weights belong to different models"
        )


def _names(checkpoint: Checkpoint, family: Family) -> Mapping[str, str]:
    """The family's names. The decoder's own is "model" where transformers 5 saved the checkpoint under its names, and
    "" where it was saved alone, as in the first GPT-2, or "decoder" for "model.decoder"."""
    saved = {name: other for name, other in family.saved_names.items() if _has_part(checkpoint, other)}
    names, decoder = {**family.names, **saved}, family.names.get("model", "model")
    if names and not _begins(checkpoint, decoder):
        outer, _, alone = decoder.rpartition(".")
        others = (alone,) if outer else ("model",)
        names = {**names, "model": next((name for name in others if _begins(checkpoint, name)), outer and decoder)}
    if family.experts is not None:
        if not checkpoint.config.get(family.experts.count, 1) and family.experts.without:
            return {**names, **family.experts.without}
        return {**names, **expert_names(family.experts, checkpoint.shapes)}
    if family.recurrent is not None:
        if has_one_convolution(checkpoint.shapes):
            return {**names, **family.recurrent.other_names}
        recurrent = family.recurrent.saved_names
        return {**names, **{name: other for name, other in recurrent.items() if not _has_part(checkpoint, name)}}
    return names


def _has_part(checkpoint: Checkpoint, part: str) -> bool:
    return any(f".{part}." in name for name in checkpoint.shapes)


def _begins(checkpoint: Checkpoint, decoder: str) -> bool:
    return any(name.startswith(f"{decoder}.") for name in checkpoint.shapes)


def _intermediate_size(reader: ConfigReader, family: Family) -> int:
    """The width of dense feed-forwards: without experts that of the shared ones, where these are always there; the
    largest where layers have sizes of their own, which read_shapes reads."""
    if family.experts is not None and family.experts.without and has_no_experts(reader, family.experts):
        return reader.integer(family.experts.shared)
    if family.recurrent is not None and family.recurrent.kind == "convolution":
        return convolution_feed_forward(reader)
    given = reader.raw("intermediate_size")
    if isinstance(given, list) and given:
        return max((size for size in given if type(size) is int), default=0)
    return reader.optional_integer("intermediate_size") or 4 * reader.integer("hidden_size")


def _activation(reader: ConfigReader, family: Family, key: str) -> str:
    name = reader.choice(key, ACTIVATIONS)
    name = family.other_activations.get(name, name)
    if name == "xielu" and family.gated:
        raise reader.fail(key, "an activation without weights in a gated feed-forward")
    return name


def _heads(reader: ConfigReader, family: Family, latent: LatentConfig | None) -> tuple[int, int, int]:
    """The number of query heads, the number of key-value heads, and head_dim."""
    hidden_size, num_heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    if latent is not None:
        return num_heads, 1, latent.key_dim
    has_groups = reader.reads("num_key_value_heads")
    num_kv_heads = (reader.optional_integer("num_key_value_heads") if has_groups else None) or num_heads
    if family.multi_query_key and not (family.grouped_key and reader.boolean(family.grouped_key)):
        is_one = reader.boolean(family.multi_query_key)
        if not is_one and num_kv_heads != num_heads:
            allowed = f"{num_heads}, the number of heads, or absent where {family.multi_query_key} is false"
            raise reader.fail("num_key_value_heads", allowed)
        num_kv_heads = 1 if is_one else num_heads
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"{reader.place}: num_attention_heads is {num_heads} and num_key_value_heads is {num_kv_heads}; "
            "the first must be a multiple of the second"
        )
    head_dim = reader.optional_integer("head_dim")
    if head_dim is None and hidden_size % num_heads:
        raise ConfigError(
            f"{reader.place}: hidden_size is {hidden_size} and num_attention_heads is {num_heads}; without head_dim "
            "the first must be a multiple of the second"
        )
    if family.fixed_head_dim and hidden_size % num_heads == 0 and head_dim not in (None, hidden_size // num_heads):
        raise reader.fail("head_dim", f"{hidden_size // num_heads}, hidden_size / num_attention_heads, or absent")
    return num_heads, num_kv_heads, head_dim or hidden_size // num_heads


def _parallel_norms(reader: ConfigReader, family: Family) -> int:
    key = family.parallel_norms
    if isinstance(key, int):
        return key
    grouped = reader.boolean(family.grouped_key)
    if grouped and isinstance(family.parallel, str) and not reader.boolean(family.parallel):
        raise reader.fail(family.parallel, f"true where {family.grouped_key} is")
    count = reader.optional_integer(key) or (2 if grouped else 1)
    if count > 1 + grouped:
        allowed = "1, 2 or null" if grouped else f"1 or null where {family.grouped_key} is false"
        raise reader.fail(key, allowed)
    return count


def _switch_of(reader: ConfigReader, rule: bool | str) -> bool:
    """A fact of the family, or the value of its key."""
    return reader.boolean(rule) if isinstance(rule, str) else rule


def _extra_layers(reader: ConfigReader, family: Family) -> int:
    key = family.mtp.count_key if family.mtp else ""
    return (reader.optional_integer(key, minimum=0) or 0) if key else 0


def _attention_scale(reader: ConfigReader, family: Family, head_dim: int) -> float:
    if reader.reads("key_multiplier"):
        return reader.number("key_multiplier") * float(head_dim**-0.5)
    match family.scale_key:
        case "query_pre_attn_scalar":
            return float(reader.number("query_pre_attn_scalar") ** -0.5)
        case "attention_multiplier" if reader.raw("attention_multiplier") is not None:
            return reader.number("attention_multiplier")
        case "one":
            return 1.0
        case "scale_attn_weights" if not reader.boolean("scale_attn_weights"):
            return 1.0
        case _:
            return float(head_dim**-0.5)


def _embedding_multiplier(reader: ConfigReader, family: Family) -> float:
    """Factor of the embeddings; exact here, whereas Gemma rounds it to 16 bits when it runs in 16 bits."""
    if _switch_of(reader, family.scaled_embedding):
        return float(reader.integer("hidden_size") ** 0.5)
    key = "scale_emb" if reader.reads("scale_emb") else "embedding_multiplier"
    return reader.number(key) if reader.reads(key) else 1.0


def _depth_scale(reader: ConfigReader) -> float:
    """Factor of what a layer adds to the residual stream: scale_depth / sqrt(layers), 1 where that is null."""
    scale = reader.optional_number("scale_depth")
    return 1.0 if scale is None else float(scale / reader.integer("num_hidden_layers") ** 0.5)


def _width_ratio(reader: ConfigReader) -> float:
    """Return the divisor of the logits: hidden_size / dim_model_base, 1 where that is null."""
    base = reader.optional_integer("dim_model_base")
    return 1.0 if base is None else reader.integer("hidden_size") / base


def _eos_token_ids(reader: ConfigReader, checkpoint: Checkpoint) -> tuple[int, ...]:
    place = str(checkpoint.path / "generation_config.json")
    generation = ConfigReader(place, checkpoint.generation_config, {"eos_token_id": None})
    return generation.integers("eos_token_id") or reader.integers("eos_token_id") or ()
