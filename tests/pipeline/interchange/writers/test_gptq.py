"""GPTQ: versions of zero points, and refusals."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from ingot.pipeline.interchange.transcode import transcode
from tests.pipeline.checkpoint.formats.tiny_model import (
    assert_export_refused,
    exported,
)
from tests.pipeline.checkpoint.formats.whole_fixture import whole_checkpoint


@pytest.mark.parametrize(
    ("name", "version"), [("autogptq-w4-sym", "gptq"), ("autogptq-w4-asym", "gptq_v2"), ("autogptq-w3-asym", "gptq_v2")]
)
def test_asymmetric_weights_are_written_as_version_2_and_symmetric_ones_as_1(
    name: str, version: str, tmp_path: Path
) -> None:
    source = whole_checkpoint(name, tmp_path / "model")
    folder = transcode(source, tmp_path / "out", "gptq").folder
    assert json.loads((folder / "quantize_config.json").read_text())["checkpoint_format"] == version


def test_a_layer_in_floats_is_refused(tmp_path: Path) -> None:
    message = "gptq quantizes every linear layer, but .*down_proj is in"
    assert_export_refused(tmp_path, "gptq", message, overrides={"*.down_proj": "none"})


def test_version_1_stores_zero_points_one_lower(tmp_path: Path) -> None:
    folder = exported(tmp_path, "gptq")
    first, second = (transcode(folder, tmp_path / f"v{n}", f"gptq-v{n}").folder for n in (1, 2))
    name = "model.layers.0.mlp.down_proj.qzeros"
    stored = [load_file(path / "model.safetensors")[name].view(np.uint32) for path in (first, second)]
    nibbles = [np.stack([(words >> np.uint32(4 * at)) & np.uint32(15) for at in range(8)]) for words in stored]
    assert np.array_equal(nibbles[0] + 1, nibbles[1])
