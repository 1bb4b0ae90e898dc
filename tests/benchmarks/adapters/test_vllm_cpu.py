"""Sizes of the checkpoint that vLLM loads; the engine itself needs an environment of its own."""

import json
from pathlib import Path

from benchmarks.adapters.vllm_cpu import group_size, weight_bytes


def test_groups_divide_every_width() -> None:
    assert [group_size(widths) for widths in ({2048, 5632}, {576, 1536}, {48})] == [128, 64, 16]


def test_a_tied_embedding_is_the_head_and_is_read(tmp_path: Path) -> None:
    sizes = {"model.embed_tokens.weight": [0, 100], "model.layers.0.mlp.up_proj.weight_packed": [100, 130]}
    header = {"__metadata__": {"format": "pt"}} | {name: {"data_offsets": offsets} for name, offsets in sizes.items()}
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    assert weight_bytes(path, tied_head=True) == 130
    assert weight_bytes(path, tied_head=False) == 30
