"""ModelOpt's layouts, tested with tensors made from their description; test_public_forms.py has files of ModelOpt."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from ingot.artifact.safetensors import read_header
from ingot.errors import CheckpointError
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.formats.codes import from_e2m1, from_e4m3
from ingot.pipeline.checkpoint.safetensors_writer import write_weights
from ingot.pipeline.interchange.transcode import transcode
from ingot.pipeline.model.importer import import_checkpoint
from tests.each_case import each_case
from tests.pipeline.checkpoint.formats.tiny_model import SHAPES, tiny_checkpoint
from tests.pipeline.tiny_checkpoint import edit_json

RNG = np.random.default_rng(5)
FP8 = ir.DataType.FLOAT8E4M3FN
Leaves = dict[str, tuple[Any, ir.DataType]]
LAYERS = [f"model.layers.{n}.{name}" for n in (0, 1) for name in SHAPES]


def int4(rows: int, columns: int) -> tuple[Leaves, Any]:
    codes = RNG.integers(-8, 8, (rows, columns))
    scales = RNG.uniform(0.001, 0.1, (rows, columns // 32)).astype(np.float16).astype(np.float32)
    stored = np.empty((rows // 2, columns), np.uint8)
    for row in range(rows // 2):
        stored[row] = (codes[2 * row] & 15) | ((codes[2 * row + 1] & 15) << 4)
    leaves: Leaves = {"weight": (stored, ir.DataType.UINT8), "weight_scale": (scales, ir.DataType.FLOAT)}
    return leaves, codes.astype(np.float32) * np.repeat(scales, 32, axis=1)


def int4_with_second_scale(rows: int, columns: int) -> tuple[Leaves, Any]:
    """The second scale belongs to an engine that rounds the weights to fp8 too."""
    leaves, weight = int4(rows, columns)
    leaves["weight_scale_2"] = np.array(0.5, np.float32), ir.DataType.FLOAT
    return leaves, weight


def int4_with_scaled_inputs(rows: int, columns: int) -> tuple[Leaves, Any]:
    leaves, weight = int4(rows, columns)
    scale = RNG.uniform(0.5, 2, columns).astype(np.float32)
    leaves["pre_quant_scale"] = scale, ir.DataType.FLOAT
    return leaves, weight * scale


def fp8(rows: int, columns: int) -> tuple[Leaves, Any]:
    raw = RNG.integers(0, 126, (rows, columns)).astype(np.uint8)
    scale = np.array(0.01, np.float32)
    leaves: Leaves = {"weight": (raw, FP8), "weight_scale": (scale, ir.DataType.FLOAT)}
    leaves["input_scale"] = np.array(0.02, np.float32), ir.DataType.FLOAT
    return leaves, from_e4m3(raw) * scale


def fp8_per_channel(rows: int, columns: int) -> tuple[Leaves, Any]:
    leaves, _ = fp8(rows, columns)
    scales = RNG.uniform(0.01, 0.1, rows).astype(np.float32)
    del leaves["input_scale"]
    leaves["weight_scale"] = scales, ir.DataType.FLOAT
    return leaves, from_e4m3(leaves["weight"][0]) * scales[:, None]


def fp8_in_blocks(rows: int, columns: int) -> tuple[Leaves, Any]:
    leaves, _ = fp8(rows, columns)
    scales = RNG.uniform(0.01, 0.1, (rows // 16, 1, columns // 16, 1)).astype(np.float32)
    del leaves["input_scale"]
    leaves["weight_scale"] = scales, ir.DataType.FLOAT
    wide = np.repeat(np.repeat(scales[:, 0, :, 0], 16, axis=0), 16, axis=1)
    return leaves, from_e4m3(leaves["weight"][0]) * wide


def nvfp4(rows: int, columns: int) -> tuple[Leaves, Any]:
    codes = RNG.integers(0, 16, (rows, columns)).astype(np.uint8)
    scales = RNG.integers(1, 126, (rows, columns // 16)).astype(np.uint8)
    second = np.array(0.003, np.float32)
    leaves: Leaves = {"weight": (codes[:, ::2] | (codes[:, 1::2] << 4), ir.DataType.UINT8)}
    leaves |= {"weight_scale": (scales, FP8), "weight_scale_2": (second, ir.DataType.FLOAT)}
    return leaves, from_e2m1(codes) * np.repeat(from_e4m3(scales) * second, 16, axis=1)


def nvfp4_with_scaled_inputs(rows: int, columns: int) -> tuple[Leaves, Any]:
    leaves, weight = nvfp4(rows, columns)
    scale = RNG.uniform(0.5, 2, columns).astype(np.float32)
    leaves["pre_quant_scale"] = scale, ir.DataType.FLOAT
    return leaves, weight * scale


def checkpoint(folder: Path, algorithm: str, make: Any, kv_cache: bool = False) -> tuple[Path, dict[str, Any]]:
    """A tiny llama with layers in this layout, and the weights that they hold."""
    tiny_checkpoint(folder)
    header = read_header(folder / "model.safetensors")
    plain = [name for name in header if name.removesuffix(".weight") not in LAYERS]
    opened = Checkpoint.open(folder)
    tensors: list[tuple[str, ir.TensorProtocol]] = [(name, opened.external(name)) for name in plain]
    expected: dict[str, Any] = {}
    for layer in LAYERS:
        leaves, expected[f"{layer}.weight"] = make(*SHAPES[layer.split(".", 3)[3]])
        tensors += [(f"{layer}.{leaf}", tensor_of(*values)) for leaf, values in leaves.items()]
        if kv_cache and layer.endswith(("k_proj", "v_proj")):
            tensors.append((f"{layer}.{layer[-6]}_scale", tensor_of(np.array(0.25, np.float32), ir.DataType.FLOAT)))
    write_weights(folder / "new.safetensors", tensors, padded=False)
    (folder / "new.safetensors").replace(folder / "model.safetensors")
    quantization = {
        "quant_algo": algorithm,
        "exclude_modules": ["lm_head"],
        "kv_cache_quant_algo": "FP8" if kv_cache else None,
    }
    (folder / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": quantization})
    )
    return folder, expected


def tensor_of(values: Any, dtype: ir.DataType) -> ir.TensorProtocol:
    array = np.asarray(values)
    return ir.Tensor(array.view(dtype.numpy()) if dtype == FP8 else array, dtype=dtype)


CASES = [
    ("W4A16_AWQ", int4),
    ("W4A8_AWQ", int4_with_second_scale),
    ("W4A16_AWQ", int4_with_scaled_inputs),
    ("FP8", fp8),
    ("FP8_PER_CHANNEL_PER_TOKEN", fp8_per_channel),
    ("FP8_PB_WO", fp8_in_blocks),
    ("NVFP4", nvfp4),
    ("W4A16_NVFP4", nvfp4),
    ("NVFP4_AWQ", nvfp4_with_scaled_inputs),
]


@each_case(("algorithm", "make"), CASES, ids=[f"{algorithm}-{make.__name__}" for algorithm, make in CASES])
def test_every_layout_decodes_to_the_packed_weight(algorithm: str, make: Any, tmp_path: Path) -> None:
    folder, expected = checkpoint(tmp_path / "model", algorithm, make)
    opened = Checkpoint.open(folder)
    assert set(opened.encoded) == set(expected)
    assert all(np.array_equal(opened.encoded[name].dequantize(), weight) for name, weight in expected.items())
    import_checkpoint(opened)


@each_case(
    ("algorithm", "make", "target"),
    [
        ("W4A16_AWQ", int4, "awq"),
        ("W4A8_AWQ", int4_with_second_scale, "gguf"),
        ("FP8", fp8, "compressed-tensors"),
        ("FP8_PER_CHANNEL_PER_TOKEN", fp8_per_channel, "compressed-tensors"),
        ("FP8_PB_WO", fp8_in_blocks, "compressed-tensors"),
        ("NVFP4", nvfp4, "compressed-tensors"),
        ("W4A16_AWQ", int4_with_scaled_inputs, "safetensors"),
    ],
)
def test_codes_survive_other_formats(algorithm: str, make: Any, target: str, tmp_path: Path) -> None:
    folder, _ = checkpoint(tmp_path / "model", algorithm, make)
    assert transcode(folder, tmp_path / "out", target).proof.equal


def test_scales_of_inputs_and_cache_get_compressed_tensors_names(tmp_path: Path) -> None:
    folder, _ = checkpoint(tmp_path / "model", "FP8", fp8, kv_cache=True)
    out = transcode(folder, tmp_path / "out", "compressed-tensors").folder
    written = read_header(out / "model.safetensors")
    names = [f"model.layers.{n}.self_attn.{part}_scale" for n in (0, 1) for part in "kv"]
    assert all(written[name].shape == (1,) for name in (*names, f"{LAYERS[0]}.input_scale"))
    quantization = json.loads((out / "config.json").read_text())["quantization_config"]
    assert quantization["kv_cache_scheme"]["num_bits"] == 8
    assert quantization["config_groups"]["group_0"]["input_activations"]["dynamic"] is False


def mixed(folder: Path, layers: dict[str, Any]) -> Path:
    """A checkpoint whose attention is fp8 and whose MLP is int4, with this description of its layers."""
    by_shape = {SHAPES[name]: fp8 if name.startswith("self_attn") else int4 for name in SHAPES}
    checkpoint(folder, "MIXED_PRECISION", lambda rows, columns: by_shape[rows, columns](rows, columns))
    quantization = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    edit_json(folder / "hf_quant_config.json", {"quantization": quantization})
    return folder


ATTENTION_AND_MLP = {"*.self_attn.*": {"quant_algo": "FP8"}, "*.mlp.*": {"quant_algo": "W4A16_AWQ", "group_size": 32}}


def test_mixed_precision_reads_each_layer_by_its_own_algorithm(tmp_path: Path) -> None:
    folder = mixed(tmp_path / "model", ATTENTION_AND_MLP)
    listed = {name: ATTENTION_AND_MLP["*.self_attn.*" if "attn" in name else "*.mlp.*"] for name in LAYERS}
    by_pattern = {name: tensor.dequantize() for name, tensor in Checkpoint.open(folder).encoded.items()}
    edit_json(
        folder / "hf_quant_config.json", {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": listed}}
    )
    opened = Checkpoint.open(folder)
    kinds = {name: tensor.activations is not None for name, tensor in opened.encoded.items()}
    assert kinds == {f"{name}.weight": "self_attn" in name for name in LAYERS}
    assert all(np.array_equal(by_pattern[name], tensor.dequantize()) for name, tensor in opened.encoded.items())


@each_case(
    ("layers", "message"),
    [
        ({}, "quantized_layers does not say how each layer is stored"),
        ({"*.mlp.*": {"quant_algo": "W4A16_AWQ"}}, "q_proj': is quantized, but quantized_layers does not name it"),
        ({"*": {"quant_algo": "FP9"}}, r"quantized_layers.\*.quant_algo is 'FP9'; Ingot reads"),
    ],
)
def test_mixed_precision_without_a_layers_algorithm_is_refused(
    layers: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(mixed(tmp_path / "model", layers))


def test_an_unsupported_algorithm_is_refused_by_name(tmp_path: Path) -> None:
    folder, _ = checkpoint(tmp_path / "model", "FP8", fp8)
    edit_json(folder / "hf_quant_config.json", {"quantization": {"quant_algo": "FP9"}})
    with pytest.raises(CheckpointError, match=r"quant_algo is 'FP9'; Ingot reads .*Did you mean 'FP8'\?"):
        Checkpoint.open(folder)
    (folder / "hf_quant_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="is a JSON list, it must be an object"):
        Checkpoint.open(folder)
