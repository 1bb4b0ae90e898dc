"""Errors that quantizers record are those of the tensors that they store, with float32 and with float16 scales."""

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from ingot.passes.base import Pass
from ingot.passes.calibration import calibrate_with
from ingot.passes.fusion.fold_constants import FoldConstants
from ingot.passes.manager import PassManager
from ingot.passes.numerics.arrays import Float32Array
from ingot.passes.numerics.scheme import is_float16, to_float16
from ingot.passes.quantization.quantize_weights import QUANTIZATION_FACTS
from ingot.passes.registry import make_pass
from ingot.passes.weights import float32_values, weight_sites
from tests.each_case import each_case
from tests.passes.calibration_data import calibration
from tests.passes.tiny_decoder import TinyDecoder

QUANTIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "nearest, 4 bits": ("quantize-weights", {"bits": 4, "block_size": 32}),
    "nearest, 8 bits, rows, without clip": ("quantize-weights", {"bits": 8, "block_size": "channel", "clip": False}),
    "nearest, symmetric": ("quantize-weights", {"bits": 8, "block_size": 128, "symmetric": True}),
    "gptq, 4 bits": ("gptq", {"bits": 4, "block_size": 32}),
    "gptq, 8 bits, symmetric, rows": ("gptq", {"bits": 8, "block_size": "channel", "symmetric": True}),
    "gptq without refinement": ("gptq", {"bits": 3, "block_size": 64, "refine": 0}),
    "awq, gptq": ("awq", {"steps": 2}),
    "smooth-quant": ("smooth-quant", {}),
    "smooth-quant, a scale per tensor": ("smooth-quant", {"weights": "tensor", "alpha": "none"}),
}
WIDE = "nearest, 8 bits, rows, without clip"  # the largest error of a scale that was rounded afterwards


def quantized(case: str, scale_dtype: str, factor: float = 1.0) -> tuple[ir.Model, dict[str, Float32Array]]:
    """The tiny decoder, its linear weights times `factor`, quantized; and each weight just before it was rounded."""
    model = TinyDecoder(tied=False, weight_dtype=np.float32).model
    for site in weight_sites(model):
        values = float32_values(site.operand) * np.float32(factor)
        site.weight.const_value = ir.tensor(values, name=site.weight.name)
    name, options = QUANTIZERS[case]
    made = make_pass(name, {**options, "scale_dtype": scale_dtype})
    with calibrate_with(calibration()):
        PassManager([FoldConstants()]).run(model)
        if name == "awq":
            PassManager([made]).run(model)
            made = make_pass("gptq", {"scale_dtype": scale_dtype})
        elif name == "smooth-quant" and options.get("alpha") != "none":  # scale channels first, then round
            PassManager([make_pass(name, {**made.options(), "weights": "none", "activations": "none"})]).run(model)
            made = make_pass(name, {**made.options(), "alpha": "none"})
        before = {str(site.node.name): float32_values(site.operand) for site in weight_sites(model)}
        PassManager([made]).run(model)
    return model, before


def stored_scales(model: ir.Model) -> dict[str, ir.Value]:
    """Scales by the node that reads the weight."""
    found = {}
    for site in weight_sites(model):
        dequantize = site.operand.producer()
        assert dequantize is not None
        scale = dequantize.inputs[1]
        assert scale is not None
        found[str(site.node.name)] = scale
    return found


def array(value: ir.Value) -> Float32Array:
    assert value.const_value is not None
    return np.asarray(value.const_value.numpy(), np.float32)


def recorded(model: ir.Model) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in QUANTIZATION_FACTS.of(model).weights}


def require_true_errors(model: ir.Model, before: dict[str, Float32Array]) -> None:
    """Compare every recorded error with that of the stored codes and scales."""
    rows = recorded(model)
    assert rows.keys() == before.keys()
    for site in weight_sites(model):
        row, exact = rows[str(site.node.name)], before[str(site.node.name)].astype(np.float64)
        error = exact - float32_values(site.operand)
        assert row["mse"] == pytest.approx(np.square(error).mean(), rel=2e-5)
        assert row["relative_error"] == pytest.approx(np.linalg.norm(error) / np.linalg.norm(exact), rel=1e-5)


def require_true_scales(model: ir.Model) -> None:
    """Compare the recorded scales with the stored ones, exactly."""
    rows = recorded(model)
    for name, value in stored_scales(model).items():
        scales = array(value)
        assert (rows[name]["scale_min"], rows[name]["scale_max"]) == (scales.min(), scales.max())
        assert rows[name]["scale_dtype"] == ("float16" if is_float16(scales) else "float32")


@each_case("scale_dtype", ["float32", "float16"])
@each_case("case", QUANTIZERS)
def test_the_recorded_error_is_that_of_the_stored_tensors(case: str, scale_dtype: str) -> None:
    model, before = quantized(case, scale_dtype)
    require_true_errors(model, before)
    require_true_scales(model)
    assert {row["scale_dtype"] for row in recorded(model).values()} == {scale_dtype}


@pytest.mark.parametrize("options", [{}, {"weights": "tensor", "clip": True}])
def test_so_is_that_of_float8(options: dict[str, Any]) -> None:
    model = TinyDecoder(tied=False, weight_dtype=np.float32).model
    sites = {str(site.node.name): site for site in weight_sites(model) if site.role == "linear"}
    before = {name: float32_values(site.operand).astype(np.float64) for name, site in sites.items()}
    PassManager([make_pass("fp8", options)]).run(model)
    after = {str(site.node.name): float32_values(site.operand) for site in weight_sites(model)}
    rows = recorded(model)
    assert rows.keys() == before.keys()
    for name, row in rows.items():
        assert row["mse"] == pytest.approx(np.square(before[name] - after[name]).mean(), rel=1e-5)


def rounded_afterwards(model: ir.Model) -> None:
    """The mistake that the tests above are for."""
    for value in stored_scales(model).values():
        value.const_value = ir.tensor(to_float16(array(value)), name=value.name)


@each_case("case", QUANTIZERS)
def test_scales_that_are_rounded_after_their_record_are_found(case: str) -> None:
    model, _ = quantized(case, "float32")
    rounded_afterwards(model)
    with pytest.raises(AssertionError):
        require_true_scales(model)


def test_errors_alone_show_that_scales_were_rounded_after_their_record() -> None:
    model, before = quantized(WIDE, "float32")
    rounded_afterwards(model)
    with pytest.raises(AssertionError):
        require_true_errors(model, before)


@pytest.mark.parametrize("scale_dtype", ["float32", "float16"])
def test_the_same_data_gives_the_same_bytes(scale_dtype: str) -> None:
    first, second = (quantized("gptq, 4 bits", scale_dtype)[0].graph.initializers for _ in range(2))
    for name, value in first.items():
        other = second[name].const_value
        assert value.const_value is not None
        assert other is not None
        assert value.const_value.tobytes() == other.tobytes(), name


@pytest.mark.parametrize(
    ("case", "factor"),
    [("nearest, 4 bits", 1e-6), ("nearest, 4 bits", 1e9), ("gptq, 4 bits", 1e-6), ("smooth-quant", 1e-6)],
)
def test_weights_out_of_float16s_range_keep_float32_scales(
    case: str, factor: float, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        model, before = quantized(case, "float16", factor)
    plain, _ = quantized(case, "float32", factor)
    require_true_errors(model, before)
    require_true_scales(model)
    assert {row["scale_dtype"] for row in recorded(model).values()} == {"float32"}
    for name, value in stored_scales(model).items():
        np.testing.assert_array_equal(array(value), array(stored_scales(plain)[name]))
    assert "layers.0.q_proj.weight keeps float32 scales, " in caplog.text


def test_an_override_keeps_float32_scales_for_some() -> None:
    model = TinyDecoder(tied=False).model
    options = {"scale_dtype": "float16", "overrides": {"*.down_proj": {"scale_dtype": "float32"}}}
    made: Pass = make_pass("quantize-weights", options)
    PassManager([made]).run(model)
    dtypes = {name: row["scale_dtype"] for name, row in recorded(model).items()}
    assert {name for name, dtype in dtypes.items() if dtype == "float32"} == {
        "layers.0.down_proj",
        "layers.1.down_proj",
    }
