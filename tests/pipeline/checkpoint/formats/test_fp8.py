"""quant_method fp8: weights as DeepSeek, Qwen and Mistral release them, equal to what transformers reads."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from ingot.errors import CheckpointError
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.formats.codes import from_e4m3, from_e8m0
from ingot.pipeline.checkpoint.safetensors_writer import write_weights
from ingot.pipeline.interchange.lint import lint_checkpoint
from ingot.pipeline.interchange.transcode import transcode
from ingot.pipeline.model.importer import import_checkpoint
from tests.each_case import each_case
from tests.pipeline.checkpoint.formats.tiny_model import LAYERS, SHAPES, tiny_checkpoint
from tests.pipeline.tiny_checkpoint import ABSENT, edit_json

MODULES = [f"model.layers.{n}.{name}" for n in range(LAYERS) for name in SHAPES]
FP8, E8M0 = ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT8E8M0
BLOCKS: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [48, 40]}


def checkpoint(folder: Path, quantization: dict[str, Any], dtype: ir.DataType, **others: str) -> dict[str, Any]:
    """Write a tiny llama in fp8, and return its weights. others: leaf -> name under which it is stored."""
    tiny_checkpoint(folder)
    opened, rng = Checkpoint.open(folder), np.random.default_rng(3)
    layers = {f"{name}.weight" for name in MODULES}
    tensors = [(name, opened.external(name)) for name in opened.tensors if name not in layers]
    expected = {}
    for module in MODULES:
        rows, columns = SHAPES[module.split(".", 3)[3]]
        raw = rng.integers(0, 126, (rows, columns)).astype(np.uint8)
        height, width = quantization.get("weight_block_size") or (rows, columns)
        codes = rng.integers(110, 124, (-(-rows // height), -(-columns // width))).astype(np.uint8)
        scales = from_e8m0(codes)
        wide = np.repeat(np.repeat(scales, height, axis=0)[:rows], width, axis=1)[:, :columns]
        expected[f"{module}.weight"] = from_e4m3(raw) * wide
        stored = codes.view(E8M0.numpy()) if dtype == E8M0 else scales.astype(dtype.numpy())
        if "weight_block_size" not in quantization:
            stored = stored.reshape(())
        tensors.append((f"{module}.weight", ir.Tensor(raw.view(FP8.numpy()), dtype=FP8)))
        tensors.append((f"{module}.{others.get('scale', 'weight_scale_inv')}", ir.Tensor(stored, dtype=dtype)))
        if "activation" in others:
            tensors.append((f"{module}.{others['activation']}", ir.Tensor(np.float32(0.5))))
    write_weights(folder / "new.safetensors", tensors, padded=False)
    (folder / "new.safetensors").replace(folder / "model.safetensors")
    edit_json(folder / "config.json", {"quantization_config": quantization})
    return expected


STATIC = {"quant_method": "fp8", "activation_scheme": "static"}


@each_case(
    ("quantization", "dtype", "others", "inputs"),
    [
        (BLOCKS, ir.DataType.FLOAT, {}, "fp8 dynamic per group of 40"),
        (BLOCKS, ir.DataType.BFLOAT16, {}, "fp8 dynamic per group of 40"),
        ({**BLOCKS, "scale_fmt": "ue8m0"}, E8M0, {}, "fp8 dynamic per group of 40"),
        ({"quant_method": "fp8"}, ir.DataType.BFLOAT16, {}, "fp8 dynamic per token"),
        (STATIC, ir.DataType.BFLOAT16, {"activation": "activation_scale"}, "fp8 static per tensor"),
        (STATIC, ir.DataType.FLOAT, {"scale": "weight_scale", "activation": "input_scale"}, "fp8 static per tensor"),
    ],
    ids=["deepseek", "qwen", "e8m0", "per_tensor", "mistral", "auto_fp8"],
)
def test_weights_are_codes_times_scales_of_their_blocks(
    quantization: dict[str, Any], dtype: ir.DataType, others: dict[str, str], inputs: str, tmp_path: Path
) -> None:
    expected = checkpoint(tmp_path / "model", quantization, dtype, **others)
    opened = Checkpoint.open(tmp_path / "model")
    assert set(opened.encoded) == set(expected)
    assert all(np.array_equal(opened.encoded[name].dequantize(), weight) for name, weight in expected.items())
    assert {tensor.activations.words for tensor in opened.encoded.values() if tensor.activations} == {inputs}
    import_checkpoint(opened)
    assert [finding for finding in lint_checkpoint(tmp_path / "model") if finding.severity == "error"] == []


def test_fbgemm_fp8_has_one_scale_for_each_row(tmp_path: Path) -> None:
    rows = {"quant_method": "fp8", "weight_block_size": [1, 1 << 20]}
    expected = checkpoint(tmp_path / "model", rows, ir.DataType.FLOAT, scale="weight_scale")
    edit_json(tmp_path / "model/config.json", {"quantization_config": {"quant_method": "fbgemm_fp8"}})
    opened = Checkpoint.open(tmp_path / "model")
    assert set(opened.encoded) == set(expected)
    assert all(np.array_equal(opened.encoded[name].dequantize(), weight) for name, weight in expected.items())
    assert {tensor.activations.words for tensor in opened.encoded.values() if tensor.activations} == {
        "fp8 dynamic per token"
    }
    import_checkpoint(opened)
    assert transcode(tmp_path / "model", tmp_path / "out", "compressed-tensors").proof.equal


def test_blocks_survive_in_compressed_tensors(tmp_path: Path) -> None:
    checkpoint(tmp_path / "model", {**BLOCKS, "weight_block_size": [32, 32]}, ir.DataType.FLOAT)
    assert transcode(tmp_path / "model", tmp_path / "out", "compressed-tensors").proof.equal


@each_case(
    ("changes", "message"),
    [
        ({"weight_block_size": [64, 64]}, r"'weight_scale_inv' has the shape \[2, 2\]; fp8 needs"),
        ({"weight_block_size": 64}, r"weight_block_size is 64; it must be \[rows, columns\] of a block, or null"),
        ({"weight_block_size": ABSENT}, r"'weight_scale_inv' has the shape"),
        ({"fmt": "e5m2"}, "fmt is 'e5m2'; Ingot reads e4m3"),
        ({"expert_dtype": "fp4"}, "expert_dtype is 'fp4'; Ingot reads fp8"),
        ({"activation_scheme": "block"}, "activation_scheme is 'block'; it must be"),
    ],
)
def test_settings_that_do_not_fit_the_tensors_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    checkpoint(tmp_path / "model", BLOCKS, ir.DataType.FLOAT)
    values = {key: value for key, value in {**BLOCKS, **changes}.items() if value is not ABSENT}
    edit_json(tmp_path / "model/config.json", {"quantization_config": values})
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tmp_path / "model")


def test_a_layer_without_scales_is_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path / "model", BLOCKS, ir.DataType.FLOAT, scale="scale")
    with pytest.raises(CheckpointError, match="has no scales; fp8 needs one of weight_scale_inv and weight_scale"):
        Checkpoint.open(tmp_path / "model")


def test_transformers_reads_the_same_weights(tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    read = transformers.integrations.finegrained_fp8._dequantize_fp8_weight
    checkpoint(tmp_path / "model", BLOCKS, ir.DataType.FLOAT)
    for name, tensor in Checkpoint.open(tmp_path / "model").encoded.items():
        raw, scales = (torch.from_numpy(tensor.parts[leaf].array()) for leaf in ("weight", "weight_scale_inv"))
        expected = read(raw.view(torch.float8_e4m3fn), scales, BLOCKS["weight_block_size"], torch.float32)
        assert np.array_equal(tensor.dequantize(), expected.numpy()), name
