"""Write Hugging Face checkpoints of a given shape with random weights, so that a benchmark needs no download.

The weights are fp16, seeded, with the spread of a trained model's, so that activations stay in range. The file is
streamed tensor by tensor: at most one matrix is in memory.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.hybrids import HybridShape, spread
from benchmarks.latents import LatentShape
from benchmarks.shapes import ModelShape

CONTEXT_TOKENS = 2048
END_OF_TEXT = "<|endoftext|>"
_FP16_BYTES = 2
Shape = ModelShape | HybridShape | LatentShape


def write_checkpoint(shape: Shape, folder: Path, seed: int = 0, context_tokens: int = CONTEXT_TOKENS) -> Path:
    """Write config.json, model.safetensors and a tokenizer for `shape` into `folder`; return the folder.

    A complete folder is left alone. config.json is written last and so marks the folder complete.
    """
    if (folder / "config.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    _write_weights(shape, folder / "model.safetensors", np.random.default_rng(seed))
    _write_tokenizer(shape.vocab_size, folder)
    (folder / "config.json").write_text(json.dumps(hf_config(shape, context_tokens), indent=2) + "\n", "utf-8")
    return folder


def hf_config(shape: Shape, context_tokens: int = CONTEXT_TOKENS) -> dict[str, object]:
    """The config.json of the shape, in the spelling that every tool of the comparison reads."""
    if not isinstance(shape, ModelShape):
        return shape.config(context_tokens)
    mixture: dict[str, object] = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": shape.num_experts,
        "num_experts_per_tok": shape.chosen_experts,
    }
    dense: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": context_tokens,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "tie_word_embeddings": shape.tied_head,
        "torch_dtype": "float16",
        "vocab_size": shape.vocab_size,
    }
    return dense | (mixture if shape.num_experts else {})


def tensor_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the checkpoint, in file order."""
    if not isinstance(shape, ModelShape):
        return shape.tensors()
    hidden, ffn, kv = shape.hidden_size, shape.intermediate_size, shape.kv_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, hidden)}
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (hidden, hidden),
            f"{prefix}.self_attn.k_proj.weight": (kv, hidden),
            f"{prefix}.self_attn.v_proj.weight": (kv, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, hidden),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
        }
        if shape.num_experts:
            shapes |= _expert_shapes(f"{prefix}.block_sparse_moe", shape)
            continue
        shapes |= {
            f"{prefix}.mlp.gate_proj.weight": (ffn, hidden),
            f"{prefix}.mlp.up_proj.weight": (ffn, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, ffn),
        }
    shapes["model.norm.weight"] = (hidden,)
    if not shape.tied_head:
        shapes["lm_head.weight"] = (shape.vocab_size, hidden)
    return shapes


def _expert_shapes(prefix: str, shape: ModelShape) -> dict[str, tuple[int, ...]]:
    hidden, ffn = shape.hidden_size, shape.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}.gate.weight": (shape.num_experts, hidden)}
    for expert in range(shape.num_experts):
        own = f"{prefix}.experts.{expert}"
        shapes |= {f"{own}.w1.weight": (ffn, hidden), f"{own}.w3.weight": (ffn, hidden)}
        shapes[f"{own}.w2.weight"] = (hidden, ffn)
    return shapes


def _write_weights(shape: Shape, path: Path, random: np.random.Generator) -> None:
    shapes = tensor_shapes(shape)
    header = json.dumps(weights_header(shapes), separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # safetensors requires data to begin at a multiple of 8
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for values in _random_tensors(shapes, random):
            file.write(values.tobytes())


def weights_header(shapes: dict[str, tuple[int, ...]]) -> dict[str, object]:
    """The safetensors header: dtype, shape and byte range of every tensor."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, dims in shapes.items():
        end = begin + int(np.prod(dims)) * _FP16_BYTES
        header[name] = {"dtype": "F16", "shape": list(dims), "data_offsets": [begin, end]}
        begin = end
    return header


def _random_tensors(shapes: dict[str, tuple[int, ...]], random: np.random.Generator) -> Iterator[NDArray[np.float16]]:
    for name, dims in shapes.items():
        mean, deviation = spread(name, dims)
        yield (mean + deviation * random.standard_normal(dims, dtype=np.float32)).astype(np.float16)


def _write_tokenizer(vocab_size: int, folder: Path) -> None:
    """A byte-level BPE of exactly `vocab_size` entries: the bytes, then merges of two entries in a fixed order."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([END_OF_TEXT, *alphabet])}
    merges: list[tuple[str, str]] = []
    for left, right in _pairs(alphabet):
        if len(vocab) == vocab_size:
            break
        vocab[left + right] = len(vocab)
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT, "bos_token": END_OF_TEXT}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")


def _pairs(alphabet: list[str]) -> Iterator[tuple[str, str]]:
    """256 * 256 pairs of bytes, more than any vocabulary here needs."""
    return ((left, right) for left in alphabet for right in alphabet)
