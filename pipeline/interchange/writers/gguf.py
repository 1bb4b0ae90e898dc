"""Writing a GGUF file: metadata, tokenizer, and every tensor in the type that gguf.py has chosen.

Layout and names: gguf_file.py, gguf.py.

tokenizer.json -> GGUF's tokenizer metadata, for byte-level BPE tokenizers whose splitting llama.cpp knows.

A checkpoint without tokenizer.json gives a file without tokenizer: it holds weights alone.

Which of GGUF's types holds each tensor exactly.

    codes within 4 bits symmetric      Q4_0          codes within 8 bits symmetric      Q8_0
    4 bits asymmetric                  Q4_1, where every -zero_point * scale is a float16
    floats of rank 2                   F32, F16, BF16 as they are; norms and biases are F32

Blocks are 32 columns; larger groups repeat their scale. Blocks of a GGUF file go into another as they are.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.artifact.writer import needing_room
from ingot.errors import UsageError, one_of
from ingot.passes.weights import apply_to_array
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.config import DecoderConfig, read_config
from ingot.pipeline.checkpoint.formats.decoded import DecodedWeight
from ingot.pipeline.checkpoint.formats.exact_forms import as_integers, regrouped, signed, unsigned
from ingot.pipeline.checkpoint.formats.gguf_blocks import BLOCK_TYPES, encode_rows
from ingot.pipeline.checkpoint.gguf import ARCHITECTURES, gguf_name, rows_of_neighbours
from ingot.pipeline.checkpoint.gguf_file import ARRAY, DEFAULT_ALIGNMENT, MAGIC, PLAIN_TYPES, SCALARS, STRING, VERSIONS
from ingot.pipeline.interchange.folder import AS_IT_IS, WriteOptions, stored_tensor
from ingot.pipeline.interchange.layers import PlainWeight, QuantizedLayer, Weight, minima_of
from ingot.pipeline.interchange.writers.refusals import (
    SchemeError,
    changed_forms,
    inputs_left_out,
    quantized_layers,
    require_float16_scales,
    require_plain_order,
)
from ingot.progress import report_progress
from ingot.sizes import round_up

BLOCK = 32
BLOCK_IDS = {kind.name: number for number, kind in BLOCK_TYPES.items()}
PLAIN_IDS = {name: number for number, (name, _) in PLAIN_TYPES.items()}
_DTYPES = {ir.DataType.FLOAT: "F32", ir.DataType.FLOAT16: "F16", ir.DataType.BFLOAT16: "BF16"}


@dataclass(frozen=True)
class GgufItem:
    """One tensor of the file: how it is named and typed, and how many bytes it takes."""

    name: str
    weight: Weight
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


def plan_gguf(config: DecoderConfig, weights: Sequence[Weight], options: WriteOptions = AS_IT_IS) -> GgufPlan:
    """Choose every tensor's type. SchemeError says what does not fit: an architecture, rope scaling, a scheme."""
    _require_architecture(config)
    layers = quantized_layers(weights)
    require_plain_order("gguf", layers)
    items = [GgufItem(_name(weight), weight, _type_of(weight, options), _heads(config, weight)) for weight in weights]
    require_float16_scales("gguf", [layer for layer in layers if layer.storage not in BLOCK_IDS], options)
    types = {item.weight.name: item.type_name for item in items}
    changes = changed_forms(layers, lambda layer: _change(layer, types[layer.name]))
    return GgufPlan(items, [*changes, *inputs_left_out("gguf", layers)])


def _name(weight: Weight) -> str:
    try:
        return gguf_name(weight.name)
    except (KeyError, ValueError) as error:
        raise SchemeError(f"gguf has no tensor for {weight.name!r}; write compressed-tensors or safetensors") from error


def _heads(config: DecoderConfig, weight: Weight) -> int:
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


def _type_of(weight: Weight, options: WriteOptions) -> str:
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


_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
# The pattern that splits text before merging, by llama.cpp's name for it.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {_LLAMA3: "llama-bpe", _LLAMA3.replace("{1,3}", ""): "qwen2"}


def tokenizer_metadata(checkpoint: Checkpoint, config: DecoderConfig) -> dict[str, Any]:
    """Values by key. UsageError for a tokenizer of another kind."""
    file = checkpoint.folder / "tokenizer.json"
    if not file.is_file():
        return {}
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    model, added = tokenizer["model"], tokenizer.get("added_tokens") or []
    pattern = _split_name(tokenizer.get("pre_tokenizer")) if model.get("type") == "BPE" else None
    if pattern is None or tokenizer.get("normalizer") not in (None, {"type": "NFC"}):
        raise UsageError(
            f"{file}: gguf is written with byte-level BPE tokenizers that split like gpt-2, llama-3 or qwen2; this is "
            "another; export to compressed-tensors, gptq or awq"
        )
    tokens, types = _vocabulary(model["vocab"], added, config.vocab_size)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    found = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pattern,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": config.bos_token_id,
        "tokenizer.ggml.eos_token_id": config.eos_token_ids[0] if config.eos_token_ids else None,
        "tokenizer.ggml.add_bos_token": False,
    }
    return {key: value for key, value in found.items() if value not in (None, [])}


def _split_name(pre_tokenizer: Any) -> str | None:
    match pre_tokenizer:
        case {"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}:
            return "gpt-2"
        case {"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"Regex": str(regex)}}, *_]}:
            return _SPLITS.get(regex)
        case _:
            return None


def _vocabulary(vocab: dict[str, int], added: list[dict[str, Any]], size: int) -> tuple[list[str], list[int]]:
    """Tokens in the order of their ids; ids that no token has are unused."""
    tokens, types = [f"[unused{index}]" for index in range(size)], [_UNUSED] * size
    for token, index in vocab.items():
        tokens[index], types[index] = token, _NORMAL
    for entry in added:
        tokens[entry["id"]] = entry["content"]
        types[entry["id"]] = _CONTROL if entry.get("special") else _USER_DEFINED
    return tokens, types


_SCALAR_IDS = {code: number for number, code in SCALARS.items()}


def write_gguf(
    path: Path,
    checkpoint: Checkpoint,
    weights: Sequence[Weight],
    options: WriteOptions = AS_IT_IS,
) -> Sequence[str]:
    """Write the file, one tensor in memory at a time; return what changed its form.

    UsageError says what does not fit: as plan_gguf, and a tokenizer without a place in GGUF.
    """
    config = read_config(checkpoint)
    plan = plan_gguf(config, weights, options)
    metadata = {**_metadata(path.stem, config), **tokenizer_metadata(checkpoint, config)}
    header = _header(metadata, plan.items)
    total, written = len(header) + sum(item.padded_bytes for item in plan.items), len(header)
    with needing_room(path, "the weights", total), path.open("wb") as stream:
        stream.write(header)
        for item in plan.items:
            _write_item(stream, item)
            written += item.padded_bytes
            report_progress("writing weights", written, total)
    return plan.notes


def _metadata(name: str, config: DecoderConfig) -> dict[str, Any]:
    """Values by key; int is u32, float f32."""
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


def _header(metadata: Mapping[str, Any], items: Sequence[GgufItem]) -> bytes:
    parts = [MAGIC, struct.pack("<IQQ", VERSIONS[-1], len(items), len(metadata))]
    parts += [_string(key) + _value(value) for key, value in metadata.items()]
    offset = 0
    for item in items:
        shape = tuple(reversed(item.weight.shape))
        number = {**PLAIN_IDS, **BLOCK_IDS}[item.type_name]
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


def _write_item(stream: BinaryIO, item: GgufItem) -> None:
    content = _content(item).reshape(-1).view(np.uint8)
    assert content.size == item.num_bytes
    stream.write(content.data)
    stream.write(bytes(item.padded_bytes - item.num_bytes))


def _content(item: GgufItem) -> NDArray[Any]:
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
    """The layer in the form of the type; Q4_1 has offsets in place of zero points."""
    weight = regrouped(layer.read(), BLOCK)
    if type_name == "Q4_1" and weight.offsets is not None:
        return weight
    integers = as_integers(weight)
    assert isinstance(integers, DecodedWeight)
    if type_name != "Q4_1":
        return signed(integers, int(type_name[1]), "middle")
    nibbles = unsigned(integers, 4, "from zero")
    return replace(nibbles, zero_points=None, offsets=minima_of(nibbles))
