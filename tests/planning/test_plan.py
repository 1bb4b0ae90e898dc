"""A plan says what fits, how fast, at what cost, and what is missing where a service level is not met."""

from dataclasses import replace

import pytest

from ingot.errors import UsageError
from ingot.planning.hardware import find_hardware
from ingot.planning.load import Load
from ingot.planning.model_shape import ModelShape
from ingot.planning.plan import make_plan
from ingot.planning.roofline import IDEAL, data_sheet
from ingot.planning.service_levels import LevelBounds, find_service_level
from tests.planning.shapes import COUNTED, dense_shape, mixture_shape, subject

H100 = find_hardware("h100")
LLAMA_70B = dense_shape(80, 8192, 28672, 64, 8)
CHAT = ("chat", find_service_level("chat"))


def test_a_small_model_fits_on_one_device_and_is_bound_by_memory() -> None:
    plan = make_plan(subject(), "h100", H100, Load(8, 1024, 256))
    assert plan.parallelism is not None
    assert plan.parallelism.devices == 1
    assert plan.latency is not None
    assert plan.terms[0].name == "linear layers"
    assert plan.terms[0].resource == "memory"
    assert plan.latency.running == 8
    assert plan.memory.used <= plan.memory.total
    assert [one.load.concurrency for one in plan.sweep][:4] == [1, 2, 4, 8]


def test_the_bytes_of_a_sequence_are_among_the_figures() -> None:
    figures = make_plan(subject(LLAMA_70B), "h100", H100, Load(1, 3072, 1024)).as_json()
    assert figures["kv"]["sequence_bytes"] == 1_342_177_280
    assert figures["hardware"]["sources"]
    assert figures["source"]
    assert figures["step_model"]["source"].startswith("data sheet of NVIDIA H100")


def test_a_model_that_one_device_does_not_hold_is_spread_over_several() -> None:
    plan = make_plan(subject(LLAMA_70B), "h100", H100, Load(1, 3072, 1024))
    assert not plan.memory.fits
    assert plan.parallelism is not None
    assert (plan.parallelism.tensor, plan.parallelism.pipeline) == (4, 1) or plan.parallelism.devices == 2
    wide = make_plan(subject(LLAMA_70B), "h100", H100, Load(1, 3072, 1024), devices=8)
    assert plan.latency is not None
    assert wide.latency is not None
    assert wide.latency.tpot < plan.latency.tpot
    assert any(term.name == "all-reduces" for term in wide.terms)


def test_a_model_that_fits_nowhere_has_no_times() -> None:
    huge = dense_shape(2000, 65536, 262144, 512, 8)
    plan = make_plan(subject(huge), "l4", find_hardware("l4"), Load(1, 1024, 128))
    figures = plan.as_json()
    assert (figures["parallelism"], figures["latency"], figures["sweep"], figures["money"]) == (None, None, [], {})
    assert figures["memory"]["fits"] is False


def test_a_service_level_that_is_missed_names_the_bound_and_the_nearest_load_that_passes() -> None:
    missed = make_plan(subject(), "h100", H100, Load(200, 8192, 256), level=CHAT)
    assert missed.verdict.startswith("does not meet chat: T")
    assert "times the bound of" in missed.verdict
    assert missed.best is not None
    assert f"; {missed.best.load.concurrency} at a time meet it" in missed.verdict
    impossible = LevelBounds(words="", tpot=1e-6)
    never = make_plan(subject(), "h100", H100, Load(4), level=("impossible", impossible))
    assert never.verdict.endswith("one at a time does not meet it either")
    met = make_plan(subject(), "h100", H100, Load(4, 256, 128), level=CHAT)
    assert met.verdict == "meets chat at the upper end of the interval"


def test_money_follows_price_and_throughput() -> None:
    plan = make_plan(subject(), "h100", H100, Load(8), price=3.6, api_price=0.001)
    money, latency = plan.money(), plan.latency
    assert latency is not None
    assert money["source"] == "--price"
    assert money["per_1000_tokens"] == pytest.approx(1 / latency.tokens_per_second)
    assert money["per_month"] == pytest.approx(3.6 * 730)
    assert money["break_even_tokens_a_day"] == pytest.approx(3.6 * 730 / 30 * 1e6)
    without = make_plan(subject(), "l4", find_hardware("l4"), Load(1, 256, 64))
    assert without.money() == {}


def test_a_load_beyond_the_context_and_impossible_devices_are_refused() -> None:
    with pytest.raises(UsageError, match="the model's context holds 131,072"):
        make_plan(subject(), "h100", H100, Load(1, 200_000, 100))
    with pytest.raises(UsageError, match="3 devices do not hold the model"):
        make_plan(subject(), "h100", H100, Load(), devices=3)


def test_a_step_reads_and_writes_the_side_state_of_each_sequence() -> None:
    shape = dense_shape()
    recurrent = replace(shape, kv=shape.kv.model_copy(update={"state_bytes": 50_000_000}))
    step = Load(16, 512, 128).decode_step(16)
    more = data_sheet(recurrent, H100, IDEAL).seconds(step) - data_sheet(shape, H100, IDEAL).seconds(step)
    assert more == pytest.approx(16 * 2 * 50e6 / 3.35e12)


def test_an_ideal_data_sheet_is_the_floor_of_a_decode_step() -> None:
    shape = dense_shape()
    model = data_sheet(shape, H100, IDEAL)
    seconds = model.seconds(Load(1, 1, 1).decode_step())
    assert seconds == pytest.approx(shape.matmul_bytes / H100.bandwidth, rel=1e-3)
    assert model.relative_error == 0


def test_drafts_that_are_right_make_a_token_cheaper_at_low_batch_alone() -> None:
    def tpot(batch: int, drafted: int) -> float:
        load = Load(batch, 256, 256, drafted_tokens=drafted, acceptance=0.7 if drafted else 0.0)
        latency = make_plan(subject(), "h100", H100, load).latency
        assert latency is not None
        return latency.tpot

    assert tpot(1, 4) < 0.5 * tpot(1, 0)
    assert tpot(200, 4) / tpot(200, 0) > 1.5 * tpot(1, 4) / tpot(1, 0)


def test_a_mixture_on_several_devices_takes_the_quickest_way_to_share_it() -> None:
    plan = make_plan(subject(mixture_shape()), "h100", H100, Load(128, 1024, 256), devices=8)
    assert plan.parallelism is not None
    assert plan.latency is not None
    ways = {way.expert: latency.tokens_per_second for way, latency in plan.alternatives}
    assert set(ways) == {1, 8}
    assert plan.latency.tokens_per_second == pytest.approx(max(ways.values()))
    assert ways[plan.parallelism.expert] == max(ways.values())


def test_a_step_of_many_rows_is_quicker_where_they_reach_fewer_experts() -> None:
    def tpot(rows: int, shape: ModelShape) -> float:
        plan = make_plan(subject(shape), "h100", H100, Load(rows, 1024, 256))
        assert plan.latency is not None
        return plan.latency.itl

    even, counted = mixture_shape(layers=8), mixture_shape(layers=8, reach=COUNTED)
    assert tpot(1, counted) == pytest.approx(tpot(1, even))
    assert tpot(16, counted) < 0.8 * tpot(16, even)


def test_stages_over_nodes_idle_in_the_steps_of_the_plan() -> None:
    huge = dense_shape(126, 16384, 53248, 128, 8)
    plan = make_plan(subject(huge), "h100", H100, Load(4, 1024, 256))
    assert plan.parallelism is not None
    assert plan.parallelism.pipeline == 2
    names = {term.name for term in plan.terms}
    assert {"pipeline bubble of linear layers", "transfers between stages"} <= names


def test_prompts_on_other_devices_pay_by_the_bytes_of_their_kv_over_the_link() -> None:
    plan = make_plan(subject(), "h100", H100, Load(32, 2048, 256))
    node, network = plan.disaggregation["node"], plan.disaggregation["network"]
    assert node.transfer_bytes == 2048 * 131072
    assert network.transfer_seconds == pytest.approx(9 * node.transfer_seconds)
    assert plan.latency is not None
    assert node.interference_seconds == pytest.approx((plan.latency.tpot - plan.latency.itl) * 256 * 31 / 32)
    assert node.pays


def test_a_request_alone_has_no_prompts_of_others_beside_it() -> None:
    plan = make_plan(subject(), "h100", H100, Load(1, 2048, 256))
    assert [way.pays for way in plan.disaggregation.values()] == [False, False]
