"""Makes tiny checkpoints with an MTP layer, and its logits by transformers: python -m tests.oracle.make_mtp [FOLDER]

Each is a case of the other fixtures with a layer of transformers' MtpLayer after it, under the names of the family's
public checkpoints. In mtp.npz hidden_i [length - 1, hidden_size] is what the layer reads, and logits_i what it predicts
from that and the tokens from the second on. MiMo's reads the decoder's state before the last norm, as its authors' code
does.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpLayer

from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.config.decoder import read_config
from ingot.pipeline.checkpoint.config.mtp import DRAFT, MtpConfig
from tests.oracle.all_cases import ALL_CASES
from tests.oracle.make_fixtures import make_checkpoint, make_tokens
from tests.parity import MTP_CHECKPOINTS, MTP_LOGITS

# Folder -> the case that it extends.
CASES = {name: name for name in ("deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5_text")} | {"mimo": "qwen2"}
_AUTO_MODEL: Any = transformers.AutoModelForCausalLM  # Any: its annotations are not complete
_PARTS = {"enorm": "embedding_norm", "hnorm": "hidden_norm", "eh_proj": "projection", "post_norm": "norm"}


def main(folder: Path = MTP_CHECKPOINTS) -> None:
    """Make every case below `folder`."""
    for name in CASES:
        make_case(name, folder / name)
        print(name)


def make_case(name: str, folder: Path) -> None:
    """Write the checkpoint and mtp.npz."""
    case = next(case for case in ALL_CASES if case.name == CASES[name])
    make_checkpoint(replace(case, dtype="float32"), folder)
    model = _AUTO_MODEL.from_pretrained(folder, attn_implementation="eager").eval()
    layer = _make_layer(model)
    config = json.loads((folder / "config.json").read_text())
    changes = {"model_type": name, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps({**config, **changes}, indent=2, sort_keys=True) + "\n")
    _add(layer, folder)
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for index, prompt in enumerate(make_tokens(case)):
        tokens = prompt[:18]
        hidden, logits = _predict(model, layer, tokens, raw=name == "mimo")
        arrays |= {f"tokens_{index}": np.array(tokens, np.int16), f"hidden_{index}": hidden, f"logits_{index}": logits}
    np.savez_compressed(folder / MTP_LOGITS, **arrays)  # type: ignore[arg-type]


def _make_layer(model: Any) -> Any:
    """Return a layer with seeded weights, like the model's last that attends."""
    layers = model.model.layers
    number = max(index for index, each in enumerate(layers) if hasattr(each, "self_attn"))
    layer: Any = (
        MtpLayer(model.config, type(layers[number]), type(layers[number].input_layernorm), number).float().eval()
    )
    torch.manual_seed(len(layers) + model.config.vocab_size)
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.normal_(0, 0.2)
    for each in layer.modules():
        if hasattr(each, "layer_idx"):
            each.layer_idx = 0  # its cache is its own
    return layer


def _add(layer: Any, folder: Path) -> None:
    """Add the layer's tensors to the checkpoint, experts one by one."""
    checkpoint = Checkpoint.open(folder)
    config = read_config(checkpoint)
    assert config.family.mtp
    mtp = MtpConfig.of(config, config.family.mtp)
    tensors = load_file(folder / "model.safetensors")
    for name, value in layer.state_dict().items():
        first, _, rest = name.partition(".")
        if first in _PARTS:
            tensors[mtp.tensor_name(f"{DRAFT}.{_PARTS[first]}.{rest}")] = value
        elif rest.startswith("mlp.experts."):
            inner = value.shape[1] // 2
            for expert, matrix in enumerate(value):
                path = f"{mtp.layer_name}.mlp.experts.{expert}"
                if rest.endswith("gate_up_proj"):
                    tensors[f"{path}.gate_proj.weight"] = matrix[:inner].contiguous()
                    tensors[f"{path}.up_proj.weight"] = matrix[inner:].contiguous()
                else:
                    tensors[f"{path}.down_proj.weight"] = matrix.contiguous()
        else:
            tensors[f"{mtp.layer_name}.{rest}"] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _predict(model: Any, layer: Any, tokens: list[int], *, raw: bool) -> tuple[Any, Any]:
    """Hidden states that the layer reads, and the logits after each token from the second on, [length - 1, ...]."""
    seen: dict[str, Any] = {}
    hook = model.model.norm.register_forward_hook(lambda _, given, made: seen.update(raw=given[0], normed=made))
    ids = torch.tensor([tokens])
    with torch.no_grad():
        model(input_ids=ids)
        hook.remove()
        hidden = seen["raw" if raw else "normed"][:, :-1]
        embedded = model.model.embed_tokens(ids[:, 1:])
        count = len(tokens) - 1
        positions = torch.arange(1, count + 1)[None]
        mask = torch.full((1, 1, count, count), float("-inf")).triu(1)
        if raw:  # MiMo's columns are those of the hidden state first
            layer.config.mtp_hidden_states_first = True
        made = layer(
            embedded,
            hidden,
            position_embeddings=model.model.rotary_emb(embedded, positions),
            attention_mask=mask,
            position_ids=positions,
            past_key_values=None,
        )
        return hidden[0].numpy(), model.lm_head(made)[0].numpy()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
