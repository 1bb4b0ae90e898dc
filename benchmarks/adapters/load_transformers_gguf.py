"""transformers with the gguf package loads Ingot's GGUF exports and dequantizes them; activations stay floats."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.adapters.loading import LogitsOf, answer
from benchmarks.adapters.torch_logits import logits_of_model


def load(checkpoint: Path) -> LogitsOf:
    """In float32."""
    (file,) = checkpoint.glob("*.gguf")
    return logits_of_model(
        AutoModelForCausalLM.from_pretrained(checkpoint, gguf_file=file.name, dtype=torch.float32)  # in eval mode
    )


if __name__ == "__main__":
    answer(load, ("gguf", "transformers", "torch"))
