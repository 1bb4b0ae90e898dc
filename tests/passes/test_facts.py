"""Passes are judged by the facts that their classes declare, third parties' passes by the same ones as Ingot's own."""

from collections.abc import Sequence

import pytest

from ingot.builder.quantization_evidence import QuantizationObserver
from ingot.errors import RecipeError
from ingot.passes.base import Pass
from ingot.passes.manager import PassManager
from ingot.passes.quantization.quantize_weights import QuantizeWeights
from ingot.passes.registry import PASSES, make_pass
from ingot.pipeline.interchange.weight_sources import weights_before_passes
from ingot.pipeline.recipe.load import load_recipe
from tests.each_case import each_case
from tests.passes import example_passes
from tests.passes.example_passes import AllOptions, AssignSchemes, HalveWeights, RoundWeights, install
from tests.passes.tiny_decoder import TinyDecoder

THIRD_PARTY = (HalveWeights, RoundWeights, AssignSchemes)
CALIBRATION = "calibration={text: text.txt}"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, *((made.name, f"{example_passes.__name__}:{made.__name__}") for made in THIRD_PARTY))


@each_case("name", PASSES)
def test_only_lossy_passes_change_weights_or_schemes(name: str) -> None:
    made = make_pass(name)
    assert made.is_lossy or (made.keeps_schemes and not made.changes_weights)


def test_a_lossy_pass_that_declares_nothing_is_assumed_to_change_weights_and_schemes() -> None:
    assert (HalveWeights().changes_weights, HalveWeights().keeps_schemes) == (True, False)
    assert (AllOptions().changes_weights, AllOptions().keeps_schemes) == (False, True)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["passes=[round-weights]", "calibration=null"], "round-weights .*`calibration`"),
        (["passes=[{round-weights: {float8: true}}]", CALIBRATION], "round-weights .* 8-bit floats, .* SM 89"),
        (["passes=[{round-weights: {kv: fp8}}]", CALIBRATION], "cuda-sm86 does not read keys and values in fp8"),
        (["passes=[assign-schemes]"], "assign-schemes assigns bits that no later pass applies"),
        (["passes=[quantize-weights, assign-schemes]"], "assign-schemes assigns bits that no later pass applies"),
    ],
)
def test_a_recipe_is_checked_against_the_facts(overrides: list[str], problem: str) -> None:
    with pytest.raises(RecipeError, match=problem):
        load_recipe("int4-cuda", ["target=cuda-sm86", *overrides])


def test_a_recipe_that_fits_the_facts_is_accepted() -> None:
    passes = "passes=[{round-weights: {kv: fp8, float8: true}}, assign-schemes, gptq]"
    recipe = load_recipe("int4-cuda", ["target=cuda-sm89", passes, CALIBRATION])
    assert [made.name for made in recipe.make_passes()][:3] == ["round-weights", "assign-schemes", "gptq"]


def test_a_baseline_omits_lossy_passes() -> None:
    recipe = load_recipe("int4-cuda", ["passes=[clean-up, halve-weights]"])
    assert [entry.name for entry in recipe.baseline().passes] == ["clean-up"]


@pytest.mark.parametrize(
    ("passes", "changed_by"),
    [
        ([HalveWeights(), QuantizeWeights()], ""),
        ([QuantizeWeights(), RoundWeights()], ""),
        ([QuantizeWeights(), HalveWeights()], "halve-weights"),
    ],
)
def test_weights_that_change_after_rounding_are_attributed_to_their_pass(
    passes: Sequence[Pass], changed_by: str
) -> None:
    observer = QuantizationObserver(lambda: TinyDecoder().model)
    PassManager(passes, observer).run(TinyDecoder().model)
    assert observer.before is not None
    assert observer.changed_by == changed_by


def test_an_export_knows_its_schemes_where_passes_keep_them() -> None:
    model, names = TinyDecoder().model, ["layers.0.q_proj.weight"]
    assert weights_before_passes(model, [RoundWeights(), QuantizeWeights()], names) is not None
    assert weights_before_passes(model, [HalveWeights(), QuantizeWeights()], names) is None
