"""quant_method bitnet: four rows of -1, 0 and 1 in a byte, and one scale a layer."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from ingot.errors import CheckpointError
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.safetensors_writer import write_weights
from ingot.pipeline.interchange.lint import lint_checkpoint
from ingot.pipeline.interchange.transcode import transcode
from ingot.pipeline.model.importer import import_checkpoint
from tests.each_case import each_case
from tests.pipeline.checkpoint.formats.tiny_model import LAYERS, SHAPES, tiny_checkpoint
from tests.pipeline.tiny_checkpoint import edit_json

MODULES = [f"model.layers.{n}.{name}" for n in range(LAYERS) for name in SHAPES]
SCALE = np.float32(0.8)


def checkpoint(folder: Path, quantization: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """Write a tiny llama, and return its codes. changed: leaf of the first layer -> its values."""
    tiny_checkpoint(folder)
    opened, rng = Checkpoint.open(folder), np.random.default_rng(3)
    tensors = [(name, opened.external(name)) for name in opened.tensors if name.removesuffix(".weight") not in MODULES]
    codes = {}
    for module in MODULES:
        rows, columns = SHAPES[module.split(".", 3)[3]]
        codes[f"{module}.weight"] = weight = rng.integers(-1, 2, (rows, columns))
        packed = np.zeros((rows // 4, columns), np.uint8)
        for row in range(rows):
            packed[row % (rows // 4)] |= (weight[row] + 1).astype(np.uint8) << (2 * (row // (rows // 4)))
        leaves: dict[str, Any] = {"weight": packed, "weight_scale": np.array([SCALE], np.float32)}
        leaves.update(changed if module == MODULES[0] else {})
        tensors += [(f"{module}.{leaf}", ir.Tensor(value)) for leaf, value in leaves.items()]
    write_weights(folder / "new.safetensors", tensors, padded=False)
    (folder / "new.safetensors").replace(folder / "model.safetensors")
    edit_json(folder / "config.json", {"quantization_config": {"quant_method": "bitnet", **quantization}})
    return codes


@each_case(
    ("quantization", "factor"),
    [({}, np.float32(1) / SCALE), ({"linear_class": "autobitlinear", "quantization_mode": "offline"}, SCALE)],
    ids=["bitlinear", "autobitlinear"],
)
def test_weights_are_codes_by_the_scale_of_their_layer(
    quantization: dict[str, Any], factor: np.float32, tmp_path: Path
) -> None:
    codes = checkpoint(tmp_path / "model", quantization)
    opened = Checkpoint.open(tmp_path / "model")
    assert set(opened.encoded) == set(codes)
    for name, weight in codes.items():
        assert np.array_equal(opened.encoded[name].dequantize(), weight.astype(np.float32) * factor)
    assert {tensor.activations.words for tensor in opened.encoded.values() if tensor.activations} == {
        "int8 dynamic per token"
    }
    import_checkpoint(opened)
    assert [finding for finding in lint_checkpoint(tmp_path / "model") if finding.severity == "error"] == []
    assert transcode(tmp_path / "model", tmp_path / "out", "compressed-tensors").proof.equal


@each_case(
    ("changed", "message"),
    [
        ({"weight": np.full((SHAPES[MODULES[0].split(".", 3)[3]][0] // 4, 1), 0xFF, np.uint8)}, "a code is 3"),
        ({"weight_scale": np.array([0], np.float32)}, "weight_scale is 0"),
        ({"weight_scale": np.array([np.nan], np.float32)}, "scales are NaN or infinite"),
    ],
)
def test_damaged_layers_are_refused_by_name(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    checkpoint(tmp_path / "model", {}, **changed)
    with pytest.raises(CheckpointError, match=rf"{MODULES[0]}.weight.*{message}"):
        Checkpoint.open(tmp_path / "model").encoded[f"{MODULES[0]}.weight"].read()


def test_norms_of_the_method_are_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path / "model", {"use_rms_norm": True})
    with pytest.raises(CheckpointError, match="use_rms_norm is True; norms in front of every layer are not read"):
        Checkpoint.open(tmp_path / "model")
