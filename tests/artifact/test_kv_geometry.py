"""The layout of a KV block: sizes, offsets and strides, with and without scales."""

import numpy as np
import pytest
from pydantic import ValidationError

from ingot.artifact import KVGeometry
from ingot.artifact.kv_geometry import KVType


def geometry(dtype: KVType = "float32") -> KVGeometry:
    return KVGeometry(num_layers=3, num_kv_heads=2, head_dim=8, block_tokens=5, dtype=dtype)


VECTORS = 3 * 2 * 2 * 5  # layers, keys and values, heads, tokens


@pytest.mark.parametrize(
    ("dtype", "code_bytes", "scale_bytes"),
    [
        ("float32", VECTORS * 8 * 4, 0),
        ("bfloat16", VECTORS * 8 * 2, 0),
        ("fp8", VECTORS * 8, 128),  # 60 float16 scales take 120 bytes, padded to 128
        ("int4", VECTORS * 4, 128),
    ],
)
def test_a_block_has_the_bytes_of_its_vectors_and_padded_scales(
    dtype: KVType, code_bytes: int, scale_bytes: int
) -> None:
    made = geometry(dtype)
    assert (made.code_bytes, made.block_bytes) == (code_bytes, code_bytes + scale_bytes)
    assert made.is_quantized == (scale_bytes > 0)


@pytest.mark.parametrize("dtype", ["float32", "int4"])
def test_offsets_and_strides_are_those_of_an_array_of_the_blocks_shape(dtype: KVType) -> None:
    made = geometry(dtype)
    block = np.zeros(made.block_shape)
    strides = [stride // block.itemsize for stride in block.strides]
    assert [made.pool_offset(layer) for layer in range(3)] == [layer * strides[0] for layer in range(3)]
    named = made.strides()
    assert (named["value_offset"], named["head_stride"]) == (strides[1], strides[2])
    assert named["block_stride"] * made.element_bytes == made.block_bytes


def test_scales_follow_the_codes_in_the_same_order() -> None:
    made = geometry("int8")
    scales = np.zeros(made.block_shape[:-1])
    strides = [stride // scales.itemsize for stride in scales.strides]
    assert [2 * made.scale_offset(layer) for layer in range(3)] == [
        made.code_bytes + 2 * layer * strides[0] for layer in range(3)
    ]
    assert made.strides()["scale_value_offset"] == strides[1]
    assert 2 * made.strides()["scale_block_stride"] == made.block_bytes


@pytest.mark.parametrize("change", [{"num_layers": 0}, {"head_dim": -8}, {"dtype": "int3"}, {"layout": "rows"}])
def test_impossible_sizes_unknown_types_and_unknown_fields_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(change))):
        KVGeometry.model_validate({"num_layers": 3, "num_kv_heads": 2, "head_dim": 8, **change})
