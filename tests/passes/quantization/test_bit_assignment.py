"""Bytes that mixed-precision counts: those of the programs of both CPU engines, and those of packed checkpoints."""

import onnx_ir as ir

from ingot.passes.lowering.lower_onnxruntime_cpu import LowerOnnxruntimeCpu
from ingot.passes.manager import PassManager, weight_bytes
from ingot.passes.numerics.scheme import ScaleDtype, Scheme, WeightBits
from ingot.passes.quantization.bit_assignment import Count, stored_bytes, unquantized_bytes
from ingot.passes.quantization.quantize_weights import QuantizeWeights
from ingot.passes.quantization.schemes import assign_scheme
from ingot.passes.weights import weight_sites
from ingot.pipeline.targets.cpu.matrices import StoredMatrix
from tests.each_case import each_case
from tests.parity import CHECKPOINTS
from tests.passes.tiny_decoder import TinyDecoder
from tests.simulators.cpu_programs import PACKED, imported


@each_case("symmetric", [False, True])
@each_case(("bits", "block_size"), [(2, 16), (3, 32), (4, 128), (8, 64), (4, 0), (3, 0)])
def test_bytes_for_onnxruntime_are_those_of_the_lowered_model(
    bits: WeightBits, block_size: int, symmetric: bool
) -> None:
    model = TinyDecoder().model
    scheme = Scheme(bits, block_size, symmetric)
    linear = [site for site in weight_sites(model) if site.role == "linear"]
    shapes = [site.weight.const_value.shape.numpy() for site in linear if site.weight.const_value is not None]
    predicted = sum(stored_bytes(int(rows), int(columns), scheme, "onnxruntime") for rows, columns in shapes)
    assign_scheme(linear, scheme)
    plain = _lowered_bytes(TinyDecoder().model)
    as_floats = sum(4 * int(rows) * int(columns) for rows, columns in shapes)
    assert _lowered_bytes(model, QuantizeWeights(lm_head="none", embedding="none")) == plain - as_floats + predicted


@each_case("scale_dtype", ["float16", "float32"])
@each_case("symmetric", [False, True])
@each_case(("bits", "block_size"), [(2, 16), (3, 32), (4, 128), (8, 64), (4, 0), (3, 0)])
def test_bytes_for_the_native_engine_are_those_of_its_program(
    bits: WeightBits, block_size: int, symmetric: bool, scale_dtype: ScaleDtype
) -> None:
    scheme = Scheme(bits, block_size, symmetric, scale_dtype=scale_dtype)
    options: dict[str, object] = {
        "bits": bits,
        "block_size": block_size,
        "symmetric": symmetric,
        "scale_dtype": scale_dtype,
    }
    model = imported(CHECKPOINTS / "llama", *PACKED, ("quantize-weights", options))
    found = [(site.weight, site.operand) for site in weight_sites(model) if site.role == "linear"]
    assert found
    for weight, operand in found:
        assert weight.shape is not None
        rows, columns = map(int, weight.shape.numpy())
        assert stored_bytes(rows, columns, scheme, "native") == StoredMatrix.of(operand).matrix.num_bytes


def _lowered_bytes(model: ir.Model, *passes: QuantizeWeights) -> int:
    PassManager([*passes, LowerOnnxruntimeCpu()]).run(model)
    return weight_bytes(model)


def test_nominal_bytes_are_those_of_packed_checkpoints() -> None:
    assert stored_bytes(64, 256, Scheme(3, 128, symmetric=True), "nominal") == 64 * 256 * 3 // 8 + 64 * 2 * 2
    assert stored_bytes(64, 256, Scheme(4, 128, symmetric=False), "nominal") == 64 * 128 + 64 * 2 * 2 + 64
    tensor = next(iter(TinyDecoder().model.graph.initializers.values())).const_value
    assert tensor is not None
    sizes: dict[Count, int] = {"nominal": tensor.size * 2, "native": tensor.size * 2, "onnxruntime": tensor.size * 4}
    for count, size in sizes.items():
        assert unquantized_bytes(tensor, count, is_table=False) == size
    assert unquantized_bytes(tensor, "onnxruntime", is_table=True) == tensor.size * 2
