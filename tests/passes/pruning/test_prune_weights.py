"""prune-weights: the requested number of zeros, where they cost least; quantizers keep them."""

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
from ingot.passes.pruned_facts import MASKS_FACTS
from ingot.passes.pruning.prune_structure import PruneStructure
from ingot.passes.pruning.prune_weights import PruneWeights
from ingot.passes.quantization.awq import Awq
from ingot.passes.quantization.gptq import Gptq
from ingot.passes.quantization.quantize_weights import QuantizeWeights
from ingot.passes.rotation.rotate import RotateWeights
from ingot.passes.weights import float32_values, weight_sites
from tests.each_case import each_case
from tests.passes.calibration_data import calibration
from tests.passes.tiny_decoder import TinyDecoder

Weights = dict[str, np.ndarray[Any, np.dtype[np.float32]]]


def decoder(*before: Any) -> ir.Model:
    model = TinyDecoder().model
    PassManager([FoldConstants(), *before]).run(model)
    return model


def pruned(*after: Any, before: tuple[Any, ...] = (), **options: Any) -> ir.Model:
    model = decoder(*before)
    with calibrate_with(calibration()):
        PassManager([PruneWeights(**options), *after]).run(model)
    return model


def weights(model: ir.Model) -> Weights:
    """The weights of the linear layers, dequantized."""
    linears = (site for site in weight_sites(model) if site.role == "linear")
    return {site.node.name or "": float32_values(site.operand) for site in linears}


def statistics(model: ir.Model) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in MASKS_FACTS.of(model).weights}


def logits(model: ir.Model) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.concatenate(list(calibration().logits(model)))


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
@pytest.mark.parametrize("before", [(), (PackProjections(),)], ids=["apart", "packed"])
def test_half_of_the_weights_are_zero(method: str, before: tuple[Any, ...]) -> None:
    model = pruned(method=method, before=before)
    for name, weight in weights(model).items():
        share = float(np.mean(weight == 0))
        assert abs(share - 0.5) < 0.01, name
        assert statistics(model)[name]["sparsity"] == pytest.approx(share)
    assert "lm_head" not in statistics(model)


@each_case("method", ["wanda", "sparsegpt"])
@each_case(("pattern", "kept", "of"), [("2:4", 2, 4), ("1:4", 1, 4), ("3:4", 3, 4)])
def test_a_pattern_holds_in_every_group(method: str, pattern: str, kept: int, of: int) -> None:
    for weight in weights(pruned(method=method, sparsity=pattern)).values():
        assert np.all((weight.reshape(len(weight), -1, of) != 0).sum(axis=2) == kept)


def test_wanda_keeps_the_other_weights_and_sparsegpt_compensates() -> None:
    exact, original = logits(decoder()), weights(decoder())
    models = {method: pruned(method=method) for method in ("wanda", "sparsegpt")}
    for name, weight in weights(models["wanda"]).items():
        np.testing.assert_array_equal(weight[weight != 0], original[name][weight != 0])
    errors = {method: np.linalg.norm(logits(model) - exact) for method, model in models.items()}
    print(errors)
    assert errors["sparsegpt"] < errors["wanda"]
    mean = {m: np.mean([row["output_error"] for row in statistics(model).values()]) for m, model in models.items()}
    assert mean["sparsegpt"] < mean["wanda"]


@each_case("symmetric", [True, False])
@each_case("quantizer", [QuantizeWeights, Gptq])
@each_case("sparsity", ["2:4", 0.5])
def test_zeros_stay_zeros_through_a_quantizer(quantizer: type[QuantizeWeights], symmetric: bool, sparsity: Any) -> None:
    before = weights(pruned(sparsity=sparsity, before=(PackProjections(),)))
    after = weights(pruned(quantizer(symmetric=symmetric), sparsity=sparsity, before=(PackProjections(),)))
    for name, weight in before.items():
        assert not after[name][weight == 0].any(), name
        assert after[name][weight != 0].any()


def test_zeros_stay_zeros_through_awq_and_gptq() -> None:
    before = weights(pruned(sparsity="2:4"))
    after = weights(pruned(Awq(), Gptq(), sparsity="2:4"))
    assert all(not after[name][weight == 0].any() for name, weight in before.items())


@pytest.mark.parametrize("later", [RotateWeights(), PruneStructure(ffn=0.5)])
def test_passes_that_would_fill_the_zeros_are_refused(later: Any) -> None:
    with pytest.raises(PassError, match="zeros that prune-weights made would be lost; list prune-weights after it"):
        pruned(later)


def test_zeros_stay_zeros_when_structure_is_pruned_without_a_fit() -> None:
    model = pruned(PruneStructure(ffn=0.5, refit=False), sparsity="2:4")
    assert float(np.mean(weights(model)["layers.0.down_proj"] == 0)) > 0.4


def test_layers_to_leave_are_unchanged() -> None:
    model = pruned(leave=("*.down_proj", "layers.1.*"))
    zeros = {name: float(np.mean(weight == 0)) for name, weight in weights(model).items()}
    assert {name for name, share in zeros.items() if share > 0.4} == {
        f"layers.0.{part}_proj" for part in ("q", "k", "v", "o", "gate", "up")
    }


def test_a_width_that_the_pattern_does_not_divide_is_named() -> None:
    message = r"'layers.0.q_proj' has 64 inputs, which 2:5 does not divide; .* leave: \['layers.0.q_proj'\]"
    with pytest.raises(PassError, match=message):
        pruned(sparsity="2:5")


def test_quantized_weights_are_refused_by_name() -> None:
    with pytest.raises(PassError, match=r"'layers.0.q_proj' has a weight that is quantized; prune before quantizing"):
        pruned(before=(QuantizeWeights(),))


def test_a_pattern_of_leave_that_matches_nothing_is_refused() -> None:
    with pytest.raises(PassError, match=r"leave 'layers.9.\*' matches no weight"):
        pruned(leave=("layers.9.*",))


@each_case("sparsity", [0.0, 1.0, -0.5, "4:2", "0:4", "half", 124, ""])
def test_bad_sparsities_are_refused(sparsity: Any) -> None:
    with pytest.raises(UsageError, match=r"prune-weights: sparsity is .*; allowed"):
        PruneWeights(sparsity=sparsity)


def test_shared_weights_are_left_alone_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = decoder()
    nodes = {node.name: node for node in model.graph}
    first, second = (nodes[f"layers.{layer}.o_proj"] for layer in (0, 1))
    second.replace_input_with(1, first.inputs[1])
    with caplog.at_level(logging.INFO, "ingot.passes"), calibrate_with(calibration()):
        PassManager([PruneWeights()]).run(model)
    assert "left alone: node 'layers.0.o_proj' has a weight that others read too" in caplog.text
    assert "layers.0.o_proj" not in statistics(model)
