"""AWQ: the layout of its tensors, layers in floats, and a refusal."""

import json
from pathlib import Path

from safetensors.numpy import load_file

from tests.pipeline.checkpoint.formats.tiny_model import HIDDEN, INNER, assert_export_refused, exported


def test_other_widths_than_4_bits_are_refused(tmp_path: Path) -> None:
    message = "awq holds only 4 bits, but .* 8 bits asymmetric in blocks of 32; set bits to 4"
    assert_export_refused(tmp_path, "awq", message, bits=8)


def test_tensors_have_the_gemm_layout_and_the_config_lists_layers_in_floats(tmp_path: Path) -> None:
    folder = exported(tmp_path, "awq", overrides={"*.1.mlp.up_proj": "none"})
    tensors = load_file(folder / "model.safetensors")
    layer = "model.layers.0.mlp.down_proj"  # [HIDDEN, INNER], eight codes per word along the rows
    shapes = {leaf: tensors[f"{layer}.{leaf}"].shape for leaf in ("qweight", "qzeros", "scales")}
    groups = INNER // 32
    assert shapes == {"qweight": (INNER, HIDDEN // 8), "qzeros": (groups, HIDDEN // 8), "scales": (groups, HIDDEN)}
    quantization = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert (quantization["bits"], quantization["group_size"], quantization["version"]) == (4, 32, "gemm")
    assert set(quantization["modules_to_not_convert"]) == {"model.layers.1.mlp.up_proj", "lm_head"}
