"""GGUF: one file with metadata, tokenizer, and every tensor in the type that holds it exactly.

    4-bit codes, symmetric             Q4_0
    8-bit codes, symmetric             Q8_0
    4-bit codes, asymmetric            Q4_1, if every -zero_point * scale is exact in float16
    blocks of a GGUF file              the same blocks
    floats with two axes               F32, F16, BF16 unchanged
    norms and biases                   F32

Blocks are 32 columns; the scale of a larger group is repeated. File layout: checkpoint/gguf_file.py; tensor names:
checkpoint/gguf.py.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.artifact.writer import explain_full_disk
from ingot.errors import one_of, shown
from ingot.passes.weights import apply_to_array
from ingot.pipeline.checkpoint.config.decoder import DecoderConfig, read_config
from ingot.pipeline.checkpoint.formats.decoded import DecodedWeight
from ingot.pipeline.checkpoint.formats.exact_forms import as_integers, regrouped, signed, unsigned
from ingot.pipeline.checkpoint.formats.gguf_blocks import BLOCK_TYPES, encode_rows
from ingot.pipeline.checkpoint.gguf import ARCHITECTURES, gguf_name, rows_of_neighbours
from ingot.pipeline.checkpoint.gguf_file import ARRAY, DEFAULT_ALIGNMENT, MAGIC, PLAIN_TYPES, SCALARS, STRING, VERSIONS
from ingot.pipeline.checkpoint.gguf_metadata import ROPE_FREQS, parameters_of_factors, rope_factors
from ingot.pipeline.interchange.folder import Contents, Source, WriteOptions
from ingot.pipeline.interchange.layers import PlainWeight, QuantizedLayer, Weight, minima_of, stored_tensor
from ingot.pipeline.interchange.writers.gguf_tokenizer import tokenizer_metadata
from ingot.pipeline.interchange.writers.refusals import (
    SchemeError,
    change_notes,
    changed_form,
    inputs_left_out,
    quantized_layers,
    require_float16_scales,
    require_plain_order,
)
from ingot.progress import report_progress
from ingot.sizes import round_up

BLOCK = 32
_BLOCK_IDS = {kind.name: number for number, kind in BLOCK_TYPES.items()}
_PLAIN_IDS = {name: number for number, (name, _) in PLAIN_TYPES.items()}
_DTYPES = {ir.DataType.FLOAT: "F32", ir.DataType.FLOAT16: "F16", ir.DataType.BFLOAT16: "BF16"}
_SCALAR_IDS = {code: number for number, code in SCALARS.items()}


def plan(source: Source, options: WriteOptions) -> Contents:
    """Choose every tensor's type; refuse a model, a scheme or a tokenizer that GGUF cannot hold."""
    config, weights = read_config(source.checkpoint), source.weights
    _require_architecture(config)
    layers = quantized_layers(weights)
    require_plain_order("gguf", layers)
    items = [_Item(_name(weight), weight, _type_of(weight, options), _heads(config, weight)) for weight in weights]
    require_float16_scales("gguf", [layer for layer in layers if layer.storage not in _BLOCK_IDS], options)
    items += _rope_freqs(config)
    types = {item.weight.name: item.type_name for item in items}
    changes = change_notes(layers, lambda layer: _change(layer, types[layer.name]))
    tokenizer = tokenizer_metadata(source.checkpoint, config)
    return _GgufFile([*changes, *inputs_left_out("gguf", layers)], items, config, tokenizer)


@dataclass(frozen=True)
class _Item:
    """One tensor of the file. heads: number of heads whose rows GGUF reorders; 0: rows keep their order."""

    name: str
    weight: Weight
    type_name: str
    heads: int

    @property
    def num_bytes(self) -> int:
        size = int(np.prod(self.weight.shape))
        if self.type_name in _PLAIN_IDS:
            return size * PLAIN_TYPES[_PLAIN_IDS[self.type_name]][1]
        kind = BLOCK_TYPES[_BLOCK_IDS[self.type_name]]
        return size // kind.values * kind.num_bytes

    @property
    def padded_bytes(self) -> int:
        return round_up(self.num_bytes, DEFAULT_ALIGNMENT)


@dataclass(frozen=True)
class _GgufFile(Contents):
    """The file <folder name>.gguf. A checkpoint without tokenizer.json gives a file without a tokenizer."""

    items: Sequence[_Item]
    config: DecoderConfig
    tokenizer: Mapping[str, Any]

    def write(self, folder: Path, name: str) -> None:
        path = folder / f"{name}.gguf"
        header = _header({**_metadata(name, self.config), **self.tokenizer}, self.items)
        total, written = len(header) + sum(item.padded_bytes for item in self.items), len(header)
        with explain_full_disk(path, "the weights", total), path.open("wb") as stream:
            stream.write(header)
            for item in self.items:
                _write_item(stream, item)
                written += item.padded_bytes
                report_progress("writing weights", written, total)


def _rope_freqs(config: DecoderConfig) -> list[_Item]:
    """Return the tensor of Llama 3.1's rotary embedding; none for a plain one."""
    rope = config.layers[0].rope
    factors = rope_factors(rope) if rope else None
    if rope is None or factors is None:
        return []
    if parameters_of_factors(factors, rope.theta) is None:
        raise SchemeError("gguf is written for Llama 3.1's scaled rotary embedding; this model has other factors")
    return [_Item(ROPE_FREQS, PlainWeight(ROPE_FREQS, ir.Tensor(factors, name=ROPE_FREQS)), "F32", heads=0)]


def _name(weight: Weight) -> str:
    try:
        return gguf_name(weight.name)
    except (KeyError, ValueError) as error:
        raise SchemeError(
            f"gguf has no tensor for {shown(weight.name)}; write compressed-tensors or safetensors"
        ) from error


def _heads(config: DecoderConfig, weight: Weight) -> int:
    """Return the number of heads whose rows GGUF reorders; 0 for other tensors."""
    part = weight.name.rsplit(".", 2)[-2]
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    return heads.get(part, 0) if ARCHITECTURES[config.model_type].reordered else 0


def _require_architecture(config: DecoderConfig) -> None:
    if config.model_type not in ARCHITECTURES:
        raise SchemeError(f"gguf is written for {one_of(ARCHITECTURES)}, not for {config.model_type}")
    ropes = {layer.rope for layer in config.layers}
    if len(ropes) != 1 or any(rope is None or rope.kind not in ("default", "llama3") for rope in ropes):
        raise SchemeError("gguf is written for plain rotary embeddings and Llama 3.1's; this model has others, or none")
    if any(layer.window for layer in config.layers):
        raise SchemeError("gguf is written for full attention; this model has sliding windows")


def _type_of(weight: Weight, options: WriteOptions) -> str:
    if isinstance(weight, PlainWeight):
        if weight.tensor.dtype not in _DTYPES:
            raise SchemeError(
                f"gguf holds floats as {one_of(_PLAIN_IDS)}, but {shown(weight.name)} is "
                f"{weight.tensor.dtype.name.lower()}"
            )
        return _DTYPES[weight.tensor.dtype] if len(weight.shape) == 2 else "F32"
    facts = weight.facts
    if weight.storage in _BLOCK_IDS:
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
    why = layer.facts.not_integers or "its codes are more than 127 away from their zero points"
    return f"gguf writes Q4_0, Q4_1 and Q8_0, which {layer.module} with {layer.scheme} does not fit: {why}"


def _change(layer: QuantizedLayer, type_name: str) -> str:
    bits = int(type_name[1])
    if layer.storage == type_name:
        return ""
    if layer.facts.bits != bits or (type_name == "Q8_0" and not layer.facts.symmetric):
        return f"{layer.scheme} is stored in {type_name}"
    return changed_form(layer, bits, BLOCK, "blocks")


def _metadata(name: str, config: DecoderConfig) -> dict[str, Any]:
    """Return metadata by key; an int becomes u32, a float f32."""
    rope = config.layers[0].rope
    assert rope is not None
    prefix = config.model_type
    return {
        "general.architecture": prefix,
        "general.name": name,
        "general.alignment": DEFAULT_ALIGNMENT,
        f"{prefix}.block_count": len(config.layers),
        f"{prefix}.context_length": config.max_positions,
        f"{prefix}.embedding_length": config.hidden_size,
        f"{prefix}.feed_forward_length": config.intermediate_size,
        f"{prefix}.attention.head_count": config.num_heads,
        f"{prefix}.attention.head_count_kv": config.num_kv_heads,
        f"{prefix}.attention.key_length": config.head_dim,
        f"{prefix}.attention.value_length": config.head_dim,
        f"{prefix}.attention.layer_norm_rms_epsilon": float(config.norm_epsilon),
        f"{prefix}.rope.dimension_count": rope.rotary_dim,
        f"{prefix}.rope.freq_base": float(rope.theta),
        f"{prefix}.vocab_size": config.vocab_size,
    }


def _header(metadata: Mapping[str, Any], items: Sequence[_Item]) -> bytes:
    parts = [MAGIC, struct.pack("<IQQ", VERSIONS[-1], len(items), len(metadata))]
    parts += [_string(key) + _value(value) for key, value in metadata.items()]
    offset = 0
    for item in items:
        shape = tuple(reversed(item.weight.shape))
        number = {**_PLAIN_IDS, **_BLOCK_IDS}[item.type_name]
        parts.append(_string(item.name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, number, offset))
        offset += item.padded_bytes
    header = b"".join(parts)
    return header + bytes(-len(header) % DEFAULT_ALIGNMENT)


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", _SCALAR_IDS["?"], value)
        case int():
            return struct.pack("<II", _SCALAR_IDS["I"], value)
        case float():
            return struct.pack("<If", _SCALAR_IDS["f"], value)
        case str():
            return struct.pack("<I", STRING) + _string(value)
        case [str(), *_]:
            return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(_string, value))
        case _:
            return struct.pack(f"<IIQ{len(value)}i", ARRAY, _SCALAR_IDS["i"], len(value), *value)


def _write_item(stream: BinaryIO, item: _Item) -> None:
    content = _content(item).reshape(-1).view(np.uint8)
    assert content.size == item.num_bytes
    stream.write(content.data)
    stream.write(bytes(item.padded_bytes - item.num_bytes))


def _content(item: _Item) -> NDArray[Any]:
    rows = item.weight.shape[0]
    order = rows_of_neighbours(rows, item.heads) if item.heads else np.arange(rows)
    if isinstance(item.weight, PlainWeight):
        wide = item.type_name == "F32"
        stored = apply_to_array(item.weight.tensor, lambda values: values.astype(np.float32) if wide else values[order])
        return np.ascontiguousarray(stored[order] if wide else stored)
    if item.type_name == item.weight.storage:
        return np.asarray(stored_tensor(item.weight.parts["blocks"]).numpy())
    return encode_rows(_blocks(item.weight, item.type_name).rows_in_order(order), item.type_name)


def _blocks(layer: QuantizedLayer, type_name: str) -> DecodedWeight:
    """Return the layer in the form of the type; Q4_1 has offsets instead of zero points."""
    weight = regrouped(layer.read(), BLOCK)
    if type_name == "Q4_1" and weight.offsets is not None:
        return weight
    integers = as_integers(weight)
    assert isinstance(integers, DecodedWeight)
    if type_name != "Q4_1":
        return signed(integers, int(type_name[1]), "middle")
    nibbles = unsigned(integers, 4, "from zero")
    return replace(nibbles, zero_points=None, offsets=minima_of(nibbles))
