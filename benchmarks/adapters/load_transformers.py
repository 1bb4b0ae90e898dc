"""transformers with compressed-tensors loads Ingot's compressed-tensors exports."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.adapters.loading import LogitsOf, answer
from benchmarks.adapters.torch_logits import logits_of_model


def load(checkpoint: Path) -> LogitsOf:
    """In float32."""
    return logits_of_model(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32))  # in eval mode


if __name__ == "__main__":
    answer(load, ("transformers", "compressed-tensors", "torch"))
