"""A folder is written whole or not at all; configuration and lazy tensors of its weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from ingot.errors import BuildError, UsageError
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.formats.decoded import DecodedWeight
from ingot.pipeline.interchange.folder import (
    AS_IT_IS,
    Layout,
    Source,
    WriteOptions,
    config_of,
    layer_tensors,
    new_folder,
)
from ingot.pipeline.interchange.layers import PlainWeight, QuantizedLayer, facts_of
from tests.data_paths import FIXTURES

CODES = DecodedWeight(np.arange(8, dtype=np.uint8).reshape(2, 4), np.ones((2, 1), np.float32), 4, bits=4)


def layer(name: str) -> QuantizedLayer:
    return QuantizedLayer(f"{name}.weight", facts_of(CODES), lambda: CODES)


def plain(name: str) -> PlainWeight:
    return PlainWeight(f"{name}.weight", ir.Tensor(np.zeros(4, np.float32)))


def test_a_folder_appears_after_the_block(tmp_path: Path) -> None:
    target = tmp_path / "new" / "out"
    with new_folder(target) as folder:
        (folder / "file").write_text("content")
        assert not target.exists()
    assert [file.name for file in target.iterdir()] == ["file"]
    assert [entry.name for entry in target.parent.iterdir()] == ["out"]


def test_an_error_in_the_block_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "out") as folder:
        (folder / "file").write_text("content")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_is_filled_and_any_other_target_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with new_folder(tmp_path / "empty") as folder:
        (folder / "file").touch()
    with pytest.raises(UsageError, match="exists already, and is not replaced"), new_folder(tmp_path / "empty"):
        pass
    with pytest.raises(BuildError, match="cannot write there"), new_folder(tmp_path / "empty" / "file" / "out"):
        pass


def test_the_config_unties_a_head_with_its_own_tensor_and_names_the_type_of_floats() -> None:
    checkpoint = Checkpoint.open(FIXTURES / "checkpoints" / "llama-tied-biases")
    tied = config_of(Source(checkpoint, [plain("model.embed_tokens")]), AS_IT_IS)
    assert tied == checkpoint.config
    both = Source(checkpoint, [plain("model.embed_tokens"), plain("lm_head")])
    assert config_of(both, AS_IT_IS, {"bits": 4}) == {
        **checkpoint.config,
        "tie_word_embeddings": False,
        "quantization_config": {"bits": 4},
    }
    dequantized = Source(checkpoint, [layer("model.layers.0.mlp.up_proj")])
    assert config_of(dequantized, WriteOptions(put_dtype=True))["dtype"] == "float32"
    narrow = WriteOptions(dtype=ir.DataType.BFLOAT16, put_dtype=True)
    assert config_of(both, narrow)["torch_dtype"] == "bfloat16"


def test_a_layer_is_encoded_once_for_all_its_tensors_when_they_are_written() -> None:
    encoded: list[str] = []

    def encode(one: QuantizedLayer) -> Mapping[str, NDArray[Any]]:
        encoded.append(one.name)
        return {"codes": one.read().codes, "scales": one.read().scales}

    def layout(one: QuantizedLayer) -> Layout:
        return {"codes": (ir.DataType.UINT8, one.shape), "scales": (ir.DataType.FLOAT, (2, 1))}

    tensors = layer_tensors([plain("norm"), layer("a"), layer("b")], layout, encode)
    assert [name for name, _ in tensors] == ["norm.weight", "a.codes", "a.scales", "b.codes", "b.scales"]
    assert encoded == []
    contents = {name: tensor.numpy() for name, tensor in tensors}
    assert encoded == ["a.weight", "b.weight"]
    assert np.array_equal(contents["b.codes"], CODES.codes)
