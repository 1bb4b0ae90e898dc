"""awq: the function stays, later rounding loses less, and layers that cannot be scaled are left alone."""

import logging
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from ingot.errors import PassError, UsageError
from ingot.passes.calibration import calibrate_with
from ingot.passes.fusion.fold_constants import FoldConstants
from ingot.passes.fusion.pack_projections import PackProjections
from ingot.passes.manager import PassManager
from ingot.passes.numerics.arrays import Float32Array
from ingot.passes.quantization.awq import AWQ_FACTS, Awq
from ingot.passes.quantization.gptq import Gptq
from ingot.passes.quantization.quantize_weights import QuantizeWeights
from tests.passes.calibration_data import calibration
from tests.passes.tiny_decoder import TinyDecoder, array

OUTLIERS = slice(3, 60, 14)


def decoder(packed: bool = False) -> ir.Model:
    """The tiny decoder with a few channels of each norm much larger than the others, as large models have them."""
    model = TinyDecoder().model
    for name, value in model.graph.initializers.items():
        if name.endswith("layernorm.weight"):
            scale = array(model, name).copy()
            scale[OUTLIERS] *= 20
            value.const_value = ir.tensor(scale, name=name)
    PassManager([FoldConstants(), *([PackProjections()] if packed else [])]).run(model)
    return model


def scaled(model: ir.Model, **options: Any) -> ir.Model:
    with calibrate_with(calibration()):
        PassManager([Awq(**options)]).run(model)
    return model


def logits(model: ir.Model) -> Float32Array:
    return np.concatenate(list(calibration().logits(model)))


def choices(model: ir.Model) -> dict[str, dict[str, Any]]:
    return {choice["layers"][0]: choice for choice in AWQ_FACTS.of(model)}


@pytest.mark.parametrize("packed", [False, True])
def test_the_function_stays_the_same(packed: bool) -> None:
    exact = logits(decoder(packed))
    difference = np.linalg.norm(logits(scaled(decoder(packed))) - exact) / np.linalg.norm(exact)
    assert difference < 2e-5


@pytest.mark.parametrize("packed", [False, True])
def test_norms_muls_and_attentions_absorb_the_scale(packed: bool) -> None:
    found = choices(scaled(decoder(packed)))
    gate = "gate_up_proj" if packed else "gate_proj"
    kinds = {name.rpartition(".")[2] for name in found}
    assert {"q_proj", gate, "down_proj", "o_proj"} <= kinds
    assert all(choice["error_after"] < choice["error_before"] for choice in found.values())


def test_outlier_channels_are_scaled_up_in_the_weight_and_down_in_the_norm() -> None:
    before, after = decoder(), scaled(decoder())
    name = "layers.0.input_layernorm.weight"
    ratio = array(after, name) / array(before, name)  # 1 / s
    assert ratio[OUTLIERS].max() < np.median(ratio)
    for projection in "qk":  # v's rows absorb the scale of o as well
        weight = f"layers.0.{projection}_proj.weight"
        expected = array(before, weight).astype(np.float32) / ratio
        np.testing.assert_allclose(array(after, weight), expected, rtol=1e-5)


@pytest.mark.parametrize("quantizer", [QuantizeWeights, Gptq])
def test_later_rounding_loses_less(quantizer: type[QuantizeWeights]) -> None:
    exact = logits(decoder(packed=True))
    errors = []
    for first in ([], [Awq()]):
        model = decoder(packed=True)
        with calibrate_with(calibration()):
            PassManager([*first, quantizer(lm_head="none", embedding="none")]).run(model)
        errors.append(float(np.square(logits(model) - exact).mean()))
    print(errors)
    assert errors[1] < 0.8 * errors[0]


def test_weights_are_lazy_and_keep_their_names() -> None:
    model = scaled(decoder())
    weight = model.graph.initializers["layers.0.gate_proj.weight"]
    assert isinstance(weight.const_value, ir.LazyTensor)
    assert weight.dtype == ir.DataType.FLOAT


def test_quantized_weights_are_left_alone_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = decoder()
    PassManager([QuantizeWeights()]).run(model)
    with caplog.at_level(logging.INFO, "ingot.passes"), calibrate_with(calibration()):
        (record,) = PassManager([Awq()]).run(model)
    assert not record.modified
    assert (
        "awq: left alone: node 'layers.0.q_proj' has a weight that others read too, or that is quantized" in caplog.text
    )


def with_a_shared_norm() -> ir.Model:
    """Both layers' first norms read one weight, which cannot be scaled for either."""
    model = decoder()
    first, second = (node for node in model.graph if (node.name or "").endswith("input_layernorm"))
    second.replace_input_with(1, first.inputs[1])
    return model


def test_fold_always_adds_a_mul_where_no_node_absorbs_the_scale() -> None:
    exact, left = logits(with_a_shared_norm()), scaled(with_a_shared_norm())
    assert not [node for node in left.graph if (node.name or "").endswith("scale_input")]
    model = scaled(with_a_shared_norm(), fold="always")
    muls = [node for node in model.graph if (node.name or "").endswith("scale_input")]
    assert [node.name for node in muls] == ["layers.0.q_proj.scale_input", "layers.1.q_proj.scale_input"]
    assert all(len(node.outputs[0].uses()) == 3 for node in muls)
    assert np.linalg.norm(logits(model) - exact) / np.linalg.norm(exact) < 2e-5
    errors = []
    for each in (left, model):
        with calibrate_with(calibration()):
            PassManager([QuantizeWeights(lm_head="none", embedding="none")]).run(each)
        errors.append(np.linalg.norm(logits(each) - exact))
    print(f"error of the logits: {errors[0]:.4f} without the Muls, {errors[1]:.4f} with them")
    assert errors[1] < errors[0]


def test_a_mul_that_gains_too_little_is_not_added(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ingot.passes"):
        model = scaled(with_a_shared_norm(), fold="always", least_gain=0.95)
    assert not [node for node in model.graph if (node.name or "").endswith("scale_input")]
    assert "awq: left alone: a Mul before layers.0.q_proj gains" in caplog.text


def test_layers_with_zero_inputs_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = decoder()
    norm = next(node for node in model.graph if node.name == "layers.1.input_layernorm")
    name = norm.inputs[1].name if norm.inputs[1] else ""
    model.graph.initializers[name or ""].const_value = ir.tensor(np.zeros(64, np.float32), name=name)
    with caplog.at_level(logging.INFO, "ingot.passes"):
        scaled(model, rounding="gptq", steps=2)
    assert "awq: left alone: the inputs of layers.1.q_proj are all zero" in caplog.text


def test_the_same_data_gives_the_same_scales() -> None:
    first, second = scaled(decoder()), scaled(decoder())
    assert AWQ_FACTS.of(first) == AWQ_FACTS.of(second)
    name = "layers.1.down_proj.weight"
    np.testing.assert_array_equal(array(first, name), array(second, name))


def test_without_data_the_error_says_how_to_provide_it() -> None:
    with pytest.raises(PassError, match="awq: needs calibration data"):
        PassManager([Awq()]).run(decoder())


def test_options_out_of_range_are_refused() -> None:
    with pytest.raises(UsageError, match="awq: steps is 0; allowed: a whole number from 1 to 1000"):
        Awq(steps=0)
    with pytest.raises(UsageError, match=r"awq: least_gain is 1\.0; allowed: a number from 0 to below 1"):
        Awq(least_gain=1.0)
