"""Checkpoints written by other tools decode to the weights that those tools compute from them, bit for bit."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from ingot.artifact.safetensors import read_header
from ingot.pipeline.checkpoint.formats import awq, compressed_tensors, gptq
from ingot.pipeline.checkpoint.formats.decoded import DecodedWeight, EncodedTensor, load
from ingot.pipeline.checkpoint.formats.gguf_blocks import BLOCK_TYPES, decode_rows, encode_rows
from ingot.pipeline.checkpoint.formats.quantized_folder import quantization_of, split_tensors
from ingot.pipeline.checkpoint.gguf_file import read_gguf
from tests.data_paths import shared_data
from tests.pipeline.checkpoint.formats.whole_fixture import FIXTURES

FOLDERS = tuple(name for name in FIXTURES if not name.startswith("gguf-"))
GGUF_FOLDERS = tuple(name.removeprefix("gguf-") for name in FIXTURES if name.startswith("gguf-"))


def reference(folder: Path) -> Mapping[str, np.ndarray]:
    """The package's float32 weights, or exact arithmetic on its codes if the package computes in 16 bits."""
    exact = folder / "expected_fp32.safetensors"
    return load_file(exact if exact.is_file() else folder / "reference.safetensors")


def encoded(folder: Path) -> Mapping[str, EncodedTensor]:
    quantization = quantization_of(folder, json.loads((folder / "config.json").read_text()))
    assert quantization is not None
    return split_tensors(read_header(folder / "model.safetensors"), quantization, str(folder))[1]


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_decodes_to_the_packages_weights(name: str) -> None:
    folder = shared_data(f"golden/quantized/{name}")
    expected, found = reference(folder), encoded(folder)
    assert set(found) == set(expected)
    for key, tensor in found.items():
        weight = tensor.dequantize()
        assert tensor.shape == expected[key].shape
        assert np.array_equal(weight, expected[key]), f"{key} differs by {np.abs(weight - expected[key]).max()}"


@pytest.mark.parametrize("name", GGUF_FOLDERS)
def test_a_gguf_file_decodes_to_the_packages_weights(name: str) -> None:
    folder = shared_data(f"golden/quantized/gguf-{name}")
    file, expected = read_gguf(folder / "model.gguf"), reference(folder)
    assert set(expected) <= set(file.tensors)
    for key, expected_weight in expected.items():
        tensor = file.tensors[key]
        raw = np.fromfile(file.path, np.uint8, tensor.num_bytes, offset=tensor.offset)
        weight = decode_rows(raw, BLOCK_TYPES[tensor.type_id], *tensor.shape).dequantize()
        assert np.array_equal(weight, expected_weight), f"{key} differs by {np.abs(weight - expected_weight).max()}"


@pytest.mark.parametrize("name", ["gptqmodel-awq_gemm-w4-asym", "gptqmodel-gptq_v1-w4-sym", "llmcompressor-nvfp4a16"])
def test_packages_that_compute_in_sixteen_bits_differ_only_by_rounding(name: str) -> None:
    folder = shared_data(f"golden/quantized/{name}")
    package = load_file(folder / "package_dequant.safetensors")
    for key, tensor in encoded(folder).items():
        largest = float(np.abs(package[key]).max())
        assert float(np.abs(tensor.dequantize() - package[key]).max()) < 4e-3 * largest


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("autogptq-w3-asym", 3),
        ("autogptq-w4-asym", 4),
        ("autogptq-w4-sym-descact", 4),
        ("autoawq-gemm-w4-asym", 4),
        ("llmcompressor-gptq-w4-asym", 4),
        ("llmcompressor-w8a16", 8),
    ],
)
def test_a_decoded_layer_encodes_to_the_packages_own_tensors(name: str, bits: int) -> None:
    folder = shared_data(f"golden/quantized/{name}")
    stored = {key: load(tensor) for key, tensor in read_header(folder / "model.safetensors").items()}
    for key, tensor in encoded(folder).items():
        weight = tensor.read()
        assert isinstance(weight, DecodedWeight)
        if "gptq-" in name and name.startswith("auto"):
            made = gptq.encode(weight, bits, version=1)
        elif "awq" in name:
            made = awq.encode(weight)
        else:
            made = compressed_tensors.encode(weight, bits)
        for leaf, array in made.items():
            assert np.array_equal(array, stored[f"{key.removesuffix('.weight')}.{leaf}"]), leaf


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0"])
def test_decoded_gguf_blocks_encode_to_the_packages_own_bytes(name: str) -> None:
    file = read_gguf(shared_data(f"golden/quantized/gguf-{name}") / "model.gguf")
    blocks = [tensor for tensor in file.tensors.values() if tensor.type_id in BLOCK_TYPES]
    assert blocks
    for tensor in blocks:
        raw = np.fromfile(file.path, np.uint8, tensor.num_bytes, offset=tensor.offset)
        kind = BLOCK_TYPES[tensor.type_id]
        weight = decode_rows(raw, kind, *tensor.shape)
        assert np.array_equal(encode_rows(weight, kind.name).reshape(-1), raw)
