"""Facts of a quantized layer decide which formats hold it."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from safetensors.numpy import save_file

from ingot.artifact.safetensors import read_header
from ingot.pipeline.checkpoint.formats.decoded import DecodedWeight
from ingot.pipeline.interchange.layers import QuantizedLayer, facts_of, minima_of, stored_tensor
from tests.each_case import each_case

RAMP = np.arange(64, dtype=np.uint8).reshape(4, 16) % 16
SCALES = np.array([[0.5, 1.0], [0.25, 2.0], [1.0, 4.0], [8.0, 0.5]], np.float32)  # [4 rows, 2 groups of 8]


def weight(codes: NDArray[Any] = RAMP, scales: NDArray[np.float32] = SCALES, **fields: Any) -> DecodedWeight:
    return DecodedWeight(codes, scales, 16 // scales.shape[1], bits=4, **fields)


def points(value: int, shape: tuple[int, int] = (4, 2)) -> NDArray[np.int16]:
    return np.full(shape, value, np.int16)


@each_case(
    ("made", "scheme", "strategy"),
    [
        (weight(zero_points=points(8)), "4 bits symmetric in blocks of 8", "group"),
        (weight(zero_points=points(3)), "4 bits asymmetric in blocks of 8", "group"),
        (weight(scales=SCALES[:, :1], zero_points=points(8, (4, 1))), "4 bits symmetric per channel", "channel"),
        (weight(scales=np.ones((4, 1), np.float32)), "4 bits asymmetric per channel", "tensor"),
        (weight(offsets=SCALES / np.float32(3)), "4 bits with minima in blocks of 8", "group"),
        (weight(codes=RAMP.astype(np.float32)), "fp4 in blocks of 8", "group"),
    ],
)
def test_facts_name_the_scheme_and_what_shares_a_scale(made: DecodedWeight, scheme: str, strategy: str) -> None:
    facts = facts_of(made)
    assert (facts.scheme, facts.strategy, facts.shape) == (scheme, strategy, (4, 16))


def test_code_bits_is_the_narrowest_width_that_holds_codes_and_zero_points() -> None:
    centred, shifted = facts_of(weight(zero_points=points(8))), facts_of(weight(zero_points=points(3)))
    assert (centred.symmetric, centred.code_bits("middle"), centred.code_bits("middle", (8,))) == (True, 4, 8)
    assert (shifted.symmetric, shifted.code_bits("middle"), shifted.code_bits("from zero")) == (False, 5, 4)
    assert shifted.code_bits("middle", (2, 3, 4)) is None


def test_scales_that_float16_rounds_are_noticed() -> None:
    assert facts_of(weight(zero_points=points(8))).float16_scales
    rounded = facts_of(weight(scales=SCALES / np.float32(3), zero_points=points(8)))
    assert (rounded.float16_scales, rounded.float16_range) == (False, True)
    for factor in (1e-9, 1e9):
        beyond = facts_of(weight(scales=SCALES * np.float32(factor), zero_points=points(8)))
        assert (beyond.float16_scales, beyond.float16_range) == (False, False)


def test_q4_1_holds_minima_that_are_exact_in_float16() -> None:
    exact = weight(zero_points=points(3))
    assert facts_of(exact).q4_1
    assert np.array_equal(minima_of(exact), -3 * SCALES)
    assert not facts_of(weight(scales=SCALES * np.float32(1 + 2**-10), zero_points=points(3))).q4_1
    assert not facts_of(weight(offsets=SCALES / np.float32(3))).q4_1


def test_a_layer_is_dequantized_when_its_floats_are_read() -> None:
    made = weight(zero_points=points(8))
    floats = QuantizedLayer("model.layers.0.mlp.up_proj.weight", facts_of(made), lambda: made).as_floats()
    expected = (RAMP.astype(np.float32) - 8) * np.repeat(SCALES, 8, axis=1)
    assert floats.name == "model.layers.0.mlp.up_proj.weight"
    assert np.array_equal(np.asarray(floats.tensor.numpy()), expected)


def test_a_stored_tensor_keeps_its_type_and_bytes(tmp_path: Path) -> None:
    halves = np.linspace(-1, 1, 6, dtype=np.float16).reshape(2, 3)
    save_file({"first": np.arange(5, dtype=np.int64), "halves": halves}, tmp_path / "w.safetensors")
    stored = stored_tensor(read_header(tmp_path / "w.safetensors")["halves"], "renamed")
    assert (stored.name, stored.dtype) == ("renamed", ir.DataType.FLOAT16)
    assert np.array_equal(np.asarray(stored.numpy()), halves)
