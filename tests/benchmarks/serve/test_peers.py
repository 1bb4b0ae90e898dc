"""The benchmark next to llama.cpp's server counts every token, refuses what is not a stream, and divides by rounds."""

import pytest
from benchmarks.cpu.serve import prompts_of
from benchmarks.serve.peers import LLAMA, Outcome, measure, row_of, serve

from tests.runtime.engines import text_engine
from tests.runtime.server.servers import running


def test_every_request_is_served_by_every_server() -> None:
    with running(text_engine()) as one, running(text_engine()) as other:
        before = [each.model().engine.metrics().output_tokens for each in (one, other)]
        rounds = measure({LLAMA: one.url, "ingot": other.url}, 3, 1, 4, 4096)
        after = [each.model().engine.metrics().output_tokens for each in (one, other)]
        assert [new - old for new, old in zip(after, before, strict=True)] == [2 * 24 * 4] * 2  # one round warms up
        assert [sorted(each) for each in rounds] == [["ingot", LLAMA]]
        assert all(outcome.tokens_per_second > outcome.ttft_seconds > 0 for outcome in rounds[0].values())
        with pytest.raises(RuntimeError, match=r"the server answered b'HTTP/1\.1 400"):
            serve(one.url, [[99999]], 1, 4)


def test_a_stream_that_ends_early_is_not_counted() -> None:
    with running(text_engine()) as server:
        prompts = [*prompts_of(1, 1, 4096), [1] * 510]  # the second has room for two tokens only
        with pytest.raises(RuntimeError, match="for 2 requests of 7"):
            serve(server.url, prompts, 2, 7)


def test_ratios_are_those_of_each_round() -> None:
    rounds = [
        {LLAMA: Outcome(100.0, 0.2), "ingot": Outcome(300.0, 0.1)},
        {LLAMA: Outcome(10.0, 0.4), "ingot": Outcome(10.0, 0.1)},
        {LLAMA: Outcome(100.0, 0.2), "ingot": Outcome(200.0, 0.3)},
    ]
    row = row_of(rounds)
    assert row[LLAMA] == {"tokens_per_second": 100, "ttft_ms": 200.0}
    assert row["ingot"] == {
        "tokens_per_second": 200,
        "ttft_ms": 100.0,
        "ratio_of_tokens_per_second": {"median": 2.0, "lower_quartile": 1.5, "upper_quartile": 2.5},
        "ratio_of_ttft": {"median": 0.5, "lower_quartile": 0.375, "upper_quartile": 1.0},
    }
