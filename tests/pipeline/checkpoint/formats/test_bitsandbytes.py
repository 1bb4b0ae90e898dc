"""quant_method bitsandbytes: blocks of 4 bits along all numbers of a weight, with one or two levels of factors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from ingot.errors import CheckpointError
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.safetensors_writer import write_weights
from ingot.pipeline.interchange.lint import lint_checkpoint
from ingot.pipeline.interchange.transcode import transcode
from ingot.pipeline.model.importer import import_checkpoint
from tests.each_case import each_case
from tests.pipeline.checkpoint.formats.tiny_model import LAYERS, SHAPES, tiny_checkpoint
from tests.pipeline.tiny_checkpoint import edit_json

MODULES = [f"model.layers.{n}.{name}" for n in range(LAYERS) for name in SHAPES]
NF4: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
DOUBLE = {**NF4, "bnb_4bit_use_double_quant": True}
INT8: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
STATE = "quant_state.bitsandbytes__nf4"
NESTED = 8  # factors that share one of the second level
Leaves = dict[str, np.ndarray[Any, Any]]


def four_bits(rng: np.random.Generator, shape: tuple[int, int], block: int, double: bool) -> tuple[Leaves, Any]:
    """The tensors of a layer, and its weight, number by number."""
    count = shape[0] * shape[1]
    blocks = -(-count // block)
    codes = rng.integers(0, 16, count + count % 2)
    numbers = np.sort(rng.uniform(-1, 1, 16)).astype(np.float32)
    factors = rng.uniform(0.5, 2, blocks).astype(np.float32)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": "float32", "shape": list(shape)}
    leaves: Leaves = {
        "weight": (codes[0::2] << 4 | codes[1::2]).astype(np.uint8)[:, None],
        "weight.quant_map": numbers,
        "weight.absmax": factors,
    }
    if double:
        codes_of_factors = rng.integers(0, 256, blocks).astype(np.uint8)
        steps = np.linspace(-1, 1, 256).astype(np.float32)
        second = rng.uniform(0.5, 2, -(-blocks // NESTED)).astype(np.float32)
        leaves |= {"weight.absmax": codes_of_factors, "weight.nested_absmax": second, "weight.nested_quant_map": steps}
        state |= {"nested_blocksize": NESTED, "nested_dtype": "float32", "nested_offset": 1.5}
        factors = np.array(
            [steps[code] * second[n // NESTED] + np.float32(1.5) for n, code in enumerate(codes_of_factors)], np.float32
        )
    leaves[f"weight.{STATE}"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    weight = np.array([numbers[codes[n]] * factors[n // block] for n in range(count)], np.float32)
    return leaves, weight.reshape(shape)


def eight_bits(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[Leaves, Any]:
    codes = rng.integers(-127, 128, shape).astype(np.int8)
    largest = rng.uniform(0.5, 2, shape[0]).astype(np.float32)
    leaves: Leaves = {"weight": codes, "SCB": largest, "weight_format": np.array(0, np.uint8)}
    return leaves, codes * (largest / np.float32(127))[:, None]


def checkpoint(folder: Path, quantization: dict[str, Any], block: int = 64, **changed: Any) -> dict[str, Any]:
    """Write a tiny llama, and return its weights. changed: leaf of the first layer -> its values, None to drop it."""
    tiny_checkpoint(folder)
    opened, rng = Checkpoint.open(folder), np.random.default_rng(3)
    tensors = [(name, opened.external(name)) for name in opened.tensors if name.removesuffix(".weight") not in MODULES]
    expected = {}
    for module in MODULES:
        shape = SHAPES[module.split(".", 3)[3]]
        double = bool(quantization.get("bnb_4bit_use_double_quant"))
        made = eight_bits(rng, shape) if "load_in_8bit" in quantization else four_bits(rng, shape, block, double)
        leaves, expected[f"{module}.weight"] = made
        if module == MODULES[0]:
            leaves.update(changed)
        tensors += [(f"{module}.{leaf}", ir.Tensor(value)) for leaf, value in leaves.items() if value is not None]
    write_weights(folder / "new.safetensors", tensors, padded=False)
    (folder / "new.safetensors").replace(folder / "model.safetensors")
    edit_json(folder / "config.json", {"quantization_config": quantization})
    return expected


@each_case(
    ("quantization", "block"), [(NF4, 64), (NF4, 48), (DOUBLE, 64), (DOUBLE, 7), (INT8, 0)],
    ids=["nf4", "blocks_over_rows", "double", "odd_blocks", "int8"],
)  # fmt: skip
def test_weights_are_the_numbers_of_codes_times_the_factors_of_their_blocks(
    quantization: dict[str, Any], block: int, tmp_path: Path
) -> None:
    expected = checkpoint(tmp_path / "model", quantization, block)
    opened = Checkpoint.open(tmp_path / "model")
    assert set(opened.encoded) == set(expected)
    assert all(np.array_equal(opened.encoded[name].dequantize(), weight) for name, weight in expected.items())
    import_checkpoint(opened)
    assert [finding for finding in lint_checkpoint(tmp_path / "model") if finding.severity == "error"] == []


def test_int8_survives_in_another_format(tmp_path: Path) -> None:
    checkpoint(tmp_path / "model", INT8)
    assert transcode(tmp_path / "model", tmp_path / "out", "compressed-tensors").proof.equal


def state(**changed: Any) -> Any:
    """A state with other values; None leaves one out."""
    shape = SHAPES[MODULES[0].split(".", 3)[3]]
    found = {"blocksize": 64, "shape": list(shape), **changed}
    return np.frombuffer(json.dumps({k: v for k, v in found.items() if v is not None}).encode(), np.uint8)


@each_case(
    ("quantization", "changed", "message"),
    [
        (NF4, {"weight.absmax": None}, "has no 'absmax', which bitsandbytes needs"),
        (
            NF4,
            {"weight.absmax": np.zeros(3, np.float32)},
            r"'absmax' has the shape \[3\]; bitsandbytes needs \[blocks\]",
        ),
        (DOUBLE, {"weight.nested_absmax": None}, "needs with bnb_4bit_use_double_quant"),
        (DOUBLE, {"weight.absmax": np.zeros(24, np.float32)}, "'absmax' is F32; bitsandbytes stores it as U8"),
        (NF4, {f"weight.{STATE}": np.frombuffer(b"{", np.uint8)}, "its quant_state is not JSON"),
        (NF4, {f"weight.{STATE}": np.zeros(5000, np.uint8)}, "has 5000 bytes; Ingot reads at most 4096"),
        (NF4, {f"weight.{STATE}": state(blocksize=1 << 40)}, "its quant_state: blocksize is 1099511627776; it must be"),
        (NF4, {f"weight.{STATE}": state(shape=[4])}, r"its quant_state: shape is \[4\]; "),
        (NF4, {f"weight.{STATE}": state(shape=None)}, "its quant_state: shape is missing"),
        (NF4, {f"weight.{STATE}": state(shape=[1 << 20, 1 << 20])}, "'weight' has the shape"),
        (INT8, {"SCB": None}, "has no 'SCB', which bitsandbytes needs"),
        ({"quant_method": "bitsandbytes"}, {}, "one of load_in_4bit and load_in_8bit must be true"),
        ({**NF4, "bnb_4bit_quant_type": "nf5"}, {}, "bnb_4bit_quant_type is 'nf5'; it must be 'fp4' or 'nf4'"),
    ],
)
def test_what_contradicts_the_layout_is_refused(
    quantization: dict[str, Any], changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    checkpoint(tmp_path / "model", quantization, **changed)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tmp_path / "model")


def test_another_order_of_rows_is_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path / "model", INT8, weight_format=np.array(2, np.uint8))
    with pytest.raises(CheckpointError, match="weight_format is 2; Ingot reads 0, rows as they are"):
        Checkpoint.open(tmp_path / "model").encoded[f"{MODULES[0]}.weight"].read()
