"""Restore or compute: the decision follows measured seconds, and says why."""

import pytest

from ingot.runtime.kv.cost_model import CostModel, TierName


def model(host: float, disk: float, token: float) -> CostModel:
    """Seconds of a block from host memory, of a block from disk to host memory, and of a computed token."""
    costs = CostModel(block_tokens=4)
    costs.observe_block("host", host)
    costs.observe_block("disk", disk)
    costs.observe_prefill(100, 50, 50 * token)
    return costs


def test_before_a_prompt_was_computed_everything_is_restored() -> None:
    decision = CostModel(4).decide(["host", "disk"], 0)
    assert (decision.num_blocks, decision.saved_seconds) == (2, None)
    assert "no prompt was computed yet" in decision.reason


def test_what_restores_faster_than_it_computes_is_restored() -> None:
    decision = model(0.001, 0.002, token=0.001).decide(["host"] * 3, 0)
    assert decision.num_blocks == 3
    assert decision.saved_seconds == pytest.approx(3 * (0.004 - 0.001))
    assert decision.reason == "restoring is faster: 3.00 ms to restore, 12.00 ms to compute"


def test_what_computes_faster_is_computed() -> None:
    decision = model(0.001, 0.1, token=0.001).decide(["disk"] * 3, 0)
    assert decision.num_blocks == 0
    assert "computing is faster: 303.00 ms to restore, 12.00 ms to compute" in decision.reason


def test_by_the_rule_always_all_that_is_stored_is_restored() -> None:
    costs = CostModel(4, "always")
    costs.observe_block("host", 1.0)
    costs.observe_prefill(100, 50, 1e-6)
    decision = costs.decide(["host", "disk"], 0)
    assert (decision.num_blocks, decision.saved_seconds) == (2, None)
    assert "kv_restore is 'always'" in decision.reason
    assert costs.decide([], 0).num_blocks == 0


def test_slow_blocks_are_restored_where_those_after_them_make_up_for_it() -> None:
    costs = model(0.0, 0.006, token=0.001)
    both: list[TierName] = ["disk", "host"]
    assert costs.decide(["disk"], 0).num_blocks == 0
    assert costs.decide(both, 0).num_blocks == 2
    assert costs.decide(["host", "disk"], 0).num_blocks == 1


def test_a_token_costs_what_it_did_at_the_nearest_length_of_context() -> None:
    costs = CostModel(4)
    costs.observe_prefill(100, 50, 0.05)
    costs.observe_prefill(4000, 50, 0.5)
    costs.observe_prefill(9, 3, 30.0)  # fewer than a block: mostly the step's fixed cost
    assert costs.token_seconds(1) == pytest.approx(0.001)
    assert costs.token_seconds(100_000) == pytest.approx(0.01)


def test_averages_follow_new_measurements() -> None:
    costs = CostModel(4)
    for seconds in [1.0] * 10 + [2.0] * 60:
        costs.observe_block("host", seconds)
    assert costs.block_seconds("host") == pytest.approx(2.0, abs=0.01)


def test_nothing_stored_is_nothing_to_restore() -> None:
    assert CostModel(4).decide([], 0).num_blocks == 0


def test_with_side_state_a_prefix_ends_where_the_state_pays_for_its_copy() -> None:
    costs = model(0.001, 0.1, token=0.001)
    assert costs.decide(["host"] * 3, 0, {}).num_blocks == 0
    costs.observe_state("host", 0.005)
    assert costs.state_seconds("host") == 0.005
    assert costs.decide(["host"] * 3, 0, {1: "host", 2: "host"}).num_blocks == 2
    assert costs.decide(["host"] * 3, 0, {1: "host"}).num_blocks == 0
    assert costs.decide(["device"] * 2, 0, {2: "host"}).saved_seconds == pytest.approx(0.008 - 0.005)


def test_a_side_state_is_estimated_by_its_size_until_one_was_restored() -> None:
    costs = CostModel(4, state_blocks=2.5)
    costs.observe_block("host", 0.002)
    assert costs.state_seconds("host") == pytest.approx(0.005)
