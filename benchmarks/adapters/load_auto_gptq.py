"""auto-gptq 0.7.1 (archived) loads what Ingot exports as GPTQ, version 1.

It ties the head to the table before it reads a file, and expects the file to hold both all the same: where it holds the
table alone, as transformers writes it, both come out as zeros. The loader puts the file's table back.
"""

from pathlib import Path
from typing import Any

import torch
from auto_gptq import AutoGPTQForCausalLM
from safetensors import safe_open

from benchmarks.adapters.loading import LogitsOf, answer
from benchmarks.adapters.torch_logits import logits_of_model


def load(checkpoint: Path) -> LogitsOf:
    """With its torch kernel, the only one that a CPU has."""
    model = AutoGPTQForCausalLM.from_quantized(
        str(checkpoint),
        device="cpu",
        model_basename="model",
        use_safetensors=True,
        torch_dtype=torch.float32,
        disable_exllama=True,
        disable_exllamav2=True,
    )
    _restore_table(model.model, checkpoint)
    return logits_of_model(model.model.eval())


def _restore_table(model: Any, checkpoint: Path) -> None:
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        if "lm_head.weight" not in file.keys():  # noqa: SIM118 - the file is no mapping
            model.model.embed_tokens.weight = torch.nn.Parameter(file.get_tensor("model.embed_tokens.weight").float())
            model.lm_head.weight = model.model.embed_tokens.weight


if __name__ == "__main__":
    answer(load, ("auto-gptq", "transformers", "torch"))
