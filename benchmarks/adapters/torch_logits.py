"""Logits of a torch model, for the loaders whose packages make one."""

from typing import Any

import torch

from benchmarks.adapters.loading import Logits, LogitsOf


def logits_of_model(model: Any) -> LogitsOf:
    """A function of token ids that returns float32 logits, whatever type the package multiplies in."""

    def logits_of(ids: list[int]) -> Logits:
        with torch.no_grad():
            logits: Logits = model(input_ids=torch.tensor([ids])).logits[0].float().numpy()
        return logits

    return logits_of
