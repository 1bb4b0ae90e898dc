"""Synthetic checkpoints of hybrids are those of their families: Ingot's importer reads every tensor and size."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.hybrids import HYBRIDS, spread
from benchmarks.synthetic import write_checkpoint

from ingot.passes.model_facts import KV
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.model.importer import import_checkpoint


@pytest.mark.parametrize("name", HYBRIDS)
def test_ingot_imports_it_with_keys_in_attention_layers_alone(name: str, tmp_path: Path) -> None:
    small: dict[str, Any] = {
        "hidden_size": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
    }
    shape = HYBRIDS[name]
    state = (4, 32, 32) if any(shape.state) else shape.state
    tiny = replace(shape, **small, num_layers=4, attention_layers=(1, 3), vocab_size=300, state=state)
    model = import_checkpoint(Checkpoint.open(write_checkpoint(tiny, tmp_path)))
    assert len(KV.of(model).layers) == tiny.kv_layers == 2


def test_states_forget_slowly_and_norms_are_around_one() -> None:
    assert spread("model.layers.0.linear_attn.dt_bias", (16,))[0] < 0
    assert spread("model.norm.weight", (64,)) == (1.0, 0.1)
    assert spread("model.layers.0.mlp.up_proj.weight", (96, 64)) == (0.0, 0.02)
