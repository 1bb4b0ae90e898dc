"""Convert a Llama, Mixtral or hybrid checkpoint to GGUF, and that to 4 bits with llama.cpp's own quantizer.

q and k rows are permuted, because llama.cpp rotates neighbouring pairs where Hugging Face rotates the two halves of a
head. Needs gguf, safetensors and llama-cpp-python (benchmarks/requirements.txt).
"""

import ctypes
import json
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from numpy.typing import DTypeLike, NDArray
from safetensors import safe_open

from benchmarks.gguf_hybrids import HYBRID_FORMATS

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
_EXPERT_NAMES = {"w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps"}  # [experts, out, in]
_OUTER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


FILE_TYPES = {"q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, "q4_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M}


def export_quantized(checkpoint: Path, folder: Path, file_type: str, threads: int) -> Path:
    """Return the path of the checkpoint's file of a type in FILE_TYPES in `folder`; make it if it does not exist."""
    target = folder / f"{checkpoint.name}-{file_type}.gguf"
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    half, unfinished = folder / f"{target.stem}-f16.gguf", target.with_suffix(".unfinished")
    export(checkpoint, half)
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = FILE_TYPES[file_type]
    params.nthread = threads
    status = llama_cpp.llama_model_quantize(str(half).encode(), str(unfinished).encode(), ctypes.byref(params))
    half.unlink()
    if status != 0:
        raise RuntimeError(f"llama_model_quantize of {checkpoint} to {file_type} ended with status {status}")
    return unfinished.rename(target)


def export(checkpoint: Path, path: Path, matrices: DTypeLike = np.float16) -> None:
    """Write a checkpoint as one GGUF file: matrices in 16 or 32 bits, all else in 32."""
    config = json.loads((checkpoint / "config.json").read_text("utf-8"))
    if config["model_type"] in HYBRID_FORMATS:
        _export_hybrid(checkpoint, config, path, matrices)
        return
    writer = gguf.GGUFWriter(path, "llama")
    _write_facts(writer, config)
    _write_vocabulary(writer, checkpoint)
    with safe_open(checkpoint / "model.safetensors", framework="numpy") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - safe_open is not a mapping
            if ".experts." in name:
                continue
            values = _permuted(name, tensors.get_tensor(name), config)
            is_float = values.ndim == 1 or name.endswith("block_sparse_moe.gate.weight")
            writer.add_tensor(gguf_name(name), values.astype(np.float32 if is_float else matrices))
        for layer in range(config["num_hidden_layers"] if "num_local_experts" in config else 0):
            for own, theirs in _EXPERT_NAMES.items():
                prefix, count = f"model.layers.{layer}.block_sparse_moe.experts", config["num_local_experts"]
                stacked = [tensors.get_tensor(f"{prefix}.{expert}.{own}.weight") for expert in range(count)]
                writer.add_tensor(f"blk.{layer}.{theirs}.weight", np.stack(stacked).astype(matrices))
    _finish(writer)


def _export_hybrid(checkpoint: Path, config: dict[str, Any], path: Path, matrices: DTypeLike) -> None:
    form = HYBRID_FORMATS[config["model_type"]]
    names = gguf.get_tensor_name_map(form.architecture, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[form.architecture])
    facts = {
        "intermediate_size": config[form.feed_forward],
        "rms_norm_eps": config[form.epsilon],
        "head_dim": config.get("head_dim", config["hidden_size"] // config["num_attention_heads"]),
    }
    _write_sizes(writer, config | facts)
    form.facts(writer, config)
    _write_vocabulary(writer, checkpoint)
    with safe_open(checkpoint / "model.safetensors", framework="numpy") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - safe_open is not a mapping
            tensor = tensors.get_tensor(name)
            dtype = matrices if tensor.ndim == 2 else np.float32  # convolutions have three dimensions here
            for changed, values in form.changed(name, tensor, config):
                theirs = names.get_name(changed, try_suffixes=(".weight", ".bias"))
                writer.add_tensor(theirs, np.ascontiguousarray(values.astype(dtype)))
    _finish(writer)


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    """llama.cpp's name of a Llama checkpoint's tensor."""
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name]
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[part]}.weight"


def permute_heads(weight: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """Reorder the rows of [heads * head_dim, in] so that the two halves of a head become neighbouring pairs."""
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, columns)


def _permuted(name: str, values: NDArray[Any], config: dict[str, Any]) -> NDArray[Any]:
    if name.endswith("q_proj.weight"):
        return permute_heads(values, config["num_attention_heads"])
    if name.endswith("k_proj.weight"):
        return permute_heads(values, config["num_key_value_heads"])
    return values


def _write_facts(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    _write_sizes(writer, config)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    rope = config.get("rope_parameters") or config  # transformers 5 has them in a group
    writer.add_rope_freq_base(rope["rope_theta"])
    if "num_local_experts" in config:
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])


def _write_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)


def _write_vocabulary(writer: gguf.GGUFWriter, checkpoint: Path) -> None:
    model = json.loads((checkpoint / "tokenizer.json").read_text("utf-8"))["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([control if index == 0 else normal for index in range(len(tokens))])
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
