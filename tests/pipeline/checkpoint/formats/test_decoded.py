"""Decoded weights: the formula of their values, reordered rows, and refusals of damaged tensors."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from ingot.artifact.safetensors import StoredTensor
from ingot.errors import CheckpointError
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.formats.decoded import DecodedWeight, EncodedTensor, load
from ingot.pipeline.model.importer import import_checkpoint
from tests.pipeline.checkpoint.formats.refusals import LAYER
from tests.pipeline.checkpoint.formats.tiny_model import exported
from tests.pipeline.tiny_checkpoint import edit_tensors


def test_scales_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    folder = exported(tmp_path, "awq")
    scales = load_file(folder / "model.safetensors")[f"{LAYER}.scales"]
    scales[1, 3] = np.nan
    edit_tensors(folder, {f"{LAYER}.scales": scales})
    with pytest.raises(CheckpointError, match=rf"'{LAYER}.weight': 1 of its 192 scales are NaN or infinite"):
        import_checkpoint(Checkpoint.open(folder))


def weight(**changes: Any) -> DecodedWeight:
    """Two rows of five columns in groups of two, the last of one column."""
    parts: dict[str, Any] = {
        "codes": np.array([[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]], np.uint8),
        "scales": np.array([[1, 2, 4], [0.5, 1, 2]], np.float32),
        "group_size": 2,
    }
    return DecodedWeight(**{**parts, **changes})


def test_each_column_has_the_scale_zero_point_and_offset_of_its_group() -> None:
    points, offsets = np.array([[1, 1, 1], [5, 5, 5]], np.int16), np.array([[10, 20, 30]] * 2, np.float32)
    found = weight(zero_points=points, offsets=offsets).dequantize()
    assert found.tolist() == [[9, 10, 22, 24, 42], [10, 10.5, 22, 23, 38]]


def test_activation_order_names_the_group_of_each_column() -> None:
    order = np.array([2, 0, 1, 0, 1], np.int32)
    assert weight(g_idx=order).dequantize().tolist() == [[0, 1, 4, 3, 8], [10, 3, 7, 4, 9]]
    assert weight(g_idx=order).without_trivial_order().g_idx is order
    assert weight(g_idx=np.array([0, 0, 1, 1, 2], np.int32)).without_trivial_order().g_idx is None


def test_rows_are_reordered_with_all_their_parts() -> None:
    made = weight(zero_points=np.array([[1, 2, 3], [4, 5, 6]], np.int16), offsets=np.eye(2, 3, dtype=np.float32))
    swapped = made.rows_in_order(np.array([1, 0]))
    assert np.array_equal(swapped.dequantize(), made.dequantize()[::-1])


def read(content: Any, shape: tuple[int, ...] = (2, 5)) -> Any:
    def decode() -> Any:
        if isinstance(content, Exception):
            raise content
        return content

    return EncodedTensor("w", shape, Path("model.safetensors"), decode).read()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (ValueError("has no scales"), "'w': has no scales; the checkpoint is damaged"),
        (np.ones((2, 4), np.float32), r"'w' decodes to \[2, 4\], not \[2, 5\]"),
        (np.full((2, 5), np.inf, np.float32), "'w': 10 of its 10 values are NaN or infinite"),
        (weight(offsets=np.full((2, 3), np.nan, np.float32)), "'w': 6 of its 6 offsets are NaN or infinite"),
        (weight(codes=np.full((2, 5), np.nan, np.float32)), "'w': 10 of its 10 codes are NaN or infinite"),
    ],
)
def test_a_damaged_weight_is_refused_by_name(content: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^model\.safetensors: {message}"):
        read(content)


def test_an_array_in_an_unknown_data_type_is_refused(tmp_path: Path) -> None:
    stored = StoredTensor("w", "F8_E5M2", (4,), tmp_path / "model.safetensors", 0, 4)
    with pytest.raises(CheckpointError, match=r"'w' is F8_E5M2; quantized checkpoints are read with F64, F32"):
        load(stored)
