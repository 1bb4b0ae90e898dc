"""Whole models from the few tensors that other packages wrote: each module of a layer gets tensors of its shape.

One layer of llama, 256 wide: q, o and the feed-forward are 256 x 256 and take the fixture's o_proj; k and v take k_proj
(GGUF: v its own). Table, norms and head are random 16-bit floats.
"""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from ingot.artifact.safetensors import read_header
from ingot.pipeline.checkpoint.gguf_file import GgufFile, read_gguf
from ingot.pipeline.checkpoint.safetensors_writer import write_weights
from ingot.pipeline.interchange.layers import stored_tensor
from tests.data_paths import shared_data

FIXTURES = (
    "autoawq-gemm-w4-asym",
    "autogptq-w3-asym",
    "autogptq-w4-asym",
    "autogptq-w4-sym",
    "autogptq-w4-sym-descact",
    "gguf-Q4_0",
    "gguf-Q4_1",
    "gguf-Q8_0",
    "gguf-llamacpp-Q3_K_M",
    "gguf-llamacpp-Q4_K_M",
    "gguf-llamacpp-Q6_K",
    "gptqmodel-awq_gemm-w4-asym",
    "gptqmodel-gptq_v1-w4-sym",
    "gptqmodel-gptq_v2-w3-asym",
    "llmcompressor-fp8",
    "llmcompressor-fp8-dynamic",
    "llmcompressor-fp8-kv",
    "llmcompressor-gptq-w4-asym",
    "llmcompressor-gptq-w4-sym",
    "llmcompressor-mxfp4a16",
    "llmcompressor-nvfp4a16",
    "llmcompressor-w8a16",
    "llmcompressor-w8a8-int8",
)
HIDDEN, VOCABULARY = 256, 64
LAYER = "model.layers.0."
MODULES = {
    "self_attn.q_proj": "o_proj",
    "self_attn.k_proj": "k_proj",
    "self_attn.v_proj": "k_proj",
    "self_attn.o_proj": "o_proj",
    "mlp.gate_proj": "o_proj",
    "mlp.up_proj": "o_proj",
    "mlp.down_proj": "o_proj",
}
GGUF_MODULES = {
    "attn_q": "attn_output",
    "attn_k": "attn_k",
    "attn_v": "attn_v",
    "attn_output": "attn_output",
    "ffn_gate": "attn_output",
    "ffn_up": "attn_output",
    "ffn_down": "attn_output",
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": VOCABULARY,
}


def whole_checkpoint(name: str, folder: Path) -> Path:
    """The fixture as a checkpoint that builds; skips the test when the data is missing."""
    source = shared_data(f"golden/quantized/{name}")
    folder.mkdir(parents=True)
    if name.startswith("gguf"):
        write_gguf_by_hand(folder / "model.gguf", read_gguf(source / "model.gguf"))
        return folder / "model.gguf"
    stored = read_header(source / "model.safetensors")
    tensors: dict[str, ir.TensorProtocol] = {key: ir.Tensor(array) for key, array in _floats(np.float16).items()}
    for module, part in MODULES.items():
        for key, tensor in stored.items():
            if f".{part}." in key:
                tensors[f"{LAYER}{module}.{key.rpartition('.')[2]}"] = stored_tensor(tensor)
    tensors |= {key: stored_tensor(tensor) for key, tensor in stored.items() if key.endswith(("k_scale", "v_scale"))}
    write_weights(folder / "model.safetensors", list(tensors.items()), padded=False)
    config = json.loads((source / "config.json").read_text())
    config = {key: config[key] for key in ("quantization_config",) if key in config} | CONFIG
    (folder / "config.json").write_text(json.dumps(config))
    if (source / "quantize_config.json").is_file():
        (folder / "quantize_config.json").write_bytes((source / "quantize_config.json").read_bytes())
    return folder


def write_gguf_by_hand(path: Path, fixture: GgufFile) -> None:
    """The fixture's blocks under all names of a layer, norms in F32, embedding and head in F16."""
    items: list[tuple[str, int, tuple[int, ...], bytes]] = []
    for module, part in GGUF_MODULES.items():
        tensor = fixture.tensors[f"blk.0.{part}.weight"]
        raw = np.fromfile(fixture.path, np.uint8, tensor.num_bytes, offset=tensor.offset).tobytes()
        items.append((f"blk.0.{module}.weight", tensor.type_id, tensor.shape, raw))
    floats = _floats(np.float16)
    for theirs, ours in (("token_embd", "model.embed_tokens"), ("output", "lm_head")):
        items.append((f"{theirs}.weight", 1, (VOCABULARY, HIDDEN), floats[f"{ours}.weight"].tobytes()))
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        items.append((f"{name}.weight", 0, (HIDDEN,), np.ones(HIDDEN, np.float32).tobytes()))
    integers = {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": HIDDEN,
        "feed_forward_length": HIDDEN,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
    }
    pairs = [_text("general.architecture") + struct.pack("<I", 8) + _text("llama")]
    pairs += [_text(f"llama.{key}") + struct.pack("<II", 4, value) for key, value in integers.items()]
    pairs.append(_text("llama.attention.layer_norm_rms_epsilon") + struct.pack("<If", 6, 1e-5))
    header = b"GGUF" + struct.pack("<IQQ", 3, len(items), len(pairs)) + b"".join(pairs)
    data = b""
    for name, type_id, shape, raw in items:
        data += bytes(-len(data) % 32)
        reversed_shape = tuple(reversed(shape))
        header += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed_shape, type_id, len(data))
        data += raw
    path.write_bytes(header + bytes(-len(header) % 32) + data)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _floats(dtype: Any) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    norms = [f"{LAYER}input_layernorm", f"{LAYER}post_attention_layernorm", "model.norm"]
    tensors = {f"{name}.weight": rng.uniform(0.5, 1.5, HIDDEN).astype(dtype) for name in norms}
    tables = ("model.embed_tokens", "lm_head")
    return tensors | {f"{name}.weight": rng.normal(size=(VOCABULARY, HIDDEN)).astype(dtype) for name in tables}
