"""Activations as 8-bit codes with a constant scale: one quantization per input, static and dynamic, int8 and float8."""

import onnx_ir as ir
import pytest
from benchmarks.programs.segment_numerics import random_feeds, relative_errors

from ingot.passes.calibration import calibrate_with
from ingot.pipeline.calibrate import CalibrationEngine
from ingot.pipeline.targets.segments.segment import Segment
from tests.passes.calibration_data import calibration_data
from tests.pipeline.targets.tensorrt.models import CHANNEL, FORMS, prepared, segments_of
from tests.tolerances import within

UNITS = {"int8-activations": 2.0**-7, "fp8-activations": 2.0**-9}
STATIC = (
    ("quantize-activations", {"mode": "static"}),
    ("quantize-weights", {**CHANNEL, "symmetric": True}),
)


def layer(form: str) -> Segment:
    return segments_of(prepared(form))[1]


def nodes(segment: Segment, op_type: str) -> list[ir.Node]:
    return [node for node in segment.model.graph if node.op_type == op_type]


@pytest.mark.parametrize("form", UNITS)
def test_every_input_of_a_layer_is_quantized_once_with_a_power_of_two_as_scale(form: str) -> None:
    quantized = nodes(layer(form), "QuantizeLinear")
    assert len(quantized) == 4  # of the attention's result, both norms, and the gated activation
    for node in quantized:
        scale = node.inputs[1]
        assert scale is not None
        assert scale.const_value is not None
        assert float(scale.const_value.numpy()) == UNITS[form]


def test_a_computed_scale_costs_a_maximum_per_row_and_a_static_one_costs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(nodes(layer("int8-activations"), "ReduceMax")) == 4
    monkeypatch.setitem(FORMS, "static", STATIC)
    with calibrate_with(CalibrationEngine(calibration_data(4, 16, 60))):
        static = layer("static")
    assert len(nodes(static, "QuantizeLinear")) == 4
    assert not nodes(static, "ReduceMax")
    assert sum(name.endswith(".inverse") for name in static.weights) == 4
    assert within("segments.activations", max(relative_errors(static, random_feeds(static, 3)).values()), "static")


def test_the_gpu_must_compute_in_the_codes_type() -> None:
    assert "int8" in layer("int8-activations").number_formats
    assert "fp8" in layer("fp8-activations").number_formats
