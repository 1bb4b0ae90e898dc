"""auto-gptq 0.7.1 (archived) loads Ingot's GPTQ exports, version 1.

It ties the head to the embedding before it reads a file, and still expects both in the file: if only the embedding is
there, as transformers writes it, both become zeros. The loader restores the file's embedding.
"""

from pathlib import Path
from typing import Any

import torch
from auto_gptq import AutoGPTQForCausalLM
from safetensors import safe_open

from benchmarks.adapters.loading import LogitsOf, answer
from benchmarks.adapters.torch_logits import logits_of_model


def load(checkpoint: Path) -> LogitsOf:
    """Load with its torch kernel, the only one that supports a CPU."""
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
        if "lm_head.weight" not in file.keys():  # noqa: SIM118 - the file is not a mapping
            model.model.embed_tokens.weight = torch.nn.Parameter(file.get_tensor("model.embed_tokens.weight").float())
            model.lm_head.weight = model.model.embed_tokens.weight


if __name__ == "__main__":
    answer(load, ("auto-gptq", "transformers", "torch"))
