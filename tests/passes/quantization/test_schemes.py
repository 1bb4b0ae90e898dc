"""Schemes of single weights: written on nodes, read back by quantizers, and overridden by patterns."""

import onnx_ir as ir
import pytest

from ingot.errors import PassError, UsageError
from ingot.passes.calibration import calibrate_with
from ingot.passes.manager import PassManager
from ingot.passes.numerics.scheme import Scheme
from ingot.passes.quantization.gptq import Gptq
from ingot.passes.quantization.quantize_weights import QUANTIZATION_FACTS, QuantizeWeights
from ingot.passes.quantization.schemes import assign_scheme, assigned_scheme, parse_overrides, require_used_schemes
from ingot.passes.weights import weight_sites
from tests.passes.calibration_data import calibration
from tests.passes.tiny_decoder import TinyDecoder


def quantized(model: ir.Model) -> dict[str, tuple[int, int]]:
    rows = QUANTIZATION_FACTS.of(model).weights
    return {row["name"]: (row["bits"], row["block_size"]) for row in rows}


@pytest.mark.parametrize("quantizer", [QuantizeWeights, Gptq])
def test_overrides_win_over_assigned_schemes_and_16_bits_stay_unquantized(quantizer: type[QuantizeWeights]) -> None:
    model = TinyDecoder().model
    site, other, third = (site for site in weight_sites(model) if site.node.name in _names("q", "k", "v"))
    assign_scheme([site], Scheme(8, 16, symmetric=True))
    assign_scheme([other], None)
    assign_scheme([third], Scheme(8, 16, symmetric=True))
    with calibrate_with(calibration()):
        PassManager([quantizer(overrides={"*.v_proj": {"bits": 2, "block_size": 64}}, block_size=32)]).run(model)
    found = quantized(model)
    assert found["layers.0.q_proj"] == (8, 16)
    assert "layers.0.k_proj" not in found
    assert found["layers.0.v_proj"] == (2, 64)
    assert found["layers.0.o_proj"] == (4, 32)


def _names(*letters: str) -> list[str]:
    return [f"layers.0.{letter}_proj" for letter in letters]


def test_a_scheme_is_read_back_with_the_clip_of_its_quantizer() -> None:
    sites = weight_sites(TinyDecoder().model)[1:3]
    base, other = Scheme(4, 128, symmetric=False, clip=True), Scheme(8, 0, symmetric=True)
    assert assigned_scheme(sites[0].node, base, other) == other
    assert assign_scheme(sites[:1], Scheme(3, 32, symmetric=True))
    assert assigned_scheme(sites[0].node, base, other) == Scheme(3, 32, symmetric=True, clip=True)
    assert not assign_scheme(sites[:1], Scheme(3, 32, symmetric=True)), "nothing changes"
    assert assign_scheme(sites[1:], None)
    assert assigned_scheme(sites[1].node, base, other) is None


def test_assigned_bits_must_be_used_and_16_bits_need_not() -> None:
    model = TinyDecoder().model
    sites = [site for site in weight_sites(model) if site.role == "linear"]
    assign_scheme(sites[:1], None)
    require_used_schemes(model)
    assign_scheme(sites[1:4], Scheme(4, 32, symmetric=False))
    with pytest.raises(PassError, match=r"mixed-precision chose bits for 'layers.0.k_proj' and 2 more, and nothing"):
        require_used_schemes(model)


def test_overrides_are_parsed_to_fields_of_a_scheme() -> None:
    given = {"a": {"bits": 8, "block_size": "channel"}, "b": "none", "c": 16, "d": {"clip": True}}
    assert parse_overrides("gptq", given) == {
        "a": {"bits": 8, "block_size": 0},
        "b": None,
        "c": None,
        "d": {"clip": True},
    }


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (8, r"is 8; allowed: \"none\", 16, or a mapping with bits, block_size, clip, scale_dtype, symmetric"),
        ({}, r"is {}; allowed"),
        ({"bitz": 4}, r"unknown key 'bitz'. Did you mean 'bits'"),
        ({"bits": 5}, "bits is 5; allowed: 2 or 3 or 4 or 8"),
        ({"symmetric": 1}, "symmetric is 1; allowed"),
    ],
)
def test_a_wrong_override_is_refused_with_its_pattern(override: object, message: str) -> None:
    with pytest.raises(UsageError, match=rf"^gptq: overrides\['\*\.o_proj'\]:? {message}"):
        parse_overrides("gptq", {"*.o_proj": override})
