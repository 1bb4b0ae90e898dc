"""compressed-tensors with quantized inputs: storage format, scales, refusals."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from ingot.errors import UsageError
from ingot.passes.manager import PassManager
from ingot.passes.numerics.activation_rounding import ActivationScheme
from ingot.passes.quantization.activation_nodes import ACTIVATIONS_KEY, insert_activation_quantization
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.interchange.export import export_checkpoint
from ingot.pipeline.interchange.folder import Source
from ingot.pipeline.interchange.transcode import transcode
from ingot.pipeline.interchange.weight_sources import weights_of_model
from ingot.pipeline.interchange.writers import compressed_tensors
from ingot.pipeline.model.importer import import_checkpoint
from tests.each_case import each_case
from tests.pipeline.checkpoint.formats.tiny_model import quantize, recipe, tiny_checkpoint
from tests.pipeline.checkpoint.formats.whole_fixture import FIXTURES, whole_checkpoint
from tests.pipeline.interchange.test_export import dequantized, in_ir

W8A8: list[str | dict[str, Any]] = [
    quantize(bits=8, block_size="channel", symmetric=True),
    {"quantize-activations": {"mode": "dynamic"}},
]


@pytest.mark.parametrize(
    ("passes", "storage", "inputs"),
    [
        (W8A8, "int-quantized", ("int", "token", True)),
        ([{"fp8": {"activations": "dynamic"}}], "float-quantized", ("float", "token", True)),
        ([{"fp8": {"weights": "tensor", "activations": "none"}}], "float-quantized", None),
    ],
)
def test_eight_bit_weights_and_inputs_are_compressed_tensors(
    passes: list[str | dict[str, Any]], storage: str, inputs: tuple[str, str, bool] | None, tmp_path: Path
) -> None:
    made = recipe(tmp_path, tiny_checkpoint(tmp_path / "model"), *passes)
    folder = export_checkpoint(made, tmp_path / "out", "compressed-tensors")
    model = import_checkpoint(Checkpoint.open(tmp_path / "model"))
    PassManager(made.make_passes()).run(model)
    expected, found = in_ir(model), dequantized(Checkpoint.open(folder))
    assert all(np.array_equal(found[key], expected[key]) for key in expected)

    group = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    inputs_config = group["input_activations"]
    assert group["format"] == storage
    assert (inputs_config and (inputs_config["type"], inputs_config["strategy"], inputs_config["dynamic"])) == inputs


def source_of(model: ir.Model, folder: Path) -> Source:
    """The weights of a quantized model, to be written."""
    checkpoint = Checkpoint.open(folder)
    return Source(checkpoint, list(weights_of_model(model, checkpoint.shapes).values()))


def test_a_static_scale_of_inputs_is_a_tensor_of_its_layer(tmp_path: Path) -> None:
    made = recipe(tmp_path, tiny_checkpoint(tmp_path / "model"), W8A8[0])
    model = import_checkpoint(Checkpoint.open(tmp_path / "model"))
    PassManager(made.make_passes()).run(model)
    layer = next(node for node in model.graph if node.name == "layers.1.mlp.up_proj")
    source = layer.inputs[0]
    assert source is not None
    insert_activation_quantization(model.graph, source, [layer], ActivationScheme("int", 0.125))
    export = compressed_tensors.plan(source_of(model, tmp_path / "model"))
    tensors = dict(export.tensors)
    assert tensors["model.layers.1.mlp.up_proj.input_scale"].numpy().tolist() == [0.125]
    assert tensors["model.layers.1.mlp.up_proj.weight"].dtype == ir.DataType.INT8
    assert "model.layers.0.mlp.up_proj.weight_packed" in tensors
    assert export.quantization is not None
    assert export.quantization["format"] == "mixed-precision"


def test_inputs_with_outlier_channels_are_refused(tmp_path: Path) -> None:
    made = recipe(tmp_path, tiny_checkpoint(tmp_path / "model"), *W8A8)
    model = import_checkpoint(Checkpoint.open(tmp_path / "model"))
    PassManager(made.make_passes()).run(model)
    for node in model.graph:
        if ACTIVATIONS_KEY in node.metadata_props:
            facts = json.loads(node.metadata_props[ACTIVATIONS_KEY])
            node.metadata_props[ACTIVATIONS_KEY] = json.dumps({**facts, "outliers": 3})
    written = source_of(model, tmp_path / "model")
    with pytest.raises(UsageError, match="keeps 3 channels in floats; set outliers to 0"):
        compressed_tensors.plan(written)


@each_case("name", [name for name in FIXTURES if name.startswith("llmcompressor")])
def test_compressed_tensors_config_equals_the_packages(name: str, tmp_path: Path) -> None:
    source = whole_checkpoint(name, tmp_path / "model")
    folder = transcode(source, tmp_path / "out", "compressed-tensors").folder
    before, after = (json.loads((path / "config.json").read_text()) for path in (source, folder))
    here, there = before["quantization_config"], after["quantization_config"]
    assert (there["format"], there["ignore"]) == (here["format"], here["ignore"])
    assert (there["kv_cache_scheme"] or None) == (here["kv_cache_scheme"] or None)
    ours, theirs = there["config_groups"]["group_0"], here["config_groups"]["group_0"]
    for part in ("weights", "input_activations"):
        for key in ("num_bits", "type", "symmetric", "strategy", "group_size", "dynamic"):
            assert (ours[part] or {}).get(key) == (theirs[part] or {}).get(key), (part, key)
