"""Traffic: rates are kept, equal seeds send equal requests, prefixes are shared, and bad values are refused by name."""

from pathlib import Path

import numpy as np
import pytest

from ingot.errors import UsageError
from ingot.planning.simulation.traffic import RequestSizes, parse_traffic
from tests.each_case import each_case

CONTEXT = 4096


@each_case(("text", "rate"), [("poisson:5", 5), ("bursts:5:4", 5), ("bursts:5:0.3", 5), ("diurnal:5:9:1", 5)])
def test_rates_are_kept_and_seeds_decide(text: str, rate: float) -> None:
    traffic = parse_traffic(text, count=20_000, context_tokens=CONTEXT, seed=3)
    found = list(traffic)
    assert found == list(traffic)
    assert found != list(parse_traffic(text, count=20_000, context_tokens=CONTEXT, seed=4))
    assert [each.seconds for each in found] == sorted(each.seconds for each in found)
    hours = found[-1].seconds / 3600
    assert traffic.rate == rate
    if hours > 1:  # whole days, so that the swing is even
        found = [each for each in found if each.seconds <= 3600 * int(hours)]
    assert len(found) / found[-1].seconds == pytest.approx(rate, rel=0.15)


def test_bursts_vary_as_they_say() -> None:
    for variation in (0.3, 1.0, 4.0):
        found = list(parse_traffic(f"bursts:5:{variation}", count=40_000, context_tokens=CONTEXT))
        gaps = np.diff([each.seconds for each in found])
        assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.15)


def test_the_same_requests_are_sent_at_another_rate() -> None:
    traffic = parse_traffic("poisson:5", count=50, context_tokens=CONTEXT)
    for one, other in zip(traffic, traffic.at(10), strict=True):
        assert other.seconds == pytest.approx(one.seconds / 2)
        assert other.lengths == one.lengths


def test_prompts_share_their_beginnings_alone() -> None:
    sizes = RequestSizes(prompt_tokens=100, output_tokens=10, spread=0, shared_tokens=64, num_prefixes=2)
    prompts = [each.prompt(1000) for each in parse_traffic("at-once", sizes=sizes, count=30, context_tokens=CONTEXT)]
    assert all(len(prompt) == 164 for prompt in prompts)
    assert len({prompt[:64].tobytes() for prompt in prompts}) == 2
    assert len({prompt[64:96].tobytes() for prompt in prompts}) == 30


def test_requests_fit_the_context() -> None:
    sizes = RequestSizes(prompt_tokens=5000, output_tokens=4000, shared_tokens=100)
    for each in parse_traffic("at-once", sizes=sizes, count=100, context_tokens=CONTEXT):
        assert each.lengths.prompt_tokens + each.lengths.output_tokens <= CONTEXT
        assert len(each.prompt(1000)) == each.lengths.prompt_tokens


def test_a_burst_gpt_trace_and_an_aibrix_trace_are_read(tmp_path: Path) -> None:
    burst, aibrix = tmp_path / "burst.csv", tmp_path / "aibrix.jsonl"
    header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    burst.write_text(
        f"{header}\n5,ChatGPT,472,18,490,Conversation log\n7.5,GPT-4,10,0,10,API log\n45,GPT-4,9,2,11,API log\n"
    )
    aibrix.write_text(
        '{"timestamp": 0, "requests": [{"prompt": "x", "prompt_length": 10, "output_length": 3, "session_id": 0}]}\n'
        '{"timestamp": 1500, "requests": [{"prompt_length": 4, "output_length": 1},'
        ' {"prompt_length": 5, "output_length": 2}]}\n'
    )
    found = list(parse_traffic(str(burst), context_tokens=CONTEXT))
    assert [(each.seconds, each.lengths.prompt_tokens, each.lengths.output_tokens) for each in found] == [
        (0.0, 472, 18),
        (40.0, 9, 2),
    ]
    found = list(parse_traffic(str(aibrix), context_tokens=CONTEXT, speed=3))
    assert [each.seconds for each in found] == [0.0, 0.5, 0.5]


@each_case(
    ("text", "message"),
    [
        ("poisson:0", "the load poisson:0 has '0' for a number; it must be above 0"),
        ("poisson:-1", "has '-1' for a number"),
        ("poisson:nan", "has 'nan' for a number"),
        ("poisson:inf", "has 'inf' for a number"),
        ("poisson", "has 0 numbers; it must be a trace's file, poisson:RATE"),
        ("bursts:1", "has 1 numbers"),
        ("diurnal:5:11", "the peak must be from 5 to 10"),
        ("nothing.csv", "the load 'nothing.csv' is neither a file nor a distribution"),
    ],
)
def test_what_cannot_be_sent_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        list(parse_traffic(text, context_tokens=CONTEXT))


def test_a_log_of_texts_and_a_trace_without_outputs_are_refused(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"timestamp": 0, "body": {"prompt": "x"}}\n')
    with pytest.raises(UsageError, match="is a log of texts; a simulation needs lengths"):
        parse_traffic(str(log), context_tokens=CONTEXT)
    log.write_text('{"timestamp": 0, "input_length": 5, "output_length": 0, "hash_ids": [1]}\n')
    with pytest.raises(UsageError, match="has a prompt and an output"):
        parse_traffic(str(log), context_tokens=CONTEXT)


def test_speed_and_counts_out_of_range_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="speed and scale are for traces"):
        parse_traffic("poisson:1", context_tokens=CONTEXT, speed=2)
    with pytest.raises(UsageError, match="requests is 0"):
        parse_traffic("poisson:1", count=0, context_tokens=CONTEXT)
    with pytest.raises(UsageError, match="spread is -1"):
        RequestSizes(spread=-1)
    with pytest.raises(UsageError, match="prompt_tokens is 0"):
        RequestSizes(prompt_tokens=0)
