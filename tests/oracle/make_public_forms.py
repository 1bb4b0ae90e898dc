"""Checkpoints of public forms, written by the packages that own them, and the weights that these packages compute.

    ENVIRONMENT/bin/python tests/oracle/make_public_forms.py KIND FOLDER

Runs in an environment that has the package of the kind (KINDS names it) and transformers; imports nothing of Ingot.
Writes FOLDER/KIND/model, the checkpoint of a llama of one layer; FOLDER/KIND/original.safetensors, its weights before;
and FOLDER/KIND/expected.safetensors, the weights that the package computes with, where it says them.
`INGOT_PUBLIC_FORMS=FOLDER pytest tests/pipeline/checkpoint/formats/test_public_forms.py` reads them.
"""

import json
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

_SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 128, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}  # fmt: skip
Weights = dict[str, torch.Tensor]


def _layers(model: Any) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if name.startswith("model.layers.") and
            isinstance(module, torch.nn.Linear)}  # fmt: skip


def _bitsandbytes(folder: Path, out: Path, **options: Any) -> Weights:
    """Quantize while loading, in float32, so that the package's weights are not rounded to 16 bits once more."""
    from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant
    from transformers import BitsAndBytesConfig

    settings = BitsAndBytesConfig(**options)
    model = LlamaForCausalLM.from_pretrained(
        folder, quantization_config=settings, device_map="cpu", dtype=torch.float32
    )
    model.save_pretrained(out)
    weights = {f"{name}.weight": module.weight for name, module in _layers(model).items()}
    if "load_in_8bit" in options:
        return {name: int8_vectorwise_dequant(weight.CB, weight.SCB).float() for name, weight in weights.items()}
    return {name: dequantize_4bit(weight.data, weight.quant_state).float() for name, weight in weights.items()}


def _torchao(folder: Path, out: Path) -> Weights:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    settings = TorchAoConfig(Int8WeightOnlyConfig())
    LlamaForCausalLM.from_pretrained(folder, quantization_config=settings, device_map="cpu").save_pretrained(out)
    return {}


def _auto_round(folder: Path, out: Path, name: str, *, symmetric: bool, **options: Any) -> Weights:
    from auto_round import AutoRound
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(128)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w0")
    model = LlamaForCausalLM.from_pretrained(folder)
    given: dict[str, Any] = {"bits": 4, "group_size": 32, "iters": 0, "disable_opt_rtn": True, **options}
    AutoRound(model, tokenizer, sym=symmetric, device_map="cpu", **given).quantize_and_save(str(out), format=name)
    made = next(out.rglob("config.json")).parent
    if made != out:
        shutil.copytree(made, out, dirs_exist_ok=True)
        shutil.rmtree(made)
    return {}


def _model_opt(
    folder: Path, out: Path, settings: str, *, cut: tuple[str, ...] = (), says_weights: bool = True
) -> Weights:
    """Quantize by ModelOpt's own settings.

    cut             endings of the layers whose input scales stay in the checkpoint; those of others go into norms
    says_weights    whether the package rounds to the scheme on CPUs
    """
    import modelopt.torch.quantization as quantization
    from modelopt.torch.export import export_hf_checkpoint

    def calibrate(model: Any) -> None:
        for _ in range(4):
            model(torch.randint(0, _SIZES["vocab_size"], (1, 32)))

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    quantization.quantize(model, getattr(quantization, settings), calibrate)
    expected: Weights = {}
    for name, module in _layers(model).items() if says_weights else ():
        quantizer = module.weight_quantizer
        first = quantizer[0] if hasattr(quantizer, "__len__") else quantizer
        scale = getattr(module.input_quantizer, "_pre_quant_scale", None)
        weight = first(module.weight).detach() * (1 if scale is None else scale)
        if not cut or name.endswith(cut):
            expected[f"{name}.weight"] = weight.float().clone()
    with torch.inference_mode():
        export_hf_checkpoint(model, export_dir=str(out))
    return expected


def _compressed_tensors(folder: Path, out: Path, scheme: str) -> Weights:
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    model = LlamaForCausalLM.from_pretrained(folder)
    oneshot(model=model, recipe=QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"]))
    model.save_pretrained(out, save_compressed=True)
    return {}


def _gguf_types(_: Path, out: Path) -> Weights:
    """Random blocks of each type that gguf dequantizes: bytes with finite scales, and the values."""
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    rng, expected = np.random.default_rng(0), {}
    out.mkdir(parents=True)
    for kind in (GGMLQuantizationType[name] for name in _GGML_TYPES):
        values, size = GGML_QUANT_SIZES[kind]
        blocks = rng.integers(0, 256, (16, 4 * size), dtype=np.uint8)
        halves = blocks.view(np.float16)
        # Scales are float16: no infinities, nor numbers that are none.
        halves[(halves.view(np.uint16) & 0x7C00) == 0x7C00] = 1
        expected[kind.name] = torch.from_numpy(dequantize(blocks, kind))
        assert expected[kind.name].shape == (16, 4 * values)
        np.save(out / f"{kind.name}.npy", blocks)
    (out / "types.json").write_text(json.dumps({each.name: int(each) for each in GGMLQuantizationType}))
    return expected


_GGML_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
_NF4: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
_AWQ_CUT = ("o_proj", "down_proj")
KINDS: dict[str, tuple[str, Callable[[Path, Path], Weights]]] = {
    "bitsandbytes-nf4": ("bitsandbytes", lambda a, b: _bitsandbytes(a, b, **_NF4)),
    "bitsandbytes-nf4-double": (
        "bitsandbytes",
        lambda a, b: _bitsandbytes(a, b, **_NF4, bnb_4bit_use_double_quant=True),
    ),
    "bitsandbytes-fp4": (
        "bitsandbytes",
        lambda a, b: _bitsandbytes(a, b, load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    ),
    "bitsandbytes-int8": ("bitsandbytes", lambda a, b: _bitsandbytes(a, b, load_in_8bit=True)),
    "torchao-int8": ("torchao", _torchao),
    "auto-round-gptq-sym": ("auto-round", lambda a, b: _auto_round(a, b, "auto_round:auto_gptq", symmetric=True)),
    "auto-round-gptq-asym": ("auto-round", lambda a, b: _auto_round(a, b, "auto_round:auto_gptq", symmetric=False)),
    "auto-round-awq": ("auto-round", lambda a, b: _auto_round(a, b, "auto_round:auto_awq", symmetric=False)),
    "auto-round-default": ("auto-round", lambda a, b: _auto_round(a, b, "auto_round", symmetric=True)),
    "auto-round-auto_gptq": ("auto-round", lambda a, b: _auto_round(a, b, "auto_gptq", symmetric=True)),
    "modelopt-FP8": ("nvidia-modelopt", lambda a, b: _model_opt(a, b, "FP8_DEFAULT_CFG")),
    "modelopt-NVFP4": ("nvidia-modelopt", lambda a, b: _model_opt(a, b, "NVFP4_DEFAULT_CFG", says_weights=False)),
    "modelopt-W4A8_AWQ": ("nvidia-modelopt", lambda a, b: _model_opt(a, b, "W4A8_AWQ_BETA_CFG", cut=_AWQ_CUT)),
    "modelopt-W4A16_AWQ": ("nvidia-modelopt", lambda a, b: _model_opt(a, b, "INT4_AWQ_CFG", cut=_AWQ_CUT)),
    "gguf-types": ("gguf", _gguf_types),
    "compressed-tensors-W4A16_ASYM": ("compressed-tensors", lambda a, b: _compressed_tensors(a, b, "W4A16_ASYM")),
}


def main(kind: str, folder: Path) -> None:
    """Write the checkpoint of a kind."""
    package, make = KINDS[kind]
    torch.manual_seed(0)
    out = folder / kind
    shutil.rmtree(out, ignore_errors=True)
    model = LlamaForCausalLM(LlamaConfig(**_SIZES, dtype="bfloat16")).to(torch.bfloat16)
    model.save_pretrained(out / "original")
    expected = make(out / "original", out / "model")
    original = {
        f"{name}.weight": module.weight.detach().float().contiguous() for name, module in _layers(model).items()
    }
    save_file(original, out / "original.safetensors")
    if expected:
        save_file({name: weight.contiguous() for name, weight in expected.items()}, out / "expected.safetensors")
    (out / "version.json").write_text(json.dumps({package: version(package)}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
