"""A GGUF file as a checkpoint: config.json's keys from its metadata, tensors under the names of transformers.

The architectures of ARCHITECTURES are read. In llama's files the rows of q and k are reordered for ggml's rotary
embedding, which turns neighbours where transformers turns halves; that is undone here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.artifact.safetensors import StoredTensor
from ingot.errors import CheckpointError, one_of, shown
from ingot.pipeline.checkpoint.formats.codes import FloatArray
from ingot.pipeline.checkpoint.formats.decoded import DecodedWeight, EncodedTensor, load
from ingot.pipeline.checkpoint.formats.gguf_blocks import BLOCK_TYPES, decode_rows
from ingot.pipeline.checkpoint.gguf_file import PLAIN_TYPES, GgufFile, GgufTensor
from ingot.pipeline.checkpoint.gguf_metadata import ROPE_FREQS, GgufMetadata, rope_scaling


@dataclass(frozen=True)
class Architecture:
    """general.architecture: the model_type it is, and whether rows of q and k are reordered."""

    model_type: str
    reordered: bool
    extra: Mapping[str, Any]


ARCHITECTURES = {
    "llama": Architecture("llama", reordered=True, extra={"attention_bias": False, "mlp_bias": False}),
    "qwen2": Architecture("qwen2", reordered=False, extra={}),
    "qwen3": Architecture("qwen3", reordered=False, extra={"attention_bias": False}),
}
END_TOKENS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
TOP_NAMES = {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm"}
LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """The metadata as keys of config.json. CheckpointError names a missing key, or what cannot be imported."""
    keys = GgufMetadata(file)
    architecture = _architecture(file)
    if keys.get("rope.scaling.type", "none") != "none":
        raise CheckpointError(f"{file.path}: rope.scaling.type is {shown(keys.get('rope.scaling.type'))}; none is read")
    heads, theta = keys.size("attention.head_count"), keys.number("rope.freq_base", 10000.0)
    keys.require_followed()
    config = {
        **architecture.extra,
        "model_type": architecture.model_type,
        "architectures": [f"{architecture.model_type.capitalize()}ForCausalLM"],
        "hidden_size": keys.size("embedding_length"),
        "intermediate_size": keys.size("feed_forward_length"),
        "num_hidden_layers": keys.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.size("attention.head_count_kv", heads),
        "head_dim": keys.head_dim,
        "max_position_embeddings": keys.size("context_length"),
        "rms_norm_eps": _shortest(keys.number("attention.layer_norm_rms_epsilon")),
        "rope_theta": theta,
        "rope_scaling": rope_scaling(file, theta),
        "vocab_size": _tensor(file, "token_embd.weight").shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "hidden_act": "silu",
        "eos_token_id": _end_tokens(file),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
    }
    return {key: value for key, value in config.items() if value is not None}


def gguf_tensors(file: GgufFile) -> tuple[dict[str, StoredTensor], dict[str, EncodedTensor]]:
    """Plain tensors as stored in the file, and those that must be decoded or reordered, by transformers' names."""
    plain: dict[str, StoredTensor] = {}
    encoded: dict[str, EncodedTensor] = {}
    for tensor in file.tensors.values():
        if tensor.name == ROPE_FREQS:
            continue
        _check_tensor(file, tensor)
        name, heads = transformers_name(tensor.name), _reordered_heads(file, tensor.name)
        if tensor.type_id in PLAIN_TYPES and not heads:
            plain[name] = _stored(file, tensor, name)
        else:
            storage, parts = _parts(file, tensor)
            decode = partial(_decode, file, tensor, heads)
            encoded[name] = EncodedTensor(name, tensor.shape, file.path, decode, parts, storage)
    return plain, encoded


def _check_tensor(file: GgufFile, tensor: GgufTensor) -> None:
    """Raise CheckpointError for a norm or bias that is not a vector of floats, or rows that heads do not divide."""
    is_vector = tensor.name.endswith(("norm.weight", ".bias"))
    axes = 1 if is_vector else 2
    if len(tensor.shape) != axes:
        raise CheckpointError(f"{file.path}: {shown(tensor.name)} is {list(tensor.shape)}; it must have {axes} axes")
    if is_vector and tensor.type_id not in PLAIN_TYPES:
        kind = BLOCK_TYPES[tensor.type_id].name
        raise CheckpointError(f"{file.path}: {shown(tensor.name)} is {kind}; it must be F32, F16 or BF16")
    heads = _reordered_heads(file, tensor.name)
    if heads and (tensor.shape[0] % (2 * heads)):
        raise CheckpointError(
            f"{file.path}: {shown(tensor.name)} has {tensor.shape[0]} rows, not a multiple of twice its {heads} heads"
        )


def transformers_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; an unknown name stays."""
    parts = name.split(".")
    if parts[0] in TOP_NAMES:
        return ".".join([TOP_NAMES[parts[0]], *parts[1:]])
    if parts[0] == "blk" and len(parts) > 3 and parts[2] in LAYER_NAMES:
        return ".".join(["model.layers", parts[1], LAYER_NAMES[parts[2]], *parts[3:]])
    return name


def gguf_name(name: str) -> str:
    """Inverse of transformers_name. KeyError for a tensor without a name in GGUF."""
    module, _, leaf = name.rpartition(".")
    top = {theirs: ours for ours, theirs in TOP_NAMES.items()}
    if module in top:
        return f"{top[module]}.{leaf}"
    _, _, layer, path = module.split(".", 3)
    return f"blk.{layer}.{({theirs: ours for ours, theirs in LAYER_NAMES.items()})[path]}.{leaf}"


def rows_of_halves(rows: int, heads: int) -> NDArray[np.intp]:
    """Order that puts ggml's neighbouring rows of each head back into two halves: ours = theirs[order]."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def rows_of_neighbours(rows: int, heads: int) -> NDArray[np.intp]:
    """Inverse of rows_of_halves: theirs = ours[order]."""
    return np.arange(rows).reshape(heads, 2, rows // heads // 2).swapaxes(1, 2).reshape(-1)


def _end_tokens(file: GgufFile) -> Any:
    """The end of a text, and those of a turn and a message where they are other tokens."""
    found = [file.metadata.get(key) for key in END_TOKENS]
    ids = list(dict.fromkeys(value for value in found if value is not None))
    return ids if len(ids) > 1 else ids[0] if ids else None


def _architecture(file: GgufFile) -> Architecture:
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path}: general.architecture is {shown(name)}; GGUF files of {one_of(ARCHITECTURES)} are read"
        )
    return ARCHITECTURES[name]


def _tensor(file: GgufFile, name: str) -> GgufTensor:
    if name not in file.tensors:
        raise CheckpointError(f"{file.path}: holds no tensor {shown(name)}; convert it again")
    return file.tensors[name]


def _shortest(value: float) -> float:
    """The decimal number that the float32 was made from: 1e-5, not 9.99999974738e-06."""
    return float(str(np.float32(value)))


def _reordered_heads(file: GgufFile, name: str) -> int:
    """Heads whose rows are reordered; 0 for a tensor in its natural order."""
    parts = name.split(".")
    part = parts[2] if parts[0] == "blk" and len(parts) > 2 else ""
    if not _architecture(file).reordered or part not in ("attn_q", "attn_k"):
        return 0
    keys = GgufMetadata(file)
    heads = keys.size("attention.head_count")
    return heads if part == "attn_q" else keys.size("attention.head_count_kv", heads)


def _stored(file: GgufFile, tensor: GgufTensor, name: str) -> StoredTensor:
    dtype = PLAIN_TYPES[tensor.type_id][0]
    return StoredTensor(name, dtype, tensor.shape, file.path, tensor.offset, tensor.num_bytes)


def _parts(file: GgufFile, tensor: GgufTensor) -> tuple[str, dict[str, StoredTensor]]:
    """The type's name, and a quantized tensor's blocks as bytes, rows in the file's order."""
    if tensor.type_id in PLAIN_TYPES:
        return PLAIN_TYPES[tensor.type_id][0], {}
    blocks = StoredTensor(tensor.name, "U8", (tensor.num_bytes,), file.path, tensor.offset, tensor.num_bytes)
    return BLOCK_TYPES[tensor.type_id].name, {"blocks": blocks}


def _decode(file: GgufFile, tensor: GgufTensor, heads: int) -> DecodedWeight | FloatArray:
    rows = tensor.shape[0]
    if heads and rows % (2 * heads):
        raise ValueError(f"has {rows} rows, no multiple of twice its {heads} heads")
    order = rows_of_halves(rows, heads) if heads else np.arange(rows)
    if tensor.type_id in PLAIN_TYPES:
        values: FloatArray = load(_stored(file, tensor, tensor.name)).astype(np.float32)[order]
        return values
    size = tensor.num_bytes
    raw = StoredTensor(tensor.name, "U8", (size,), file.path, tensor.offset, size).read(np.uint8)
    if len(tensor.shape) != 2:
        raise ValueError(f"has {len(tensor.shape)} dimensions; a quantized tensor has two")
    weight = decode_rows(raw, BLOCK_TYPES[tensor.type_id], rows, tensor.shape[1])
    return weight.rows_in_order(order) if heads else weight
