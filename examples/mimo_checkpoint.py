"""Checkpoints in the public form of MiMo: a Qwen2 model and its MTP layers in one folder."""

# mypy: disable-error-code="no-untyped-call"
# torch and transformers leave some of their methods without annotations.

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from examples.mtp_layer import MtpLayer
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

_LAYER = "model.mtp_layers.0."
_WEIGHTS = "model.safetensors"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
_SAME_KEYS = (
    "bos_token_id",
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "tie_word_embeddings",
    "vocab_size",
)


def refuse_unfit(base: Path) -> None:
    """ValueError when the model in folder `base` cannot be written in MiMo's form."""
    missing = [name for name in ("config.json", _WEIGHTS, *_TOKENIZER_FILES) if not (base / name).is_file()]
    if missing:
        raise ValueError(f"{base} lacks {', '.join(missing)}; name the folder of a Llama in one file of weights")
    config = AutoConfig.from_pretrained(base)
    if not isinstance(config, LlamaConfig):
        raise ValueError(f"{base} is a {config.model_type}; name the folder of a Llama")
    if config.attention_bias or config.mlp_bias:
        raise ValueError(f"{base} has biases (attention_bias or mlp_bias) that Qwen2 lacks; name a Llama without them")
    kind = _rope(config)["rope_type"]
    if kind != "default":
        raise ValueError(f"{base} has rope_type {kind}; only default is written")


def write_checkpoint(base: Path, layer: MtpLayer, out: Path) -> None:
    """Write the Llama in folder `base`, bit for bit, and the layer in fp16; Qwen2's biases, which it lacks, are 0."""
    out.mkdir(parents=True)
    config = LlamaConfig.from_pretrained(base)
    (out / "config.json").write_text(json.dumps(_mimo_config(config), indent=2) + "\n", "utf-8")
    tensors = load_file(base / _WEIGHTS)
    for name in [name for name in tensors if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
        weight = tensors[name]
        tensors[name.removesuffix("weight") + "bias"] = torch.zeros(len(weight), dtype=weight.dtype)
    own = {f"{_LAYER}{name}": weight.half().contiguous() for name, weight in layer.state_dict().items()}
    save_file(tensors | own, out / _WEIGHTS, metadata={"format": "pt"})
    for name in _TOKENIZER_FILES:
        shutil.copyfile(base / name, out / name)


def load_checkpoint(folder: Path) -> tuple[PreTrainedModel, MtpLayer]:
    """The model without the layer, and the layer; in float32 and without gradients."""
    settings: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    config = Qwen2Config(**settings)
    config._attn_implementation = "sdpa"
    base, layer = Qwen2ForCausalLM(config), MtpLayer(config)
    tensors = load_file(folder / _WEIGHTS)
    layer.load_state_dict({name.removeprefix(_LAYER): tensors.pop(name) for name in list(tensors) if _LAYER in name})
    base.load_state_dict(tensors, strict=not config.tie_word_embeddings)
    return base.eval().requires_grad_(False), layer.eval().requires_grad_(False)


def _rope(config: LlamaConfig) -> Mapping[str, Any]:
    parameters = config.rope_parameters
    assert isinstance(parameters, Mapping)
    return parameters


def _mimo_config(config: LlamaConfig) -> dict[str, Any]:
    """The keys of MiMo's config.json."""
    return {
        "architectures": ["MiMoForCausalLM"],
        "attention_dropout": 0.0,
        **{name: getattr(config, name) for name in _SAME_KEYS},
        "model_type": "mimo",
        "num_nextn_predict_layers": 1,
        "rope_scaling": None,
        "rope_theta": _rope(config)["rope_theta"],
        "torch_dtype": "float16",
        "use_cache": True,
        "use_mrope": False,
        "use_sliding_window": False,
    }
