"""sensitivity: the KL of one weight alone is that of a whole model run in which only this weight is rounded."""

from collections.abc import Callable
from functools import partial

import numpy as np
import onnx_ir as ir
import pytest

from ingot.errors import PassError
from ingot.passes.numerics.arrays import Float32Array
from ingot.passes.numerics.rounding import round_weight
from ingot.passes.numerics.scheme import Scheme
from ingot.passes.printing import model_to_text
from ingot.passes.quantization.sensitivity import (
    Sensitivity,
    divergences_of_each,
    infer_kl,
    schemes_to_run,
    weight_sensitivities,
)
from ingot.passes.weights import Role, change_stored, float32_values
from ingot.progress import progress_to
from tests.passes.calibration_data import SEQUENCES, TOKENS, calibration
from tests.passes.tiny_decoder import TinyDecoder

SCHEMES = [Scheme(2, 32, False), Scheme(4, 32, False), Scheme(8, 0, True)]
LINEAR = frozenset[Role]({"linear"})
ALL = frozenset[Role]({"linear", "head", "embedding"})


def rounded(values: Float32Array, scheme: Scheme) -> Float32Array:
    return round_weight(values, scheme).restored(scheme)


def mean_kl(changed: ir.Model, like: ir.Model) -> float:
    """In float64, by the definition."""
    exact, other = (np.concatenate(list(calibration().logits(m))).astype(np.float64) for m in (like, changed))
    log_p, log_q = (z - np.log(np.exp(z).sum(axis=1, keepdims=True)) for z in (exact, other))
    return float((np.exp(log_p) * (log_p - log_q)).sum(axis=1).mean())


def by_brute_force(weight: str, scheme: Scheme, tied: bool) -> float:
    """The KL of a model in which every reader of the weight reads the rounded one."""
    changed = TinyDecoder(tied=tied).model
    change_stored(changed.graph, changed.graph.initializers[weight], partial(rounded, scheme=scheme))
    return mean_kl(changed, TinyDecoder(tied=tied).model)


def sensitivities(tied: bool = True, roles: frozenset[Role] = LINEAR) -> dict[str, Sensitivity]:
    found = weight_sensitivities(
        TinyDecoder(tied=tied).model, calibration(), SCHEMES, tokens=SEQUENCES * TOKENS, roles=roles
    )
    return {each.name: each for each in found}


@pytest.mark.parametrize("tied", [True, False])
def test_it_is_the_kl_of_a_whole_run_with_that_weight_rounded(tied: bool) -> None:
    found = sensitivities(tied, ALL)
    assert len(found) == (15 if tied else 16)
    for name in ("embed_tokens", "layers.0.q_proj", "layers.0.o_proj", "layers.1.down_proj", "lm_head"):
        if tied and name == "lm_head":
            continue
        each = found[name]
        for scheme in SCHEMES:
            brute = by_brute_force(each.sites[0].weight.name or "", scheme, tied)
            assert each.kl[scheme] == pytest.approx(brute, rel=2e-3), (name, scheme)


def test_fewer_bits_cost_more_and_the_order_is_that_of_the_graph() -> None:
    found = sensitivities()
    assert list(found)[:4] == [f"layers.0.{name}_proj" for name in "qkvo"]
    for each in found.values():
        assert each.kl[SCHEMES[0]] > 10 * each.kl[SCHEMES[1]] > 100 * each.kl[SCHEMES[2]] > 0
        assert each.output_error[SCHEMES[0]] > each.output_error[SCHEMES[1]] > each.output_error[SCHEMES[2]] > 0
        assert each.measured == set(SCHEMES)


def test_rounding_by_gptq_costs_less_than_rounding_to_nearest() -> None:
    model, scheme = TinyDecoder().model, [Scheme(3, 32, False)]
    nearest = weight_sensitivities(model, calibration(), scheme)
    gptq = weight_sensitivities(model, calibration(), scheme, rounding="gptq")
    assert sum(each.kl[scheme[0]] for each in gptq) < 0.7 * sum(each.kl[scheme[0]] for each in nearest)


@pytest.mark.parametrize("points", [1, 2])
def test_schemes_that_are_not_run_are_inferred_from_the_error_of_the_outputs(points: int) -> None:
    schemes = [Scheme(bits, block, False) for bits in (2, 3, 4, 8) for block in (128, 32)]
    all_run = weight_sensitivities(TinyDecoder().model, calibration(), schemes)
    some = weight_sensitivities(TinyDecoder().model, calibration(), schemes, points=points)  # type: ignore[arg-type]
    for run, guessed in zip(all_run, some, strict=True):
        assert len(guessed.measured) == points
        assert all(guessed.kl[scheme] == run.kl[scheme] for scheme in guessed.measured)
        ratios = [guessed.kl[scheme] / run.kl[scheme] for scheme in schemes if scheme.bits in (3, 4)]
        assert min(ratios) > 0.5
        assert max(ratios) < 2


def test_an_unchanged_weight_costs_nothing_and_the_model_stays() -> None:
    model = TinyDecoder().model
    before = model_to_text(model)

    def unchanged(name: str) -> Callable[[], Float32Array]:
        operand = next(node for node in model.graph if node.name == name).inputs[1]
        assert operand is not None
        return lambda: float32_values(operand)

    names = ["layers.1.v_proj", "layers.0.gate_proj"]
    assert divergences_of_each(model, calibration(), {name: unchanged(name) for name in names}) == {
        "layers.1.v_proj": 0.0,
        "layers.0.gate_proj": 0.0,
    }
    assert model_to_text(model) == before


def test_weights_of_the_caller_are_tried_one_at_a_time() -> None:
    model, scheme = TinyDecoder(tied=False).model, SCHEMES[1]
    by_name = {each.name: each for each in weight_sensitivities(model, calibration(), [scheme], roles=ALL)}

    def made(name: str) -> Callable[[], Float32Array]:
        return lambda: rounded(float32_values(by_name[name].sites[0].operand), scheme)

    found = divergences_of_each(model, calibration(), {name: made(name) for name in ("lm_head", "embed_tokens")})
    assert found == {name: by_name[name].kl[scheme] for name in ("lm_head", "embed_tokens")}


def test_a_name_that_reads_no_weight_is_refused_with_the_nearest() -> None:
    with pytest.raises(PassError, match=r"'layers.0.qproj' reads no weight. Did you mean 'layers\.0\.q_proj"):
        divergences_of_each(TinyDecoder().model, calibration(), {"layers.0.qproj": lambda: np.zeros(1, np.float32)})


def test_progress_reaches_its_total() -> None:
    seen: list[tuple[str, int, int]] = []
    with progress_to(lambda name, done, total: seen.append((name, done, total))):
        weight_sensitivities(TinyDecoder().model, calibration(), SCHEMES[:1], name="mine")
    assert len(seen) == 14
    assert seen[-1][1] == seen[-1][2]
    assert {name for name, _, _ in seen} == {"mine"}


def test_a_loss_too_large_for_exp_is_a_number() -> None:
    model = TinyDecoder(tied=False).model
    head = next(node for node in model.graph if node.name == "lm_head").inputs[1]
    assert head is not None
    (kl,) = divergences_of_each(model, calibration(), {"lm_head": lambda: float32_values(head) * -200}).values()
    assert 100 < kl < 1e4


def test_points_are_at_the_coarse_end_and_the_middle() -> None:
    schemes = [Scheme(bits, block, False) for bits in (8, 4, 3, 2) for block in (32, 128)]
    assert schemes_to_run(schemes, "all") == schemes
    assert schemes_to_run(schemes, 1) == [Scheme(3, 128, False)]
    assert schemes_to_run(schemes, 2) == [Scheme(2, 128, False), Scheme(4, 128, False)]
    assert schemes_to_run(schemes[:1], 2) == schemes[:1]


def test_inferred_losses_match_their_points_and_fall_with_the_error_below_them() -> None:
    known = [(4.0, 0.02), (1.0, 0.004)]
    assert [infer_kl(error, known) for error, _ in known] == [0.02, 0.004]
    assert 0.004 < infer_kl(2.0, known) < 0.02
    assert infer_kl(0.25, known) == 0.001
    assert infer_kl(3.0, [(1.0, 0.004)]) == pytest.approx(0.012)
    assert infer_kl(0.0, known) == 0.0
