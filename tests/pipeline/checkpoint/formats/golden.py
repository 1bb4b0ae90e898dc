"""Checkpoints that other packages wrote, with the weights that those packages compute from them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from ingot.artifact.safetensors import read_header
from ingot.pipeline.checkpoint.formats.decoded import DecodedWeight, EncodedTensor, load
from ingot.pipeline.checkpoint.formats.quantized_folder import quantization_of, split_tensors
from tests.data_paths import shared_data
from tests.pipeline.checkpoint.formats.whole_fixture import FIXTURES

_PREFIXES = {
    "awq": ("autoawq-", "gptqmodel-awq"),
    "compressed-tensors": ("llmcompressor-",),
    "gguf": ("gguf-",),
    "gptq": ("autogptq-", "gptqmodel-gptq"),
}


def names_of(method: str) -> tuple[str, ...]:
    """The checkpoints of a quantization method."""
    return tuple(name for name in FIXTURES if name.startswith(_PREFIXES[method]))


assert sum(len(names_of(method)) for method in _PREFIXES) == len(FIXTURES), "each fixture belongs to one method"


def golden(name: str) -> Path:
    """The folder of a checkpoint."""
    return shared_data(f"golden/quantized/{name}")


def reference(folder: Path) -> Mapping[str, np.ndarray]:
    """The package's float32 weights, or exact arithmetic on its codes if the package computes in 16 bits."""
    exact = folder / "expected_fp32.safetensors"
    return load_file(exact if exact.is_file() else folder / "reference.safetensors")


def encoded(folder: Path) -> Mapping[str, EncodedTensor]:
    """The quantized weights of a folder."""
    quantization = quantization_of(folder, json.loads((folder / "config.json").read_text()))
    assert quantization is not None
    return split_tensors(read_header(folder / "model.safetensors"), quantization, str(folder))[1]


def assert_decodes_to_the_packages_weights(name: str) -> None:
    """Compare every weight bit for bit."""
    expected, found = reference(golden(name)), encoded(golden(name))
    assert set(found) == set(expected)
    for key, tensor in found.items():
        weight = tensor.dequantize()
        assert tensor.shape == expected[key].shape
        assert np.array_equal(weight, expected[key]), f"{key} differs by {np.abs(weight - expected[key]).max()}"


def assert_differs_only_by_rounding(name: str) -> None:
    """Compare every weight with what the package computes in 16 bits."""
    package = load_file(golden(name) / "package_dequant.safetensors")
    for key, tensor in encoded(golden(name)).items():
        largest = float(np.abs(package[key]).max())
        assert float(np.abs(tensor.dequantize() - package[key]).max()) < 4e-3 * largest


def decoded_layers(name: str) -> list[tuple[DecodedWeight, Mapping[str, Any]]]:
    """Each quantized layer, decoded, and all tensors that the package stored for it, by leaf name."""
    folder = golden(name)
    stored = {key: load(tensor) for key, tensor in read_header(folder / "model.safetensors").items()}
    layers: list[tuple[DecodedWeight, Mapping[str, Any]]] = []
    for key, tensor in encoded(folder).items():
        weight, module = tensor.read(), key.removesuffix("weight")
        assert isinstance(weight, DecodedWeight)
        leaves = {full.removeprefix(module): array for full, array in stored.items() if full.startswith(module)}
        layers.append((weight, leaves))
    assert layers
    return layers


def assert_stored(made: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    """Compare encoded tensors with those that the package stored."""
    for leaf, array in made.items():
        assert np.array_equal(array, stored[leaf]), leaf
