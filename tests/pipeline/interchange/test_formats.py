"""The table of formats: names, and the formats that hold given weights."""

from pathlib import Path

import pytest

from ingot.errors import UsageError
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.interchange.folder import AS_IT_IS, Source, WriteOptions
from ingot.pipeline.interchange.formats import CHECKPOINT_FORMATS, FORMATS, formats_that_hold, get_format
from ingot.pipeline.interchange.weight_sources import weights_of_checkpoint
from tests.pipeline.checkpoint.formats.tiny_model import assert_export_refused, exported


def source_of(folder: Path) -> Source:
    checkpoint = Checkpoint.open(folder)
    return Source(checkpoint, weights_of_checkpoint(checkpoint).weights)


def test_an_unknown_name_is_refused_with_the_allowed_ones(tmp_path: Path) -> None:
    assert_export_refused(tmp_path, "ggml", "unknown format 'ggml'")
    with pytest.raises(UsageError, match=r"unknown format 'onnx'; formats: awq, compressed-tensors, gguf"):
        get_format("onnx", CHECKPOINT_FORMATS)
    assert get_format("onnx") is FORMATS["onnx"]


def test_formats_that_hold_weights_depend_on_the_options(tmp_path: Path) -> None:
    names = [name for name in CHECKPOINT_FORMATS if not FORMATS[name].variant_of]
    source = source_of(exported(tmp_path, "compressed-tensors", bits=3, symmetric=True))
    assert formats_that_hold(source, AS_IT_IS, names) == ["gptq", "compressed-tensors", "safetensors"]
    wider = formats_that_hold(source, WriteOptions(widen=True), names)
    assert wider == ["gptq", "awq", "compressed-tensors", "safetensors", "gguf"]
