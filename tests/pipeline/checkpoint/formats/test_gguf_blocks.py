"""GGUF's blocks decode to the weights that other packages compute from them, and encode to the packages' own bytes."""

import numpy as np
import pytest

from ingot.pipeline.checkpoint.formats.gguf_blocks import BLOCK_TYPES, decode_rows, encode_rows
from ingot.pipeline.checkpoint.gguf_file import read_gguf
from tests.each_case import each_case
from tests.pipeline.checkpoint.formats.golden import golden, names_of, reference


@each_case("name", names_of("gguf"))
def test_a_gguf_file_decodes_to_the_packages_weights(name: str) -> None:
    file, expected = read_gguf(golden(name) / "model.gguf"), reference(golden(name))
    assert set(expected) <= set(file.tensors)
    for key, expected_weight in expected.items():
        tensor = file.tensors[key]
        raw = np.fromfile(file.path, np.uint8, tensor.num_bytes, offset=tensor.offset)
        weight = decode_rows(raw, BLOCK_TYPES[tensor.type_id], *tensor.shape).dequantize()
        assert np.array_equal(weight, expected_weight), f"{key} differs by {np.abs(weight - expected_weight).max()}"


@pytest.mark.parametrize("name", ["gguf-Q4_0", "gguf-Q4_1", "gguf-Q8_0"])
def test_decoded_gguf_blocks_encode_to_the_packages_own_bytes(name: str) -> None:
    file = read_gguf(golden(name) / "model.gguf")
    blocks = [tensor for tensor in file.tensors.values() if tensor.type_id in BLOCK_TYPES]
    assert blocks
    for tensor in blocks:
        raw = np.fromfile(file.path, np.uint8, tensor.num_bytes, offset=tensor.offset)
        kind = BLOCK_TYPES[tensor.type_id]
        weight = decode_rows(raw, kind, *tensor.shape)
        assert np.array_equal(encode_rows(weight, kind.name).reshape(-1), raw)
