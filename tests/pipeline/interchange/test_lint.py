"""Lint finds every error of a checkpoint, and nothing in a good one."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from ingot.cli.main import run
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.interchange.export import export_checkpoint
from ingot.pipeline.interchange.lint import lint_checkpoint
from ingot.pipeline.interchange.transcode import transcode
from tests.parity import CHECKPOINTS
from tests.pipeline.checkpoint.formats.tiny_model import edit_quantization, exported, quantize, recipe, tiny_checkpoint
from tests.pipeline.tiny_checkpoint import ABSENT, edit_json, edit_tensors

LAYER = "model.layers.0.mlp.down_proj"


def found(folder: Path) -> list[tuple[str, str, str]]:
    return [(finding.severity, finding.where, finding.message) for finding in lint_checkpoint(folder)]


@pytest.mark.parametrize("format_name", ["gptq", "awq", "compressed-tensors", "gguf", "safetensors"])
def test_our_exports_have_no_findings(tmp_path: Path, format_name: str) -> None:
    assert lint_checkpoint(exported(tmp_path, format_name, symmetric=True)) == []


def test_a_plain_checkpoint_has_no_findings() -> None:
    assert lint_checkpoint(CHECKPOINTS / "llama") == []


def test_all_errors_are_found_at_once(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(("declared", "mean"), [("gptq_v2", r"\+[01]\.\d\d"), (None, r"-[01]\.\d\d")])
def test_asymmetric_zero_points_of_the_other_version_are_guessed_from_the_mean(
    tmp_path: Path, declared: str | None, mean: str
) -> None:
    folder = exported(tmp_path, "gptq")
    if declared is None:  # written as version 2, which an absent key does not mean
        edit_quantization(folder, {"checkpoint_format": ABSENT})
    else:
        folder = transcode(folder, tmp_path / "v1", "gptq-v1").folder
        edit_quantization(folder, {"checkpoint_format": declared})
    messages = [message for _, _, message in found(folder)]
    assert len(messages) == 14
    says = "is absent, which means gptq" if declared is None else "says gptq_v2"
    for message in messages:
        assert re.match(rf"its codes are {mean} from their zero points on average.*checkpoint_format {says}", message)


def test_zero_points_beyond_the_codes_are_found(tmp_path: Path) -> None:
    folder = transcode(exported(tmp_path, "gptq"), tmp_path / "v1", "gptq-v1").folder
    qzeros = load_file(folder / "model.safetensors")[f"{LAYER}.qzeros"]
    qzeros[0, 0] |= np.int32(15)
    edit_tensors(folder, {f"{LAYER}.qzeros": qzeros})
    where, message = next((where, message) for _, where, message in found(folder) if "beyond" in message)
    assert where == f"{LAYER}.weight"
    assert message.startswith("1 of 192 zero points are 16, beyond the codes")


def test_groups_out_of_order_without_act_order_are_found(tmp_path: Path) -> None:
    folder = exported(tmp_path, "gptq")
    order = np.random.default_rng(0).permutation(np.arange(96, dtype=np.int32) // 32)
    edit_tensors(folder, {f"{LAYER}.g_idx": order})
    assert [(severity, where) for severity, where, message in found(folder) if "g_idx" in message] == [
        ("error", f"{LAYER}.weight")
    ]


def test_act_order_without_g_idx_is_a_finding(tmp_path: Path) -> None:
    folder = exported(tmp_path, "gptq")
    edit_tensors(folder, {f"{LAYER}.g_idx": ABSENT})
    edit_quantization(folder, {"desc_act": True})
    [(severity, _, message)] = found(folder)
    assert severity == "error"
    assert f"{LAYER!r}: has no 'g_idx', which gptq needs because desc_act is true" in message


def test_the_gemv_layout_is_a_finding(tmp_path: Path) -> None:
    folder = exported(tmp_path, "awq")
    edit_quantization(folder, {"version": "gemv"})
    [(_, _, message)] = found(folder)
    assert "version is 'gemv'; Ingot reads 'gemm' and no other layout of AWQ" in message


@pytest.mark.parametrize(("offset", "value"), [(8, 10**12), (8, 3), (16, 10**9)])
def test_a_wrong_gguf_header_is_a_finding(tmp_path: Path, offset: int, value: int) -> None:
    file = exported(tmp_path, "gguf", symmetric=True) / "out.gguf"
    content = bytearray(file.read_bytes())
    content[offset : offset + 8] = value.to_bytes(8, "little")
    file.write_bytes(content)
    assert {severity for severity, _, _ in found(file)} == {"error"}


def test_a_truncated_gguf_file_is_a_finding(tmp_path: Path) -> None:
    file = exported(tmp_path, "gguf", symmetric=True) / "out.gguf"
    file.write_bytes(file.read_bytes()[:-100])
    [(_, _, message)] = found(file)
    assert "is truncated" in message


def test_a_quantized_head_that_is_announced_as_floats_is_found(tmp_path: Path) -> None:
    folder = exported(tmp_path, "compressed-tensors", lm_head=8)
    edit_quantization(folder, {"lm_head": False})
    assert found(folder) == [
        (
            "warning",
            "lm_head.weight",
            "is quantized, but lm_head is false: Ingot reads it, other loaders may look for floats",
        )
    ]


def test_missing_and_nan_static_scales_of_inputs_are_found(tmp_path: Path) -> None:
    folder = exported(tmp_path, "compressed-tensors", bits=8, symmetric=True, block_size="channel")
    groups = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"]
    groups["group_0"]["input_activations"] = {"num_bits": 8, "type": "int", "dynamic": False, "strategy": "tensor"}
    edit_quantization(folder, {"config_groups": groups})
    modules = [name.removesuffix(".weight") for name in Checkpoint.open(folder).encoded]
    scales = {f"{module}.input_scale": np.ones(1, np.float32) for module in modules}
    scales[f"{LAYER}.input_scale"] = np.full(1, np.nan, np.float32)
    del scales["model.layers.1.mlp.up_proj.input_scale"]
    edit_tensors(folder, scales)
    assert sorted((where, message.partition(",")[0]) for _, where, message in found(folder)) == [
        (f"{LAYER}.input_scale", "must be finite and above 0"),
        ("model.layers.1.mlp.up_proj.input_scale", "is missing"),
    ]


def test_kv_scales_without_a_scheme_are_found(tmp_path: Path) -> None:
    folder = exported(tmp_path, "compressed-tensors")
    edit_tensors(folder, {"model.layers.0.self_attn.k_scale": np.ones(1, np.float32)})
    assert [(severity, where) for severity, where, _ in found(folder)] == [
        ("warning", "model.layers.0.self_attn.k_scale")
    ]


def test_exclude_lists_are_compared_with_the_tensors(tmp_path: Path) -> None:
    folder = exported(tmp_path, "compressed-tensors", overrides={"*.0.mlp.up_proj": "none"})
    edit_quantization(folder, {"ignore": ["lm_head", LAYER, "vision_tower"]})
    assert found(folder) == [
        ("error", LAYER, f"is excluded from quantization ({LAYER}), but it is quantized"),
        ("warning", "vision_tower", "is excluded from quantization, but there is no such module"),
        (
            "warning",
            "model.layers.0.mlp.up_proj",
            "is in floats, but nothing excludes it from quantization: Ingot reads it, other loaders may not",
        ),
    ]


def test_a_tied_head_that_loaders_would_quantize_is_found(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "model")
    edit_tensors(source, {"lm_head.weight": ABSENT})
    edit_json(source / "config.json", {"tie_word_embeddings": True})
    folder = export_checkpoint(recipe(tmp_path, source, quantize()), tmp_path / "out", "compressed-tensors")
    assert found(folder) == []
    edit_quantization(folder, {"ignore": []})
    assert [(severity, where) for severity, where, _ in found(folder)] == [("warning", "lm_head")]


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


def test_a_folder_without_a_checkpoint_is_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["lint-checkpoint", str(tmp_path)]) == 1
    assert "holds no config.json" in capsys.readouterr().out
    assert run(["lint-checkpoint", str(CHECKPOINTS / "llama")]) == 0


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.bool_, np.float64])
def test_a_scale_of_the_cache_of_another_dtype_is_a_finding(tmp_path: Path, dtype: type[np.generic]) -> None:
    folder = exported(tmp_path, "compressed-tensors")
    edit_quantization(folder, {"kv_cache_scheme": {"num_bits": 8, "type": "float"}})
    layers = [f"model.layers.{layer}.self_attn.{part}_scale" for layer in (0, 1) for part in "kv"]
    edit_tensors(folder, {name: np.ones(1, dtype if name == layers[0] else np.float32) for name in layers})
    [(severity, where, message)] = found(folder)
    assert (severity, where) == ("error", layers[0])
    assert "a scale must be F16 or BF16 or F32" in message
