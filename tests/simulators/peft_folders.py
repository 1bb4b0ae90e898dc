"""Folders as PEFT saves them, with an adapter for the fake executor's projections."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from ingot.artifact.peft import CONFIG, WEIGHTS
from ingot.artifact.programs.projections import Projection
from tests.simulators.fake_executor import PROJECTIONS


def write_adapter(
    folder: Path,
    *,
    seed: int = 0,
    rank: int = 2,
    projections: Sequence[Projection] = PROJECTIONS,
    alpha: float | None = None,
) -> Path:
    """Write a random adapter that changes every projection by alpha / rank times B A; returns the folder."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    tensors = {}
    for projection in projections:
        shapes = {"A": (rank, projection.columns), "B": (projection.rows, rank)}
        for part, shape in shapes.items():
            values = rng.normal(size=shape).astype(np.float32)
            tensors[f"base_model.model.{projection.module}.lora_{part}.weight"] = values
    save_file(tensors, folder / WEIGHTS)
    (folder / CONFIG).write_text(
        json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank if alpha is None else alpha})
    )
    return folder
