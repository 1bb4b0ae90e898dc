"""Which of GGUF's types holds each tensor exactly.

    codes within 4 bits symmetric      Q4_0          codes within 8 bits symmetric      Q8_0
    4 bits asymmetric                  Q4_1, where every -zero_point * scale is a float16
    floats of rank 2                   F32, F16, BF16 as they are; norms and biases are F32

Blocks are 32 columns; larger groups repeat their scale. Blocks of a GGUF file go into another as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ingot.errors import one_of
from ingot.pipeline.checkpoint.config import DecoderConfig
from ingot.pipeline.checkpoint.formats.gguf_blocks import BLOCK_TYPES
from ingot.pipeline.checkpoint.gguf import ARCHITECTURES, gguf_name
from ingot.pipeline.checkpoint.gguf_file import DEFAULT_ALIGNMENT, PLAIN_TYPES
from ingot.pipeline.interchange.format_writer import AS_IT_IS, WriteOptions
from ingot.pipeline.interchange.layers import ExportedWeight, PlainWeight, QuantizedLayer
from ingot.pipeline.interchange.refusals import (
    SchemeError,
    changed_forms,
    inputs_left_out,
    quantized_layers,
    require_float16_scales,
    require_plain_order,
)
from ingot.sizes import round_up

BLOCK = 32
BLOCK_IDS = {kind.name: number for number, kind in BLOCK_TYPES.items()}
PLAIN_IDS = {name: number for number, (name, _) in PLAIN_TYPES.items()}
_DTYPES = {ir.DataType.FLOAT: "F32", ir.DataType.FLOAT16: "F16", ir.DataType.BFLOAT16: "BF16"}


@dataclass(frozen=True)
class GgufItem:
    """One tensor of the file: how it is named and typed, and how many bytes it takes."""

    name: str
    weight: ExportedWeight
    type_name: str
    heads: int  # whose rows are reordered; 0: none

    @property
    def num_bytes(self) -> int:
        """As stored."""
        size = int(np.prod(self.weight.shape))
        if self.type_name in PLAIN_IDS:
            return size * PLAIN_TYPES[PLAIN_IDS[self.type_name]][1]
        kind = BLOCK_TYPES[BLOCK_IDS[self.type_name]]
        return size // kind.values * kind.num_bytes

    @property
    def padded_bytes(self) -> int:
        """With the zeros up to the next tensor."""
        return round_up(self.num_bytes, DEFAULT_ALIGNMENT)


@dataclass(frozen=True)
class GgufPlan:
    """The file's tensors, each with its type, and what changed its form."""

    items: Sequence[GgufItem]
    notes: Sequence[str]


def plan_gguf(config: DecoderConfig, weights: Sequence[ExportedWeight], options: WriteOptions = AS_IT_IS) -> GgufPlan:
    """Choose every tensor's type. SchemeError says what does not fit: an architecture, rope scaling, a scheme."""
    _require_architecture(config)
    layers = quantized_layers(weights)
    require_plain_order("gguf", layers)
    items = [GgufItem(_name(weight), weight, _type_of(weight, options), _heads(config, weight)) for weight in weights]
    require_float16_scales("gguf", [layer for layer in layers if layer.storage not in BLOCK_IDS], options)
    types = {item.weight.name: item.type_name for item in items}
    changes = changed_forms(layers, lambda layer: _change(layer, types[layer.name]))
    return GgufPlan(items, [*changes, *inputs_left_out("gguf", layers)])


def _name(weight: ExportedWeight) -> str:
    try:
        return gguf_name(weight.name)
    except (KeyError, ValueError) as error:
        raise SchemeError(f"gguf has no tensor for {weight.name!r}; write compressed-tensors or safetensors") from error


def _heads(config: DecoderConfig, weight: ExportedWeight) -> int:
    """Heads whose rows are reordered; 0 for a tensor in its natural order."""
    part = weight.name.rsplit(".", 2)[-2]
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    return heads.get(part, 0) if ARCHITECTURES[config.model_type].reordered else 0


def _require_architecture(config: DecoderConfig) -> None:
    if config.model_type not in ARCHITECTURES:
        raise SchemeError(f"gguf is written for {one_of(ARCHITECTURES)}, not for {config.model_type}")
    ropes = {layer.rope for layer in config.layers}
    if len(ropes) != 1 or None in ropes or any(rope and rope.kind != "default" for rope in ropes):
        raise SchemeError("gguf is written for plain rotary embeddings; this model scales them or leaves layers out")
    if any(layer.window for layer in config.layers):
        raise SchemeError("gguf is written for full attention; this model has sliding windows")


def _type_of(weight: ExportedWeight, options: WriteOptions) -> str:
    if isinstance(weight, PlainWeight):
        return _DTYPES[weight.tensor.dtype] if len(weight.shape) == 2 else "F32"
    facts = weight.facts
    if weight.storage in BLOCK_IDS:
        return weight.storage
    as_it_is = facts.group_size == BLOCK and (facts.bits == 4 or (facts.bits == 8 and facts.symmetric))
    if weight.shape[1] % BLOCK or facts.group_size % BLOCK or not (as_it_is or options.widen):
        raise SchemeError(
            f"gguf holds 4 and 8 bits symmetric and 4 bits asymmetric, all in whole blocks of {BLOCK}, but "
            f"{weight.module} {list(weight.shape)} has {weight.scheme}; set block_size: {BLOCK} and symmetric: true"
        )
    if facts.code_bits("middle", (4,)):
        return "Q4_0"
    if facts.bits <= 4 and (facts.q4_1 or (options.lossy and facts.bits_for["from zero"] is not None)):
        return "Q4_1"
    if facts.code_bits("middle", (8,)) and (facts.bits == 8 or options.widen):
        return "Q8_0"
    raise SchemeError(_no_type(weight))


def _no_type(layer: QuantizedLayer) -> str:
    if layer.facts.bits == 4 and not layer.facts.not_integers:
        return (
            f"gguf's Q4_1 stores -zero_point * scale as float16, and those of {layer.module} would change; set "
            "symmetric: true"
        )
    why = layer.facts.not_integers or "its codes lie more than 127 from their zero points"
    return f"gguf writes Q4_0, Q4_1 and Q8_0, which {layer.module} with {layer.scheme} does not fit: {why}"


def _change(layer: QuantizedLayer, type_name: str) -> str:
    bits = int(type_name[1])
    if layer.storage == type_name:
        return ""
    if layer.facts.bits != bits or (type_name == "Q8_0" and not layer.facts.symmetric):
        return f"{layer.scheme} stands in {type_name}"
    if layer.facts.group_size != BLOCK:
        return f"scales of groups of {layer.facts.group_size} repeat for blocks of {BLOCK}"
    return ""
