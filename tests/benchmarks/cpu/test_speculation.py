"""The speculation benchmark: drafts of the rounds alone, prompts that repeat or do not."""

from benchmarks.cpu.speculation import Row, prompts, since

from ingot.runtime.speculation.counters import SpeculationMetrics


def _drafts(
    drafts: int, tokens: int, tested: int, accepted: int, per_pos: dict[str, int], per_length: dict[str, int]
) -> SpeculationMetrics:
    return SpeculationMetrics(
        num_drafts=drafts,
        num_draft_tokens=tokens,
        num_tested_tokens=tested,
        num_accepted_tokens=accepted,
        num_accepted_tokens_per_pos=per_pos,
        num_drafts_per_length=per_length,
        num_drafts_by_kind={"lookup": drafts},
        num_draft_tokens_by_kind={"lookup": tokens},
        num_accepted_tokens_by_kind={"lookup": accepted},
    )


def test_drafts_before_the_rounds_are_left_out() -> None:
    before = _drafts(2, 8, 6, 4, {"0": 2, "1": 2}, {"4": 2})
    after = _drafts(5, 20, 12, 7, {"0": 4, "1": 2, "2": 1}, {"4": 4, "8": 1})
    found = since(before, after)
    assert found == _drafts(3, 12, 6, 3, {"0": 2, "1": 0, "2": 1}, {"4": 2, "8": 1})
    assert since(None, None) is None
    record = Row("fp32-cpu", "ordinary", 0.0, "lookup", 1000.0, 1.1, 0.96, 1.2, 9, found).record()
    assert record["accepted_per_position"] == [0.667, 0.0, 0.333]
    assert record["mean_accepted_length"] == 2.0


def test_a_row_is_below_the_bound_only_where_its_whole_interval_is() -> None:
    row = Row("fp32-cpu", "ordinary", 0.0, "lookup", 1000.0, 0.95, 0.93, 0.98, 9)
    assert row.holds
    assert not Row("fp32-cpu", "ordinary", 0.0, "lookup", 1000.0, 0.95, 0.93, 0.969, 9).holds


def test_prompts_of_a_kind_differ_and_repeat_as_their_name_says() -> None:
    text = "".join(f"line {number} of self\n" for number in range(12_000))
    for kind, found in prompts(text).items():
        assert len(set(found)) == len(found) > 1
        for prompt in found:
            assert (prompt[:150] in prompt[1:]) == (kind == "repeated")
