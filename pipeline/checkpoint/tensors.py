"""The tensors that a configuration requires, and a check that a checkpoint has exactly these, in these shapes."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from ingot.artifact.safetensors import StoredTensor
from ingot.errors import CheckpointError, did_you_mean, shown
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.config.decoder import DecoderConfig
from ingot.pipeline.checkpoint.config.experts import ExpertsConfig
from ingot.pipeline.checkpoint.config.latent import latent_tensors
from ingot.pipeline.checkpoint.config.layers import LayerConfig
from ingot.pipeline.checkpoint.config.mtp import DRAFT, MtpConfig, find_mtp
from ingot.pipeline.checkpoint.config.unequal_layers import LayerShape
from ingot.pipeline.checkpoint.recurrent_tensors import recurrent_tensors

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
HEAD_BIAS = "lm_head.bias"
PROJECTION_IN, PROJECTION_OUT = "model.project_in", "model.project_out"
POSITIONS = "model.embed_positions.weight"
# Shapes of the parameters of a feed-forward with xIELU.
XIELU: dict[str, tuple[int, ...]] = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
# Buffers that older versions of transformers saved; they are computed from config.json.
_HARMLESS = re.compile(r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
_LISTED = 5
NORMS_BESIDE = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
"""Of the dense feed-forward's result, of what the experts next to it read, and of their result."""
LAYER_INPUTS = "model.embed_tokens_per_layer.weight"


@dataclass(frozen=True)
class ExpectedTensor:
    """A tensor's shape and the keys of config.json that determine it."""

    shape: tuple[int, ...]
    keys: str


def check_tensors(checkpoint: Checkpoint, config: DecoderConfig) -> tuple[str, ...]:
    """Compare the checkpoint's tensors with those that `config` requires; return the names of those to import.

    Raises CheckpointError for a tensor that is missing, has another shape or is not in the model, and for tied
    embeddings whose two copies differ.
    """
    expected, shapes = expected_tensors(config), checkpoint.shapes
    mtp = find_mtp(config, shapes)
    for name, wanted in (expected | (expected_tensors(mtp) if mtp else {})).items():
        if name not in shapes:
            raise CheckpointError(_missing(checkpoint, config, name, wanted))
        if shapes[name] != wanted.shape:
            raise CheckpointError(
                f"{checkpoint.file_of(name)}: {shown(name)} has the shape {list(shapes[name])}, but "
                f"{checkpoint.config_file.name} ({wanted.keys}) requires {list(wanted.shape)}; "
                "config.json and weights belong to different models"
            )
    _check_types(checkpoint, expected)
    embedding, head = config.tensor_name(EMBEDDING), config.tensor_name(HEAD)
    if config.tied_embeddings and head in shapes:
        _check_tied(checkpoint, embedding, head)
        expected[head] = expected[embedding]
    _refuse_left_over(checkpoint, set(expected), _left_out(config))
    return tensor_names(config)


def _check_types(checkpoint: Checkpoint, names: Iterable[str]) -> None:
    """Raise CheckpointError for weights that are not floats of 16 or 32 bits."""
    for name in names:
        stored = checkpoint.tensors.get(name)
        if stored is not None:
            checkpoint.require_weight_type(stored)


def tensor_names(config: DecoderConfig) -> tuple[str, ...]:
    """Names of the tensors to import from a checkpoint of this configuration."""
    return tuple(expected_tensors(config))


def expected_tensors(config: DecoderConfig) -> dict[str, ExpectedTensor]:
    """Every tensor that a configuration requires, by its name in the checkpoint; without a head that shares the
    embedding's tensor."""
    return {config.tensor_name(path): tensor for path, tensor in _expected(config)}


def _missing(checkpoint: Checkpoint, config: DecoderConfig, name: str, wanted: ExpectedTensor) -> str:
    near, head = did_you_mean(name, checkpoint.shapes), config.tensor_name(HEAD)
    tie = ", or set tie_word_embeddings to true if the model shares them" if name == head else ""
    return (
        f"{checkpoint.path}: the tensor {shown(name)} of shape {list(wanted.shape)} is missing, which a "
        f"{config.model_type} model needs ({wanted.keys}).{near} Download the whole checkpoint{tie}"
    )


def _refuse_left_over(checkpoint: Checkpoint, expected: set[str], buffers: str) -> None:
    others = (name for name in checkpoint.shapes if name not in expected)
    left_over = [name for name in others if not _is_harmless(checkpoint, name, buffers)]
    if left_over:
        shown = ", ".join(repr(name) for name in left_over[:_LISTED])
        more = f" and {len(left_over) - _LISTED} more" if len(left_over) > _LISTED else ""
        raise CheckpointError(
            f"{checkpoint.path}: {shown}{more}: no such tensor in a model of this config.json, so the program would "
            f"compute another model.{did_you_mean(left_over[0], expected)} Check model_type, num_hidden_layers, biases"
        )


def _of_unequal_layers(config: DecoderConfig) -> Iterator[tuple[str, ExpectedTensor]]:
    """Tensors of the whole model that inputs of each layer and several residual streams need."""
    hidden, inputs, altup = config.hidden_size, config.layer_inputs, config.altup
    if inputs is not None:
        width, keys = len(config.layers) * inputs.width, "num_hidden_layers, hidden_size_per_layer_input"
        yield LAYER_INPUTS, ExpectedTensor((inputs.vocab_size, width), f"vocab_size_per_layer_input, {keys}")
        yield "model.per_layer_model_projection.weight", ExpectedTensor((width, hidden), f"{keys}, hidden_size")
        yield from _norm(config, "model.per_layer_projection_norm", inputs.width, "hidden_size_per_layer_input")
    for stream in range(altup.streams - 1 if altup else 0):
        for name in ("altup_projections", "altup_unembed_projections"):
            yield f"model.{name}.{stream}.weight", ExpectedTensor((hidden, hidden), "altup_num_inputs, hidden_size")


def _of_unequal_layer(config: DecoderConfig, prefix: str) -> Iterator[tuple[str, ExpectedTensor]]:
    """Tensors of a layer for its own inputs, its scale, and several residual streams."""
    hidden, inputs, altup = config.hidden_size, config.layer_inputs, config.altup
    if inputs is not None:
        keys = "hidden_size_per_layer_input, hidden_size"
        yield from _linear(config, f"{prefix}.per_layer_input_gate", inputs.width, hidden, False, keys)
        yield from _linear(config, f"{prefix}.per_layer_projection", hidden, inputs.width, False, keys)
    if config.family.layer_scale:
        yield f"{prefix}.layer_scalar", ExpectedTensor((1,), "model_type")
    if altup is not None:
        rank, streams = altup.laurel_rank, altup.streams
        yield from _linear(config, f"{prefix}.laurel.linear_left", rank, hidden, False, "laurel_rank, hidden_size")
        yield from _linear(config, f"{prefix}.laurel.linear_right", hidden, rank, False, "laurel_rank, hidden_size")
        yield from _norm(config, f"{prefix}.laurel.post_laurel_norm", hidden, "hidden_size")
        for name, rows, columns in (
            ("correction_coefs", streams, streams),
            ("prediction_coefs", streams**2, streams),
            ("modality_router", streams, hidden),
        ):
            yield from _linear(config, f"{prefix}.altup.{name}", rows, columns, False, "altup_num_inputs, hidden_size")
        yield from _norm(config, f"{prefix}.altup.router_norm", hidden, "hidden_size")
        yield f"{prefix}.altup.correct_output_scale", ExpectedTensor((hidden,), "hidden_size")


def _left_out(config: DecoderConfig) -> str:
    """Pattern of the tensors that are not imported; "" for none. Layers that share keys may have some."""
    first = len(config.layers)
    extra = (rf"\.layers\.{layer}\." for layer in range(first, first + config.extra_layers))
    sharing = (
        rf"\.layers\.{number}\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\."
        for number, layer in enumerate(config.layers)
        if layer.shape.shares is not None
    )
    return "|".join(filter(None, (config.family.buffers, *extra, *sharing)))


def _is_harmless(checkpoint: Checkpoint, name: str, buffers: str) -> bool:
    """Whether the tensor is a buffer, or one of the all-zero biases that auto-gptq adds to every layer."""
    if _HARMLESS.search(name) or (buffers and re.search(buffers, name)):
        return True
    is_added = name.endswith(".bias") and f"{name.removesuffix('.bias')}.weight" in checkpoint.encoded
    return is_added and not _raw(checkpoint.tensor(name)).any()


def _check_tied(checkpoint: Checkpoint, embedding: str, head: str) -> None:
    if not _same_tensor(checkpoint, embedding, head):
        raise CheckpointError(
            f"{checkpoint.path}: tie_word_embeddings is true, but {shown(head)} differs from {shown(embedding)}; "
            "set tie_word_embeddings to false in config.json, or remove the wrong tensor"
        )


def _same_tensor(checkpoint: Checkpoint, one: str, other: str) -> bool:
    if one in checkpoint.encoded or other in checkpoint.encoded:
        return False
    first, second = checkpoint.tensor(one), checkpoint.tensor(other)
    same = (first.dtype, first.shape) == (second.dtype, second.shape)
    return same and np.array_equal(_raw(first), _raw(second))


def _raw(stored: StoredTensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.memmap(stored.file, np.uint8, mode="r", offset=stored.offset, shape=(stored.num_bytes,))


def _expected(config: DecoderConfig) -> Iterator[tuple[str, ExpectedTensor]]:
    hidden, vocab = config.hidden_size, config.vocab_size
    width = config.embedding_size
    width_key = "hidden_size" if width == hidden else "word_embed_proj_dim"
    yield EMBEDDING, ExpectedTensor((vocab, width), f"vocab_size, {width_key}")
    if isinstance(config, MtpConfig):
        yield from _of_mtp_layer(config)
        return
    if config.family.positions == "learned":
        rows = config.max_positions + config.family.position_offset
        yield POSITIONS, ExpectedTensor((rows, hidden), "max_position_embeddings, hidden_size")
    for index, layer in enumerate(config.layers):
        yield from _of_layer(config, f"model.layers.{index}", layer)
    yield from _of_unequal_layers(config)
    if config.has_last_norm:
        yield from _norm(config, "model.norm", hidden, "hidden_size")
    if width != hidden:
        yield from _linear(config, PROJECTION_IN, hidden, width, False, f"hidden_size, {width_key}")
        yield from _linear(config, PROJECTION_OUT, width, hidden, False, f"{width_key}, hidden_size")
    if not config.tied_embeddings:
        yield HEAD, ExpectedTensor((vocab, width), f"vocab_size, {width_key}, tie_word_embeddings false")
    if config.head_bias:
        yield HEAD_BIAS, ExpectedTensor((vocab,), "vocab_size")


def _of_layer(config: DecoderConfig, prefix: str, layer: LayerConfig) -> Iterator[tuple[str, ExpectedTensor]]:
    if layer.attends:
        if config.latent is None:
            yield from _attention(config, f"{prefix}.self_attn", layer.shape)
        else:
            yield from _latent_attention(config, f"{prefix}.self_attn")
    if layer.recurrent is not None:
        yield from _recurrent(config, f"{prefix}.linear_attn", layer)
    has_both = config.family.experts is not None and config.family.experts.with_dense
    if layer.feeds and (layer.experts is None or has_both):
        yield from _feed_forward(config, f"{prefix}.mlp", layer.shape.intermediate_size)
    if layer.experts is not None:
        yield from _experts(config, f"{prefix}.{'moe' if has_both else 'mlp'}", layer.experts)
    for norm in layer_norms(config, layer):
        yield from _norm(config, f"{prefix}.{norm}", config.hidden_size, "hidden_size")
    yield from _of_unequal_layer(config, prefix)


def _of_mtp_layer(config: MtpConfig) -> Iterator[tuple[str, ExpectedTensor]]:
    hidden = config.hidden_size
    for norm in ("embedding_norm", "hidden_norm", "norm"):
        yield from _norm(config, f"{DRAFT}.{norm}", hidden, "hidden_size")
    yield from _linear(config, f"{DRAFT}.projection", hidden, 2 * hidden, False, "hidden_size")
    yield from _of_layer(config, DRAFT, config.layers[0])


def _recurrent(config: DecoderConfig, prefix: str, layer: LayerConfig) -> Iterator[tuple[str, ExpectedTensor]]:
    rules = config.family.recurrent
    assert rules is not None
    assert layer.recurrent is not None
    for path, (shape, keys) in recurrent_tensors(layer.recurrent, rules, config.hidden_size).items():
        yield f"{prefix}.{path}", ExpectedTensor(shape, keys)


def layer_norms(config: DecoderConfig, layer: LayerConfig) -> tuple[str, ...]:
    """Names of a layer's norms over the hidden state, in the order they are applied."""
    names = _norms_of_blocks(config, layer)
    if layer.experts is not None and config.family.experts is not None and config.family.experts.with_dense:
        names += NORMS_BESIDE
    return names + (("post_per_layer_input_norm",) if config.layer_inputs else ())


def _norms_of_blocks(config: DecoderConfig, layer: LayerConfig) -> tuple[str, ...]:
    has_mixer = layer.attends or layer.recurrent is not None
    match config.norm_place(layer):
        case "before" if config.parallel and config.parallel_norms == 1:
            return ("input_layernorm",)
        case "before" if not (has_mixer and layer.feeds):
            return ("input_layernorm" if has_mixer else config.feed_forward_norm(layer),)
        case "before" | "stream":
            return ("input_layernorm", config.feed_forward_norm(layer))
        case "after":
            return ("post_attention_layernorm", "post_feedforward_layernorm")
        case "around":
            return (
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            )


def _norm(config: DecoderConfig, name: str, width: int, keys: str) -> Iterator[tuple[str, ExpectedTensor]]:
    if not config.family.norms_have_weights:
        return
    yield f"{name}.weight", ExpectedTensor((width,), keys)
    if config.family.norm == "layer-with-bias":
        yield f"{name}.bias", ExpectedTensor((width,), keys)


def _linear(
    config: DecoderConfig, name: str, rows: int, columns: int, bias: bool, keys: str
) -> Iterator[tuple[str, ExpectedTensor]]:
    yield f"{name}.weight", ExpectedTensor((columns, rows) if config.family.transposed else (rows, columns), keys)
    if bias:
        yield f"{name}.bias", ExpectedTensor((rows,), keys)


def _attention(config: DecoderConfig, prefix: str, shape: LayerShape) -> Iterator[tuple[str, ExpectedTensor]]:
    hidden = config.hidden_size
    queries, keys = config.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    query_keys, kv_keys = "num_attention_heads, head_dim", "num_key_value_heads, head_dim"
    if config.family.fused_qkv:
        both = f"num_attention_heads, {kv_keys}, hidden_size"
        yield from _linear(config, f"{prefix}.qkv_proj", queries + 2 * keys, hidden, config.qkv_bias, both)
    else:
        gated = 2 * queries if config.family.attention_gate else queries
        yield from _linear(config, f"{prefix}.q_proj", gated, hidden, config.qkv_bias, f"{query_keys}, hidden_size")
        for name in () if shape.shares is not None else ("k_proj",) if shape.values_are_keys else ("k_proj", "v_proj"):
            yield from _linear(config, f"{prefix}.{name}", keys, hidden, config.qkv_bias, f"{kv_keys}, hidden_size")
    yield from _linear(config, f"{prefix}.o_proj", hidden, queries, config.output_bias, f"hidden_size, {query_keys}")
    if config.family.inner_norms:
        yield from _norm(config, f"{prefix}.attn_sub_norm", queries, query_keys)
    if config.family.gate_layer:
        yield from _linear(config, f"{prefix}.attention_gate", queries, hidden, False, f"{query_keys}, hidden_size")
    if config.family.sinks:
        yield f"{prefix}.sinks", ExpectedTensor((config.num_heads,), "num_attention_heads")
    if config.has_qk_norm:
        per_head = config.family.qk_norm == "head"
        norms = (("q_norm", queries, query_keys), ("k_norm", keys, kv_keys))
        for name, width, says in norms if shape.shares is None else norms[:1]:
            yield from _norm(
                config, f"{prefix}.{name}", shape.head_dim if per_head else width, "head_dim" if per_head else says
            )


def _latent_attention(config: DecoderConfig, prefix: str) -> Iterator[tuple[str, ExpectedTensor]]:
    sizes = config.latent
    assert sizes is not None
    biases = {"q_a_proj": config.qkv_bias, "kv_a_proj_with_mqa": config.qkv_bias, "o_proj": config.output_bias}
    for name, (shape, keys) in latent_tensors(sizes, config.num_heads, config.hidden_size).items():
        yield from _linear(config, f"{prefix}.{name}", *shape, biases.get(name, False), keys)
    if sizes.query_rank:
        yield from _norm(config, f"{prefix}.q_a_layernorm", sizes.query_rank, "q_lora_rank")
    yield from _norm(config, f"{prefix}.kv_a_layernorm", sizes.rank, "kv_lora_rank")


def _feed_forward(config: DecoderConfig, prefix: str, inner: int) -> Iterator[tuple[str, ExpectedTensor]]:
    hidden, bias = config.hidden_size, config.mlp_bias
    keys = "intermediate_size, hidden_size"
    if config.family.inner_norms:
        yield from _norm(config, f"{prefix}.ffn_sub_norm", inner, "intermediate_size")
    if config.family.fused_gate_up:
        yield from _linear(config, f"{prefix}.gate_up_proj", 2 * inner, hidden, bias, keys)
    else:
        for name in ("gate_proj", "up_proj") if config.family.gated else ("up_proj",):
            yield from _linear(config, f"{prefix}.{name}", inner, hidden, bias, keys)
    if config.activation == "xielu":
        for name, shape in XIELU.items():
            yield f"{prefix}.act_fn.{name}", ExpectedTensor(shape, "hidden_act")
    yield from _linear(config, f"{prefix}.down_proj", hidden, inner, bias, keys)


def _experts(config: DecoderConfig, prefix: str, experts: ExpertsConfig) -> Iterator[tuple[str, ExpectedTensor]]:
    rules, hidden, count, inner = config.family.experts, config.hidden_size, experts.count, experts.inner_size
    assert rules is not None
    outer, keys = (
        experts.latent_size or hidden,
        f"{rules.width}, {rules.latent if experts.latent_size else 'hidden_size'}",
    )
    ups = ("gate_proj", "up_proj") if config.family.gated else ("up_proj",)
    yield from _linear(config, f"{prefix}.router", count, hidden, rules.biases, f"{rules.count}, hidden_size")
    if rules.with_dense:
        yield f"{prefix}.router_scale", ExpectedTensor((hidden,), "hidden_size")
        yield f"{prefix}.per_expert_scale", ExpectedTensor((count,), rules.count)
    if rules.correction != "none":
        shape = (count,) if rules.correction == "vector" else (1, count)
        yield f"{prefix}.correction_bias", ExpectedTensor(shape, rules.count)
    if experts.latent_size:
        for name, rows, columns in (("latent_in", outer, hidden), ("latent_out", hidden, outer)):
            yield from _linear(
                config, f"{prefix}.{name}", rows, columns, config.mlp_bias, f"{rules.latent}, hidden_size"
            )
    if rules.stacked:
        for name in (*ups, "down_proj"):
            yield f"{prefix}.stacked.{name}", ExpectedTensor((count * inner, outer), f"{rules.count}, {keys}")
    elif config.fused_experts or rules.in_turns:
        for name, rows, columns in (("fused_gate_up", len(ups) * inner, outer), ("fused_down", outer, inner)):
            shape = (columns, rows) if rules.in_turns or config.transposed_experts else (rows, columns)
            yield f"{prefix}.{name}", ExpectedTensor((count, *shape), f"{rules.count}, {keys}")
            if rules.biases:
                yield f"{prefix}.{name}_bias", ExpectedTensor((count, rows), f"{rules.count}, {keys}")
    else:
        for expert in range(count):
            for name in ups:
                yield from _linear(config, f"{prefix}.experts.{expert}.{name}", inner, outer, False, keys)
            yield from _linear(config, f"{prefix}.experts.{expert}.down_proj", outer, inner, False, keys)
    if experts.shared_size:
        yield from _feed_forward(config, f"{prefix}.shared_expert", experts.shared_size)
        if rules.shared_gate:
            yield f"{prefix}.shared_expert_gate.weight", ExpectedTensor((1, hidden), "hidden_size")
