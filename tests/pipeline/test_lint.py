"""The lint finds what is wrong with a checkpoint, all of it, and nothing in a good one."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from ingot.cli.main import run
from ingot.pipeline.export import export_checkpoint
from ingot.pipeline.lint import lint_checkpoint
from tests.parity import CHECKPOINTS
from tests.pipeline.formats.tiny_model import quantize, recipe, tiny_checkpoint
from tests.pipeline.tiny_checkpoint import edit_json, edit_tensors

LAYER = "model.layers.0.mlp.down_proj"


def exported(folder: Path, format_name: str, **options: Any) -> Path:
    made = recipe(folder, tiny_checkpoint(folder / "model"), quantize(**options), "round-scales")
    return export_checkpoint(made, folder / "out", format_name)


def edit_quantization(folder: Path, changes: dict[str, Any]) -> None:
    (folder / "quantize_config.json").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    edit_json(folder / "config.json", {"quantization_config": {**config, **changes}})


def found(folder: Path) -> list[tuple[str, str, str]]:
    return [(finding.severity, finding.where, finding.message) for finding in lint_checkpoint(folder)]


@pytest.mark.parametrize("format_name", ["gptq", "awq", "compressed-tensors", "gguf", "safetensors"])
def test_what_we_write_is_clean(tmp_path: Path, format_name: str) -> None:
    assert lint_checkpoint(exported(tmp_path, format_name, symmetric=True)) == []


def test_a_plain_checkpoint_is_clean() -> None:
    assert lint_checkpoint(CHECKPOINTS / "llama") == []


def test_all_that_is_wrong_is_found_at_once(tmp_path: Path) -> None:
    folder = exported(tmp_path, "awq")
    scales = load_file(folder / "model.safetensors")[f"{LAYER}.scales"]
    scales[0, :2] = np.inf
    zero = load_file(folder / "model.safetensors")["model.layers.1.mlp.up_proj.scales"]
    zero[0, 0] = 0
    edit_tensors(folder, {f"{LAYER}.scales": scales, "model.layers.1.mlp.up_proj.scales": zero})
    edit_tensors(folder, {"model.norm.weight": np.full(64, np.nan, np.float32)})
    (errors, messages) = zip(*[(where, message) for _, where, message in found(folder)], strict=True)
    assert errors == ("out", f"{LAYER}.weight", "model.layers.1.mlp.up_proj.weight")
    assert "'model.norm.weight'" in messages[0]
    assert "2 of its 192 scales are NaN or infinite" in messages[1]
    assert "1 of 192 scales are 0" in messages[2]


def test_zero_points_of_the_other_version_are_found(tmp_path: Path) -> None:
    folder = exported(tmp_path, "gptq", symmetric=True)
    edit_quantization(folder, {"checkpoint_format": "gptq_v2"})
    messages = {message for _, _, message in found(folder)}
    assert len(messages) == 1
    assert messages.pop().startswith("its zero points are 7, but sym means 8: they are stored as gptq stores them")


def test_exclude_lists_are_held_against_the_tensors(tmp_path: Path) -> None:
    folder = exported(tmp_path, "compressed-tensors", overrides={"*.0.mlp.up_proj": "none"})
    edit_quantization(folder, {"ignore": ["lm_head", LAYER, "vision_tower"]})
    assert found(folder) == [
        ("error", LAYER, f"is excluded from quantization ({LAYER}), but it is quantized"),
        ("warning", "vision_tower", "is excluded from quantization, but there is no such module"),
        (
            "error",
            "model.layers.0.mlp.up_proj",
            "is in floats, but nothing excludes it from quantization: loaders will fail",
        ),
    ]


def test_missing_kv_scales_are_found(tmp_path: Path) -> None:
    folder = exported(tmp_path, "compressed-tensors")
    edit_quantization(folder, {"kv_cache_scheme": {"num_bits": 8, "type": "float"}})
    scales = {f"model.layers.{n}.self_attn.{part}_scale": np.ones(1, np.float32) for n in (0, 1) for part in "kv"}
    del scales["model.layers.1.self_attn.v_scale"]
    scales["model.layers.0.self_attn.k_scale"] = np.zeros(1, np.float32)
    edit_tensors(folder, scales)
    assert [(where, message.split(",")[0]) for _, where, message in found(folder)] == [
        ("model.layers.0.self_attn.k_scale", "must be finite and above 0"),
        ("model.layers.1.self_attn.v_scale", "is missing"),
    ]


def test_a_folder_that_is_no_checkpoint_is_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["lint-checkpoint", str(tmp_path)]) == 1
    assert "holds no config.json" in capsys.readouterr().out
    assert run(["lint-checkpoint", str(CHECKPOINTS / "llama")]) == 0
