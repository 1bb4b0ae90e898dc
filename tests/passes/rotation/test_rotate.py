"""rotate: outputs stay, no channel dominates, tied heads get a tensor of their own, refusals name the reason."""

import logging
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from ingot.errors import PassError, UsageError
from ingot.passes.calibration import calibrate_with
from ingot.passes.fusion.fold_constants import FoldConstants
from ingot.passes.fusion.fuse_residual_norm import FuseResidualNorm
from ingot.passes.fusion.pack_projections import PackProjections
from ingot.passes.manager import PassManager
from ingot.passes.quantization.awq import AWQ_FACTS, Awq
from ingot.passes.quantization.gptq import Gptq
from ingot.passes.quantization.quantize_weights import QuantizeWeights
from ingot.passes.rotation.rotate import ROTATE_FACTS, RotateWeights
from tests.each_case import each_case
from tests.passes.calibration_data import calibration
from tests.passes.rotation.expert_graph import branches
from tests.passes.tiny_decoder import HEAD_DIM, HIDDEN, VOCAB, TinyDecoder, array
from tests.tolerances import tolerance

LAYER, HEAD = "layers.0.input_layernorm.weight", "lm_head.weight"


def decoder(tied: bool = True, uniform_final_norm: bool = False) -> ir.Model:
    """The tiny decoder with two columns much larger than the others in the weights that read the stream."""
    model = TinyDecoder(tied).model
    for name, value in model.graph.initializers.items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")):
            values = array(model, name).copy()
            values[:, 5::30] *= 10
            value.const_value = ir.tensor(values, name=name)
    if uniform_final_norm:
        norm = model.graph.initializers["norm.weight"]
        norm.const_value = ir.tensor(np.full(HIDDEN, 1.25, np.float32), name=norm.name)
    PassManager([FoldConstants()]).run(model)
    return model


def rotated(model: ir.Model, **options: Any) -> ir.Model:
    PassManager([RotateWeights(**options)]).run(model)
    return model


def calibrated(passes: list[Any]) -> ir.Model:
    model = decoder()
    with calibrate_with(calibration()):
        PassManager([PackProjections(), *passes]).run(model)
    return model


def logits(model: ir.Model) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.concatenate(list(calibration().logits(model)))


def relative(measured: Any, exact: Any) -> float:
    return float(np.linalg.norm(measured - exact) / np.linalg.norm(exact))


@each_case("matrix", ["hadamard", "random-hadamard", "orthogonal"])
@each_case("tied", [True, False])
def test_the_outputs_stay(tied: bool, matrix: str) -> None:
    exact = logits(decoder(tied))
    assert relative(logits(rotated(decoder(tied), matrix=matrix)), exact) < 1e-5
    assert relative(logits(rotated(decoder(tied), matrix=matrix, residual=False)), exact) < 1e-5
    assert relative(logits(rotated(decoder(tied), matrix=matrix, values=False)), exact) < 1e-5


def test_norm_weights_are_folded_into_their_readers_and_become_ones() -> None:
    before, after = decoder(), rotated(decoder())
    assert np.all(array(after, LAYER) == 1)
    gate = "layers.0.gate_proj.weight"
    folded = array(before, gate).astype(np.float32) * array(before, "layers.0.post_attention_layernorm.weight")
    np.testing.assert_allclose(  # an orthogonal matrix keeps angles and lengths of rows
        array(after, gate) @ array(after, gate).T, folded @ folded.T, atol=1e-4
    )


def test_large_channels_are_spread_over_all() -> None:
    def peak(model: ir.Model) -> float:
        weight = np.abs(array(model, "layers.0.gate_proj.weight").astype(np.float32))
        return float(weight.max(axis=1).mean() / weight.mean())

    assert peak(rotated(decoder())) < 0.6 * peak(decoder())


def test_values_of_each_kv_head_have_a_rotation_of_their_own() -> None:
    weight = "layers.0.v_proj.weight"
    before, after = decoder(), rotated(decoder(), residual=False)
    rotations = []
    for rows in (slice(0, HEAD_DIM), slice(HEAD_DIM, 2 * HEAD_DIM)):
        old, new = array(before, weight)[rows].astype(np.float32), array(after, weight)[rows]
        rotations.append(np.linalg.lstsq(old.T, new.T, rcond=None)[0])
    assert not np.allclose(rotations[0], rotations[1], atol=0.1)
    assert np.allclose(rotations[0] @ rotations[0].T, np.eye(HEAD_DIM), atol=1e-4)


def test_a_tied_head_gets_a_tensor_of_its_own_and_the_log_says_its_bytes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ingot.passes"):
        model = rotated(decoder(tied=True))
    size = VOCAB * HIDDEN * 4
    assert f"the head gets a tensor of its own, {size} bytes" in caplog.text
    assert ROTATE_FACTS.of(model)["separate_head"] == size
    assert not np.allclose(array(model, HEAD), array(model, "model.embed_tokens.weight"))


def test_a_final_norm_of_equal_elements_keeps_the_head_tied() -> None:
    exact = logits(decoder(uniform_final_norm=True))
    model = rotated(decoder(uniform_final_norm=True))
    assert HEAD not in model.graph.initializers
    assert np.all(array(model, "norm.weight") == np.float32(1.25))
    assert relative(logits(model), exact) < 1e-5


def test_weights_are_lazy_float32_and_keep_their_names() -> None:
    before = set(decoder().graph.initializers)
    model = rotated(decoder())
    assert set(model.graph.initializers) == before | {HEAD}
    weight = model.graph.initializers["layers.0.o_proj.weight"]
    assert isinstance(weight.const_value, ir.LazyTensor)
    assert weight.dtype == ir.DataType.FLOAT
    assert not [node.name for node in model.graph if node.op_type == "Cast"]


@pytest.mark.parametrize("quantizer", [QuantizeWeights(), Gptq()])
def test_later_rounding_loses_less(quantizer: Any) -> None:
    exact = logits(decoder())
    errors = [relative(logits(calibrated([*first, quantizer])), exact) for first in ([], [RotateWeights()])]
    print(errors)
    assert errors[1] < errors[0]


def test_awq_folds_its_scales_into_norms_of_ones() -> None:
    model = calibrated([RotateWeights(), Awq(), Gptq()])
    layers = {layer for choice in AWQ_FACTS.of(model) for layer in choice["layers"]}
    assert "layers.0.gate_up_proj" in layers  # reads a norm
    assert relative(logits(model), logits(decoder())) < tolerance("quantized.int4")


def test_random_matrices_depend_on_the_seed_and_the_fixed_one_does_not() -> None:
    name = "layers.1.down_proj.weight"
    first, again, other = (array(rotated(decoder(), seed=seed), name) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other)
    fixed = [array(rotated(decoder(), matrix="hadamard", seed=seed), name) for seed in (1, 2)]
    np.testing.assert_array_equal(fixed[0], fixed[1])


def test_a_second_rotation_is_refused() -> None:
    with pytest.raises(PassError, match="rotate: the model is already rotated"):
        rotated(rotated(decoder()))


def test_quantized_weights_are_refused_by_name() -> None:
    model = decoder()
    PassManager([QuantizeWeights()]).run(model)
    with pytest.raises(PassError, match=r"nothing in the model can be rotated: node 'layers.0.o_proj' has a weight"):
        rotated(model)


def test_a_fused_residual_is_left_alone_with_auto_and_refused_with_true(caplog: pytest.LogCaptureFixture) -> None:
    model = decoder()
    PassManager([FuseResidualNorm()]).run(model)
    with pytest.raises(PassError, match=r"is fused: put rotate before.*; set residual"):
        rotated(model, residual=True)
    exact = logits(model)
    with caplog.at_level(logging.WARNING, "ingot.passes"):
        rotated(model)
    assert "rotate: left alone: node 'layers.0." in caplog.text
    assert ROTATE_FACTS.of(model)["residual"] is None
    assert relative(logits(model), exact) < 1e-5


def test_a_size_without_a_hadamard_matrix_is_refused_with_the_alternative() -> None:
    with pytest.raises(PassError, match=r"no Hadamard matrix of size 6 is known .*; set matrix: orthogonal"):
        rotated(branches(width=6))
    model = branches(width=6)
    rotated(model, matrix="orthogonal")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": -1}, "rotate: seed is -1; allowed: a whole number from 0 to"),
        ({"residual": False, "values": False}, "residual and values are both false"),
        ({"matrix": "fourier"}, "rotate: matrix is 'fourier'"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RotateWeights(**options)
