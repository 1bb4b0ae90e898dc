"""Unpacking undoes packing: codes, scales and zero points of every scheme come back as they were."""

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from ingot.errors import PassError
from ingot.passes.lowering.lower_onnxruntime_cpu import LowerOnnxruntimeCpu
from ingot.passes.lowering.nbits_packing import BLOCKS_KEY, PackedWeight, unpack
from ingot.passes.quantization.quantize_weights import QuantizeWeights
from tests.each_case import each_case
from tests.passes.lowering.test_lower_onnxruntime_cpu import QUANTIZED, dequantized, label, linear_model, table_model

COLUMNS = 172  # no multiple of any block


def lowered(model: ir.Model, op_type: str, **options: object) -> tuple[ir.Node, NDArray[np.float32]]:
    """The node that reads packed codes, and the weight as it was before the lowering."""
    QuantizeWeights(**{"lm_head": options.get("bits", 8), **options})(model)  # type: ignore[arg-type]
    weight = next(name for name in model.graph.initializers if name.endswith(".q")).removesuffix(".q")
    before = dequantized(model, weight)
    LowerOnnxruntimeCpu()(model)
    return next(node for node in model.graph if node.op_type == op_type), before


def floats(packed: PackedWeight, rows: slice) -> NDArray[np.float32]:
    """The rows as their codes mean them, from numpy alone."""
    codes, scales, zeros = packed.codes_of(rows), packed.scales_of(rows), packed.zero_points_of(rows)
    groups = np.arange(packed.columns) // (packed.columns if packed.per_channel else packed.block_size)
    shifted = codes.astype(np.float32) - (0 if zeros is None else zeros.astype(np.float32)[:, groups])
    result: NDArray[np.float32] = (shifted * scales[:, groups]).astype(np.float32)
    return result


@each_case("options", QUANTIZED, ids=label)
def test_every_scheme_of_a_linear_layer_comes_back_to_the_bit(options: dict[str, object]) -> None:
    node, before = lowered(linear_model(COLUMNS), "MatMulNBits", **options)
    packed = PackedWeight.read(node, COLUMNS, (1, 2, 3))
    assert np.array_equal(floats(packed, slice(0, packed.rows)), before)
    assert packed.bits == options["bits"]
    assert packed.per_channel == (options["block_size"] == "channel")
    assert (packed.zero_points is None) == options["symmetric"]


@pytest.mark.parametrize("block_size", [32, "channel"])
def test_some_rows_are_read_without_the_others(block_size: object) -> None:
    node, before = lowered(linear_model(COLUMNS), "MatMulNBits", bits=4, block_size=block_size, symmetric=False)
    packed = PackedWeight.read(node, COLUMNS, (1, 2, 3))
    assert np.array_equal(floats(packed, slice(5, 17)), before[5:17])


def test_an_embedding_table_comes_back_without_its_padding() -> None:
    node, before = lowered(table_model(COLUMNS), "GatherBlockQuantized", block_size=32)
    packed = PackedWeight.read(node, COLUMNS, (0, 2, 3))
    assert np.array_equal(floats(packed, slice(0, packed.rows)), before)


def test_codes_of_2_4_and_8_bits_begin_in_the_low_bits() -> None:
    packed = np.array([[0b11_10_01_00]], np.uint8)
    assert unpack(packed, 2).tolist() == [[0, 1, 2, 3]]
    assert unpack(packed, 4).tolist() == [[0b0100, 0b1110]]
    assert unpack(packed, 8).tolist() == [[0b11100100]]


def test_a_scale_that_differs_within_a_channel_is_refused() -> None:
    node, _ = lowered(linear_model(COLUMNS), "MatMulNBits", bits=4, block_size=32, symmetric=True)
    node.metadata_props[BLOCKS_KEY] = "channel"
    with pytest.raises(PassError, match=r"'proj\.weight\.scale' is marked as per channel, but differs within a row"):
        PackedWeight.read(node, COLUMNS, (1, 2, 3)).scales_of(slice(0, 8))
