"""Checkpoint -> IR: read the configuration, check the tensors, build the graph. Weights stay in their files."""

import gc
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Literal, Self

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.artifact import KVGeometry, ModelFacts
from ingot.errors import UsageError
from ingot.passes.model_facts import CHECKPOINT, DEQUANTIZED, DTYPE, KV, MODEL
from ingot.passes.projections import mark_projections
from ingot.passes.recurrent_ops import STATES, recurrent_states
from ingot.passes.rewriting import attentions
from ingot.passes.weights import apply_to_array, weight_sites
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.config.decoder import DecoderConfig, read_config
from ingot.pipeline.checkpoint.config.mtp import find_mtp
from ingot.pipeline.checkpoint.tensors import HEAD, check_tensors, tensor_names
from ingot.pipeline.model.altup_decoder import AltUpDecoderBuilder
from ingot.pipeline.model.decoder import DecoderBuilder
from ingot.pipeline.model.graph_builder import IR_VERSION, GraphBuilder
from ingot.pipeline.model.mtp_head import MtpBuilder
from ingot.pipeline.model.unequal_decoder import UnequalDecoderBuilder
from ingot.progress import note


class ModelSource:
    """A checkpoint that is opened, checked and imported once, however many models a build makes of it.

    Passes change a model in place, so each of candidate, baseline and reference starts from a copy of the graph; the
    tensors are shared. `context_tokens` as in `import_checkpoint`, whose errors `copy` and `check_weights` raise.
    """

    def __init__(self, checkpoint: Checkpoint, context_tokens: int | None = None) -> None:
        self.checkpoint = checkpoint
        self.context_tokens = context_tokens
        self._is_checked = False

    @classmethod
    def open(
        cls,
        path: Path | str,
        context_tokens: int | None = None,
        chat_template: Path | None = None,
        adapter: Path | None = None,
    ) -> Self:
        """Open a checkpoint, with another chat template and a LoRA adapter if they are given.

        Raises CheckpointError as Checkpoint.open and Checkpoint.with_adapter.
        """
        checkpoint = replace(Checkpoint.open(path), chat_template=chat_template)
        return cls(checkpoint.with_adapter(adapter) if adapter else checkpoint, context_tokens)

    def copy(self) -> ir.Model:
        """The imported model before any pass, for the caller to change."""
        with collector_paused():
            return self._imported.clone()

    def mtp_head(self) -> ir.Model | None:
        """The imported MTP layer before any pass, for the caller to change; None where the checkpoint has none."""
        return import_mtp_head(self.checkpoint, self._imported)

    @property
    def mtp_hidden_state(self) -> Literal["raw", "normed"]:
        """The decoder's hidden state that its MTP layer reads: before or after the last norm."""
        rules = read_config(self.checkpoint).family.mtp
        assert rules is not None
        return rules.hidden_state

    def last_norm(self) -> NDArray[np.float32]:
        """The weight of the decoder's last norm, [hidden_size]."""
        config = read_config(self.checkpoint)
        weight = apply_to_array(
            self.checkpoint.external(config.tensor_name("model.norm.weight")), lambda array: array.astype(np.float32)
        )
        return weight + np.float32(1) if config.family.norm_adds_one else weight

    @property
    def facts(self) -> ModelFacts:
        """Facts of the imported model."""
        return MODEL.of(self._imported)

    def check_weights(self) -> None:
        """Read every weight, the first time that this is called, and refuse NaN and Inf."""
        if not self._is_checked:
            config = read_config(self.checkpoint)
            mtp = find_mtp(config, self.checkpoint.shapes)
            self.checkpoint.check_finite((*tensor_names(config), *(tensor_names(mtp) if mtp else ())))
            self._is_checked = True

    @cached_property
    def _imported(self) -> ir.Model:
        return import_checkpoint(self.checkpoint, self.context_tokens, check_weights=False)


def import_checkpoint(
    checkpoint: Checkpoint, context_tokens: int | None = None, check_weights: bool = True
) -> ir.Model:
    """Build the IR of a checkpoint.

    context_tokens    longest sequence, prompt and output together; at most max_position_embeddings, which is the
                      default. A model with longrope defaults to original_max_position_embeddings: its short factors
                      are for contexts up to there, its long ones for longer ones, and the choice is made here (see
                      rope_tables).
    check_weights     read every weight once and refuse NaN and Inf

    Inputs are input_ids [T], position_ids [T], logits_indices [R] (int64), the output is logits [R, vocab_size]
    (float32). Weights of a quantized checkpoint stay codes, scales and zero points where the IR can hold them. The
    facts MODEL, KV, DTYPE and CHECKPOINT are recorded, and DEQUANTIZED where weights became floats.
    Raises CheckpointError or its ConfigError for the checkpoint, UsageError for context_tokens.
    """
    config = read_config(checkpoint)
    names = check_tensors(checkpoint, config)
    context_tokens = _context_tokens(config, context_tokens)
    if check_weights:
        checkpoint.check_finite(names)
    builder = GraphBuilder(checkpoint, name=config.model_type)
    with collector_paused():
        _decoder_of(config)(builder, config, context_tokens).build()
    model = ir.Model(builder.graph, ir_version=IR_VERSION, producer_name="ingot")
    _mark_projections(model, builder, config)
    shapes = checkpoint.shapes
    num_parameters = sum(math.prod(shapes[name]) for name in names)
    MODEL.record(model, _facts(config, context_tokens, num_parameters))
    KV.record(model, _kv_geometry(config, model))
    if checkpoint.tower is not None:
        note(checkpoint.tower.note)
    if states := recurrent_states(model.graph):
        STATES.record(model, states)
    _note_inputs(checkpoint)
    builder.encoded_values.note_warnings()
    if builder.dequantized:
        DEQUANTIZED.record(model, builder.dequantized)
    DTYPE.record(model, _half_type(checkpoint))
    CHECKPOINT.record(model, checkpoint.path.resolve().name)
    return model


def import_mtp_head(checkpoint: Checkpoint, decoder: ir.Model) -> ir.Model | None:
    """Build the IR of the checkpoint's first MTP layer (config/mtp.py); None where it has none.

    decoder    the imported decoder, whose tensors and whose layer's were checked together; both have one context

    Inputs are input_ids [T], position_ids [T], logits_indices [R] (int64) and hidden_states [T, hidden_size], those of
    the decoder for the token before each; the output is logits [R, vocab_size].
    """
    config = find_mtp(read_config(checkpoint), checkpoint.shapes)
    if config is None:
        return None
    facts = MODEL.of(decoder)
    builder = GraphBuilder(checkpoint, name=f"{config.model_type}.mtp")
    with collector_paused():
        MtpBuilder(builder, config, facts.context_tokens).build()
    head = ir.Model(builder.graph, ir_version=IR_VERSION, producer_name="ingot")
    MODEL.record(head, facts.model_copy(update={"num_layers": 1}))
    KV.record(head, _kv_geometry(config, head))
    DTYPE.record(head, DTYPE.of(decoder))
    CHECKPOINT.record(head, CHECKPOINT.of(decoder))
    return head


def _mark_projections(model: ir.Model, builder: GraphBuilder, config: DecoderConfig) -> None:
    """Name the modules of the checkpoint that linear layers are; a tied head is a module of its own."""
    tower, head = builder.checkpoint.tower, config.tensor_name(HEAD)
    for site in weight_sites(model):
        name = (site.weight.name or "").removesuffix(".q")
        if site.role == "embedding" or name not in builder.whole or site.operand.shape is None:
            continue
        name = head if site.role == "head" else name
        stored = tower.names.get(name, name) if tower else name
        mark_projections(site.node, [(stored.removesuffix(".weight"), int(site.operand.shape.numpy()[0]))])


@contextmanager
def collector_paused() -> Iterator[None]:
    """Work on graphs without looking for garbage, of which they make little: half of the time of an import."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _decoder_of(config: DecoderConfig) -> type[DecoderBuilder]:
    """The builder of a decoder of this configuration."""
    if config.altup is not None:
        return AltUpDecoderBuilder
    is_plain = config.layer_inputs is None and not config.family.layer_scale
    return DecoderBuilder if is_plain else UnequalDecoderBuilder


def _note_inputs(checkpoint: Checkpoint) -> None:
    """Say that inputs which the checkpoint quantizes stay floats."""
    schemes = [tensor.activations.words for tensor in checkpoint.encoded.values() if tensor.activations]
    for words, count in Counter(schemes).items():
        note(
            f"the checkpoint quantizes the inputs of {count} layers ({words}); Ingot reads its weights, and inputs "
            "stay floats: the pass quantize-activations quantizes them"
        )


def _context_tokens(config: DecoderConfig, wanted: int | None) -> int:
    if wanted is None:
        return config.default_context_tokens
    if not 1 <= wanted <= config.max_positions:
        raise UsageError(
            f"context_tokens is {wanted}; it must be from 1 to the model's max_position_embeddings, "
            f"{config.max_positions}"
        )
    return wanted


def _facts(config: DecoderConfig, context_tokens: int, num_parameters: int) -> ModelFacts:
    return ModelFacts(
        family=config.model_type,
        num_layers=len(config.layers),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        context_tokens=context_tokens,
        num_parameters=num_parameters,
        eos_token_ids=config.eos_token_ids,
        bos_token_id=config.bos_token_id,
    )


def _kv_geometry(config: DecoderConfig, model: ir.Model) -> KVGeometry:
    shapes = [layer.shape for layer in config.layers if layer.attends]
    shares = tuple(number if shape.shares is None else shape.shares for number, shape in enumerate(shapes))
    return KVGeometry(
        num_layers=len(shapes),
        num_kv_heads=tuple(shape.num_kv_heads for shape in shapes),
        head_dim=tuple(shape.head_dim for shape in shapes),
        value_dim=0 if config.latent else tuple(shape.head_dim for shape in shapes),
        window=tuple(node.attributes["window"].as_int() for node in attentions(model.graph)),
        shares=shares,
    )


def _half_type(checkpoint: Checkpoint) -> Literal["bfloat16", "float16"]:
    """The 16-bit type that the model was trained in. bfloat16 has the range of float32, float16 does not."""
    stored = {tensor.dtype for tensor in checkpoint.tensors.values()}
    named = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    return "bfloat16" if "BF16" in stored or named == "bfloat16" else "float16"
