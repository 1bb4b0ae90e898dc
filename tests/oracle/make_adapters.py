"""Make tests/fixtures/adapters: LoRA adapters that PEFT saved, and what its own merge makes of the checkpoint.

    pip install --group oracle peft==0.21.2
    python -m tests.oracle.make_adapters

Each folder is an adapter with `merged.safetensors` next to it, the float32 weights that it changes.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-call"

import os
import shutil
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.data_paths import ROOT

FOLDER = ROOT / "tests" / "fixtures" / "adapters"
KINDS: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q_proj", "v_proj"], "lora_alpha": 12},
    "patterns": {
        "target_modules": "all-linear",
        "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 6},
        "alpha_pattern": {"down_proj": 3, r"^model\.layers\.0\.self_attn\.o_proj": 9},
        "use_rslora": True,
    },
    "magnitudes": {"target_modules": ["k_proj", "gate_proj", "down_proj"], "use_dora": True},
    "replaced": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "post_attention_layernorm"]},
}


def main() -> None:
    """Make the checkpoint and each adapter anew."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(FOLDER / "checkpoint")
    os.chdir(FOLDER)  # PEFT writes the checkpoint's path into adapters
    for name, options in KINDS.items():
        base = LlamaForCausalLM.from_pretrained("checkpoint", dtype=torch.float32)
        before = {key: value.clone() for key, value in base.state_dict().items()}
        model = get_peft_model(base, LoraConfig(r=4, task_type="CAUSAL_LM", **options))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(FOLDER / name)
        (FOLDER / name / "README.md").unlink(missing_ok=True)
        merged = model.merge_and_unload().state_dict()
        changed = {key: value for key, value in merged.items() if not torch.equal(value, before[key])}
        save_file(changed, FOLDER / name / "merged.safetensors")


if __name__ == "__main__":
    main()
