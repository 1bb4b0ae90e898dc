"""mixed-precision: each weight's scheme within a budget, followed by the later quantizers, shown in a table."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from ingot.errors import PassError, UsageError
from ingot.passes.calibration import CALIBRATION_FACTS, calibrate_with
from ingot.passes.lowering.lower_onnxruntime_cpu import LowerOnnxruntimeCpu
from ingot.passes.manager import PassManager
from ingot.passes.quantization.bit_assignment import assignment_table
from ingot.passes.quantization.mixed_precision import MIXED_FACTS, MixedPrecision
from ingot.passes.quantization.quantize_weights import QUANTIZATION_FACTS, QuantizeWeights
from ingot.passes.quantization.schemes import SCHEME_KEY
from ingot.passes.registry import make_pass
from ingot.passes.weights import weight_sites
from tests.each_case import each_case
from tests.passes.calibration_data import calibration
from tests.passes.tiny_decoder import TinyDecoder

KEPT: dict[str, object] = {"lm_head": "none", "embedding": "none"}


def mixed(*after: str, tied: bool = True, **options: Any) -> ir.Model:
    """The tiny decoder with bits assigned, after the passes that follow."""
    model = TinyDecoder(tied=tied).model
    passes = [make_pass("mixed-precision", options), *(make_pass(name, KEPT) for name in after)]
    with calibrate_with(calibration()):
        PassManager(passes).run(model)
    return model


def facts(model: ir.Model) -> dict[str, Any]:
    found: dict[str, Any] = MIXED_FACTS.of(model)
    return found


def schemes(model: ir.Model) -> dict[str, dict[str, Any]]:
    return {node.name or "": json.loads(node.metadata_props[SCHEME_KEY]) for node in model.graph if _assigned(node)}


def _assigned(node: ir.Node) -> bool:
    return SCHEME_KEY in node.metadata_props


def quantized(model: ir.Model) -> dict[str, tuple[int, int]]:
    rows = QUANTIZATION_FACTS.of(model).weights
    return {row["name"]: (row["bits"], row["block_size"]) for row in rows}


@pytest.fixture(scope="module")
def assigned() -> ir.Model:
    return mixed()


def test_at_the_size_of_a_uniform_scheme_it_predicts_less_loss(assigned: ir.Model) -> None:
    found = facts(assigned)
    uniform = next(row for row in found["uniform"] if (row["bits"], row["block_size"]) == (4, 128))
    assert found["budget"] == {"bytes": uniform["bytes"]}
    assert found["bytes"] <= uniform["bytes"]
    assert 0 < found["predicted_kl"] < uniform["kl"]


def test_the_table_adds_up_and_holds_the_alternatives(assigned: ir.Model) -> None:
    found, of_nodes = facts(assigned), schemes(assigned)
    assert [row["name"] for row in found["weights"]] == list(of_nodes)
    assert len(of_nodes) == 14
    assert found["bytes"] == sum(row["bytes"] for row in found["weights"])
    assert found["predicted_kl"] == pytest.approx(sum(row["kl"] for row in found["weights"]))
    elements = sum(rows * columns for rows, columns in (row["shape"] for row in found["weights"]))
    assert found["bits_per_weight"] == pytest.approx(8 * found["bytes"] / elements)
    for row in found["weights"]:
        assert len(row["alternatives"]) == 4 * 3 + 1
        assert sum(other["measured"] for other in row["alternatives"]) == 3
        same = [other for other in row["alternatives"] if other["bytes"] == row["bytes"] and other["kl"] == row["kl"]]
        assert same
        assert of_nodes[row["name"]] == {key: row[key] for key in ("bits", "block_size")} | {"symmetric": False}
    assert CALIBRATION_FACTS.is_in(assigned)


def test_the_printed_table_has_each_weights_scheme_and_alternatives(assigned: ir.Model) -> None:
    header, first, *_, total = assignment_table(facts(assigned))
    assert header[:5] == ("weight", "bits", "block", "KB", "KL alone")
    assert first[0] == "layers.0.q_proj"
    assert any(cell.startswith(("2/", "3/", "4/", "8/")) and "KB" in cell for cell in first[5:])
    assert total[0] == "total"
    assert len(assignment_table(facts(assigned))) == 16


@pytest.mark.parametrize("quantizer", ["quantize-weights", "gptq"])
def test_the_quantizer_that_follows_takes_each_weight_s_scheme(quantizer: str) -> None:
    model = mixed(quantizer, budget_bits=4.6)
    chosen = {name: (scheme["bits"], scheme["block_size"]) for name, scheme in schemes(model).items()}
    assert len(set(chosen.values())) > 1
    assert quantized(model) == chosen


@pytest.mark.parametrize("before", ["awq", "rotate"])
def test_it_works_after_the_passes_that_prepare_weights(before: str) -> None:
    model = TinyDecoder(tied=False, weight_dtype=np.float32).model
    exact = np.concatenate(list(calibration().logits(model)))
    names = ("fold-constants", "pack-projections", before, "mixed-precision", "gptq")
    options: dict[str, dict[str, object]] = {"mixed-precision": {"budget_bits": 5.0}, "gptq": KEPT}
    with calibrate_with(calibration()):
        PassManager([make_pass(name, options.get(name)) for name in names]).run(model)
    assert quantized(model) == {name: (one["bits"], one["block_size"]) for name, one in schemes(model).items()}
    error = np.concatenate(list(calibration().logits(model))) - exact
    assert np.square(error).mean() < 0.05 * exact.var()


def test_a_budget_of_kl_gives_the_fewest_bytes_that_keep_it() -> None:
    loose, tight = (facts(mixed(budget_kl=kl)) for kl in (1e-3, 1e-5))
    assert loose["predicted_kl"] <= 1e-3
    assert tight["predicted_kl"] <= 1e-5
    assert loose["bytes"] < tight["bytes"]
    assert facts(mixed(budget_kl=1e-15))["weights"][0]["bits"] == 16


def test_scales_of_16_bits_leave_room_for_better_codes() -> None:
    options: dict[str, Any] = {"same_size_as": {"bits": 4, "block_size": 32, "scale_dtype": "float32"}}
    wide, narrow = (facts(mixed(scale_dtype=dtype, **options)) for dtype in ("float32", "float16"))
    assert narrow["budget"] == wide["budget"]
    assert narrow["uniform"][0]["bytes"] < wide["uniform"][0]["bytes"]
    assert narrow["predicted_kl"] < wide["predicted_kl"]


def test_nominal_3_bits_are_cheaper_than_4_and_are_chosen() -> None:
    options: dict[str, Any] = {"budget_bits": 3.4, "bits": (3, 4), "block_sizes": (128,)}
    assert {scheme["bits"] for scheme in schemes(mixed(count="nominal", **options)).values()} == {3, 4}


def test_head_and_table_are_optional_and_share_a_scheme_when_tied() -> None:
    tied = schemes(mixed(lm_head=True, budget_bits=5.0))
    assert tied["lm_head"] == tied["embed_tokens"]
    model = mixed("quantize-weights", lm_head=True, embedding=True, budget_bits=5.0, tied=False)
    assert {"lm_head", "embed_tokens"} <= schemes(model).keys()
    assert all(site.is_quantized for site in weight_sites(model) if schemes(model)[site.node.name or ""]["bits"] != 16)


def test_weights_that_engines_pack_into_one_matmul_share_a_scheme(assigned: ir.Model) -> None:
    of_nodes = schemes(assigned)
    for layer in range(2):
        for names in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            assert len({str(of_nodes[f"layers.{layer}.{name}"]) for name in names}) == 1
    assert len({str(scheme) for scheme in of_nodes.values()}) > 1


def test_excluded_weights_get_no_scheme_and_count_in_no_budget(assigned: ir.Model) -> None:
    model = mixed(exclude=["*down_proj"])
    left_out = {name for name in schemes(assigned) if name.endswith("down_proj")}
    assert schemes(model).keys() == schemes(assigned).keys() - left_out
    assert left_out
    assert facts(model)["budget"]["bytes"] < facts(assigned)["budget"]["bytes"]
    with pytest.raises(PassError, match="exclude 'nowhere' matches no weight; the nearest are"):
        mixed(exclude=["nowhere"])


def test_a_second_run_changes_nothing(assigned: ir.Model) -> None:
    with calibrate_with(calibration()):
        (record,) = PassManager([MixedPrecision()]).run(assigned)
    assert not record.modified


def test_the_lowering_refuses_schemes_that_no_quantizer_used(assigned: ir.Model) -> None:
    with pytest.raises(PassError, match=r"mixed-precision chose bits for 'layers.0.q_proj' and \d+ more, and nothing"):
        PassManager([LowerOnnxruntimeCpu()]).run(assigned)


def test_it_is_refused_after_the_quantizer() -> None:
    model = TinyDecoder().model
    with calibrate_with(calibration()), pytest.raises(PassError, match="put it before the pass that quantizes"):
        PassManager([QuantizeWeights(), MixedPrecision()]).run(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget_bytes": 1000}, r"smallest size .* is [\d,]+ bytes \(3\.\d\d bits per weight\), the budget is 1,000"),
        ({"budget_bits": 2.0}, r"raise the budget, or add fewer bits or larger blocks"),
        ({"budget_kl": 1e-12, "bits": (2, 4)}, r"the least KL that these schemes reach is .*, the budget is 1e-12"),
    ],
)
def test_a_budget_that_cannot_be_met_is_refused_with_the_smallest(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PassError, match=message):
        mixed(**options)


@each_case(
    ("options", "message"),
    [
        ({"budget_bits": 4.0, "budget_kl": 0.1}, "budget_bits and budget_kl are given; give one budget"),
        ({"budget_bits": 0.0}, r"budget_bits is 0\.0; allowed: a number above 0"),
        ({"tokens": 0}, "tokens is 0; allowed: a whole number from 1"),
        ({"bits": (16,)}, "one of 2, 3, 4 or 8 among the bits"),
        ({"block_sizes": ()}, "give both"),
        ({"bits": (5,)}, r"bits is \(5,\); allowed: a list, each 2 or 3 or 4 or 8 or 16"),
        ({"same_size_as": {"bits": 4}}, "same_size_as is {'bits': 4}; allowed: bits and block_size, both"),
        ({"same_size_as": {"bits": 5, "block_size": 32}}, r"same_size_as'\]: bits is 5"),
    ],
)
def test_bad_options_are_refused(options: Mapping[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        MixedPrecision(**options)
