"""Writing a GGUF file: metadata, tokenizer, and every tensor in the type that gguf_plan.py has chosen.

Layout and names: gguf_file.py, gguf.py.

tokenizer.json -> GGUF's tokenizer metadata, for byte-level BPE tokenizers whose splitting llama.cpp knows.

A checkpoint without tokenizer.json gives a file without tokenizer: it holds weights alone.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ingot.errors import UsageError
from ingot.passes.weights import apply_to_array
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.config import DecoderConfig, read_config
from ingot.pipeline.checkpoint.formats.exact import as_integers, regrouped, signed, unsigned
from ingot.pipeline.checkpoint.formats.gguf_blocks import encode_rows
from ingot.pipeline.checkpoint.formats.quantized import QuantizedWeight
from ingot.pipeline.checkpoint.gguf import rows_of_neighbours
from ingot.pipeline.checkpoint.gguf_file import ARRAY, DEFAULT_ALIGNMENT, MAGIC, SCALARS, STRING, VERSIONS
from ingot.pipeline.checkpoint.safetensors_writer import needing_room
from ingot.pipeline.interchange.format_writer import AS_IT_IS, WriteOptions, stored_tensor
from ingot.pipeline.interchange.gguf_plan import BLOCK, BLOCK_IDS, PLAIN_IDS, GgufItem, plan_gguf
from ingot.pipeline.interchange.layers import ExportedWeight, PlainWeight, QuantizedLayer, minima_of
from ingot.progress import Progress

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
    weights: Sequence[ExportedWeight],
    progress: Progress,
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
            progress("writing weights", written, total)
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


def _blocks(layer: QuantizedLayer, type_name: str) -> QuantizedWeight:
    """The layer in the form of the type; Q4_1 has offsets in place of zero points."""
    weight = regrouped(layer.read(), BLOCK)
    if type_name == "Q4_1" and weight.offsets is not None:
        return weight
    integers = as_integers(weight)
    assert isinstance(integers, QuantizedWeight)
    if type_name != "Q4_1":
        return signed(integers, int(type_name[1]), "middle")
    nibbles = unsigned(integers, 4, "from zero")
    return replace(nibbles, zero_points=None, offsets=minima_of(nibbles))
