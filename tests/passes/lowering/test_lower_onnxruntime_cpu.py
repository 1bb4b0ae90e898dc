"""lower-onnxruntime-cpu: each form against numpy in float64, shared bytes, and batch invariance."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from ingot.errors import PassError
from ingot.passes.lowering.lower_onnxruntime_cpu import LowerOnnxruntimeCpu
from ingot.passes.lowering.nbits_packing import STORAGE_KEY
from ingot.passes.manager import PassManager
from ingot.passes.numerics.rounding import dequantize
from ingot.passes.printing import model_to_text
from ingot.passes.quantization.quantize_weights import QuantizeWeights
from ingot.passes.registry import make_pass
from tests.each_case import each_case
from tests.passes.tiny_decoder import FLOAT, INT64, TinyDecoder, array, value
from tests.sessions import plain_session, run

ROWS = 64
COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 33, 64)


def linear_model(columns: int = 172, rows: int = 96, dtype: Any = np.float16, bias: bool = True) -> ir.Model:
    """One Gemm from x [T, columns] to y [T, rows]."""
    parts = TinyDecoder(weight_dtype=dtype, layers=0)
    parts._nodes.clear()
    parts._initializers.clear()
    x = value("x", FLOAT, "T", columns)
    y = parts.linear("proj", x, rows, bias=bias)
    return finish(parts, x, y)


def table_model(columns: int = 172, dtype: Any = np.float16) -> ir.Model:
    """One Gather of rows [T, columns]."""
    parts = TinyDecoder(weight_dtype=dtype, layers=0)
    parts._nodes.clear()
    parts._initializers.clear()
    ids = value("input_ids", INT64, "T")
    return finish(
        parts, ids, parts.node("embed", "Gather", [parts.weight("table.weight", 96, columns), ids], ("T", columns))
    )


def finish(parts: TinyDecoder, x: ir.Value, y: ir.Value) -> ir.Model:
    opsets = {"": 24, "com.microsoft": 1}
    initializers = list(parts._initializers.values())
    graph = ir.Graph([x], [y], nodes=parts._nodes, initializers=initializers, opset_imports=opsets, name="one")
    return ir.Model(graph, ir_version=11)


def dequantized(model: ir.Model, weight: str) -> NDArray[np.float32]:
    """The dequantized weight [out, in] float32, computed by numpy."""
    codes, scale = array(model, f"{weight}.q"), array(model, f"{weight}.scale")
    named = f"{weight}.zero_point"
    zero = array(model, named).astype(np.int16) if named in model.graph.initializers else None
    per_channel = scale.ndim == 1
    if per_channel:
        scale, zero = scale[:, None], None if zero is None else zero[:, None]
    maker = next(node for node in model.graph if node.op_type == "DequantizeLinear")
    block = codes.shape[1] if per_channel else maker.attributes.get_int("block_size")
    assert block is not None
    return dequantize(codes.astype(np.int16), scale, zero, block)


QUANTIZED = [
    {"bits": bits, "block_size": block, "symmetric": symmetric}
    for bits in (2, 3, 4, 8)
    for block in (16, 32, 64, 128, 256, "channel")
    for symmetric in (True, False)
]


def label(options: Mapping[str, object]) -> str:
    return "-".join(str(option) for option in options.values())


@each_case("columns", [12, 172, 256])
@each_case("options", QUANTIZED, ids=label)
def test_matmul_is_exact_up_to_the_rounding_of_activations(options: Mapping[str, object], columns: int) -> None:
    x = np.random.default_rng(0).standard_normal((5, columns)).astype(np.float32)
    results = {}
    for level in (4, 0):
        model = linear_model(columns)
        bias = array(model, "proj.bias")
        PassManager([make_pass("quantize-weights", options)]).run(model)
        exact = x.astype(np.float64) @ dequantized(model, "proj.weight").T + bias
        PassManager([LowerOnnxruntimeCpu(accuracy_level=4 if level else 0)]).run(model)
        assert [node.op_type for node in model.graph] == ["MatMulNBits"]
        results[level] = np.abs(run(model, x=x) - exact).max() / np.abs(exact).max()
    assert results[0] < 3e-6
    assert results[4] < 2e-2  # int8 activations: half a step of 1/127, summed over the row


@each_case("columns", [12, 172, 256])
@each_case("options", QUANTIZED, ids=label)
def test_embedding_rows_are_the_dequantized_ones_to_the_bit(options: Mapping[str, object], columns: int) -> None:
    model = table_model(columns)
    choice = {**options, "embedding": options["bits"]}
    PassManager([make_pass("quantize-weights", choice)]).run(model)
    table = dequantized(model, "table.weight")
    PassManager([LowerOnnxruntimeCpu()]).run(model)
    ids = np.array([0, 95, 7, 7], np.int64)
    np.testing.assert_array_equal(run(model, input_ids=ids), table[ids])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_sixteen_bit_weights_are_widened_exactly_and_only_when_read(dtype: Any) -> None:
    model = linear_model(dtype=dtype)
    weight, bias = array(model, "proj.weight").astype(np.float64), array(model, "proj.bias")
    PassManager([LowerOnnxruntimeCpu()]).run(model)
    assert [node.op_type for node in model.graph] == ["Gemm"]
    assert isinstance(model.graph.initializers["proj.weight.float32"].const_value, ir.LazyTensor)
    x = np.random.default_rng(0).standard_normal((3, 172)).astype(np.float32)
    np.testing.assert_allclose(run(model, x=x), x @ weight.T + bias, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_a_sixteen_bit_table_stays_and_its_rows_are_widened(dtype: Any) -> None:
    model = table_model(dtype=dtype)
    table = array(model, "table.weight").astype(np.float32)
    PassManager([LowerOnnxruntimeCpu()]).run(model)
    assert [node.op_type for node in model.graph] == ["Gather", "Cast"]
    assert model.graph.initializers["table.weight"].dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    ids = np.array([3, 0, 95], np.int64)
    np.testing.assert_array_equal(run(model, input_ids=ids), table[ids])


def test_a_table_tied_to_a_float_head_is_stored_once_in_float32() -> None:
    model = TinyDecoder(tied=True).model
    PassManager([LowerOnnxruntimeCpu()]).run(model)
    assert "model.embed_tokens.weight" not in model.graph.initializers
    shared = model.graph.initializers["model.embed_tokens.weight.float32"]
    assert {node.op_type for node in shared.consumers()} == {"Gather", "Gemm"}


def test_a_quantized_table_shares_its_bytes_with_the_tied_head() -> None:
    model = TinyDecoder(tied=True).model
    PassManager([QuantizeWeights(lm_head=4, embedding=4), LowerOnnxruntimeCpu()]).run(model)
    packed = model.graph.initializers["model.embed_tokens.weight.q"].const_value
    rows = model.graph.initializers["model.embed_tokens.weight.q.rows"].const_value
    assert packed is not None
    assert rows is not None
    assert rows.metadata_props[STORAGE_KEY] == packed.name
    assert rows.tobytes() == packed.tobytes()


def test_inputs_and_outputs_keep_their_names_and_a_second_run_changes_nothing() -> None:
    model = TinyDecoder().model
    PassManager([QuantizeWeights(), LowerOnnxruntimeCpu()]).run(model)
    assert [value.name for value in model.graph.outputs] == ["logits"]
    assert not {"DequantizeLinear", "Gemm"} & {node.op_type for node in model.graph}
    text = model_to_text(model)
    (record,) = PassManager([LowerOnnxruntimeCpu()]).run(model)
    assert not record.modified
    assert model_to_text(model) == text


def test_a_quantized_weight_read_by_another_op_is_refused() -> None:
    model = linear_model()
    PassManager([QuantizeWeights()]).run(model)
    reader = next(node for node in model.graph if node.op_type == "Gemm")
    reader.op_type = "MatMul"
    with pytest.raises(PassError, match=r"lower-onnxruntime-cpu: 'proj' \(MatMul\) reads the quantized weight 'proj.w"):
        LowerOnnxruntimeCpu()(model)


def needs_even_rows(options: Mapping[str, object]) -> bool:
    """Whether the pass's docstring lists the form as invariant for any number of rows."""
    largest = 32 if options["bits"] == 4 else 64
    return options["block_size"] == "channel" or int(str(options["block_size"])) > largest


def has_measured_kernels() -> bool:
    """Whether this CPU has the kernels that the pass's docstring describes."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.is_file() and "avx512_vnni" in cpuinfo.read_text()


@pytest.mark.skipif(not has_measured_kernels(), reason="measured on AVX-512 VNNI; other CPUs take other kernels")
@each_case("options", [*QUANTIZED, {}], ids=label)
def test_a_row_has_the_same_bits_in_every_batch_of_even_size(options: Mapping[str, object]) -> None:
    model = linear_model(172, rows=256)
    if options:
        PassManager([make_pass("quantize-weights", options)]).run(model)
    PassManager([LowerOnnxruntimeCpu()]).run(model)
    x = np.random.default_rng(0).standard_normal((ROWS, 172)).astype(np.float32)
    runner = plain_session(model)
    whole = runner.run(None, {"x": x})[0]
    counts = [count for count in COUNTS if count % 2 == 0 or not (options and needs_even_rows(options))]
    for count in counts:
        for start in (0, ROWS - count):
            rows = slice(start, start + count)
            np.testing.assert_array_equal(runner.run(None, {"x": x[rows]})[0], whole[rows])
