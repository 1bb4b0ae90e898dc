"""gptqmodel loads Ingot's GPTQ and AWQ exports."""

import os

# Version 7.6 sizes its pool by the cores and then requires two workers for loading: on two cores it would not start.
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")

from pathlib import Path

import torch
from gptqmodel import GPTQModel

from benchmarks.adapters.loading import LogitsOf, answer
from benchmarks.adapters.torch_logits import logits_of_model


def load(checkpoint: Path) -> LogitsOf:
    """Load with the kernel that it chooses for a CPU."""
    return logits_of_model(GPTQModel.load(str(checkpoint), device="cpu", dtype=torch.float32).model.eval())


if __name__ == "__main__":
    answer(load, ("gptqmodel", "transformers", "torch"))
