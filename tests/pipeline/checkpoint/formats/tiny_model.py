"""A random llama whose widths every format can hold, and recipes that quantize it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ingot.errors import UsageError
from ingot.pipeline.interchange.export import export_checkpoint
from ingot.pipeline.recipe.load import load_recipe
from ingot.pipeline.recipe.schema import Recipe
from tests.pipeline.tiny_checkpoint import ABSENT, edit_json

HIDDEN, INNER, VOCABULARY, LAYERS = 64, 96, 128, 2
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": VOCABULARY,
}
SHAPES = {
    "self_attn.q_proj": (64, HIDDEN),
    "self_attn.k_proj": (32, HIDDEN),
    "self_attn.v_proj": (32, HIDDEN),
    "self_attn.o_proj": (HIDDEN, 64),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}


def tiny_checkpoint(folder: Path) -> Path:
    """Write the model in float32."""
    folder.mkdir()
    rng = np.random.default_rng(7)
    tensors = {
        f"model.layers.{n}.{name}.weight": rng.normal(size=s) for n in range(LAYERS) for name, s in SHAPES.items()
    }
    tensors |= {name: rng.normal(size=(VOCABULARY, HIDDEN)) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    norms = [f"model.layers.{n}.{part}_layernorm" for n in range(LAYERS) for part in ("input", "post_attention")]
    tensors |= {f"{name}.weight": rng.uniform(5, 10, HIDDEN) for name in (*norms, "model.norm")}
    save_file({name: (array * 0.1).astype(np.float32) for name, array in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def recipe(folder: Path, checkpoint: Path, *passes: str | dict[str, Any]) -> Recipe:
    """A recipe with these passes."""
    file = folder / "recipe.yaml"
    file.write_text(json.dumps({"checkpoint": str(checkpoint), "passes": list(passes)}))
    return load_recipe(str(file))


def quantize(**options: Any) -> dict[str, Any]:
    """quantize-weights of the linear layers only, unless the options add others."""
    return {"quantize-weights": {"lm_head": "none", "embedding": "none", "block_size": 32, **options}}


def exported(folder: Path, format_name: str, **options: Any) -> Path:
    """The model, quantized with these options and exported to folder/out."""
    made = recipe(folder, tiny_checkpoint(folder / "model"), quantize(scale_dtype="float16", **options))
    return export_checkpoint(made, folder / "out", format_name)


def assert_export_refused(folder: Path, format_name: str, message: str, **options: Any) -> None:
    """Check that `exported` raises UsageError with the message (a pattern) and writes nothing."""
    with pytest.raises(UsageError, match=message):
        exported(folder, format_name, **options)
    assert not (folder / "out").exists()


def edit_quantization(folder: Path, changes: dict[str, Any]) -> None:
    """Change quantization_config (ABSENT removes a key), and drop the file that repeats it."""
    (folder / "quantize_config.json").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    kept = {key: value for key, value in {**config, **changes}.items() if value is not ABSENT}
    edit_json(folder / "config.json", {"quantization_config": kept})
