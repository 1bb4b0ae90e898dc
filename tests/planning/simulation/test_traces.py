"""Traces of each format are read by their timestamps, keep their prefixes, and are refused by file and line."""

import json
from pathlib import Path

import pytest

from ingot.planning.simulation.traces import Arrival, Prompts, RequestLengths, TraceError, read_trace, repeated_tokens
from tests.data_paths import shared_data
from tests.each_case import each_case

_AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:17:03.9799600,4808,10\r\n"


def written(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text, "utf-8")
    return path


def mooncake(timestamp: int, input_length: int, output_length: int, ids: list[int]) -> str:
    row = {"timestamp": timestamp, "input_length": input_length, "output_length": output_length, "hash_ids": ids}
    return json.dumps(row) + "\n"


def test_a_mooncake_trace_is_in_milliseconds_and_sorted(tmp_path: Path) -> None:
    path = written(tmp_path, mooncake(4500, 600, 7, [0, 2]) + mooncake(3000, 513, 500, [0, 1]))
    kind, arrivals = read_trace(path)
    assert kind == "mooncake"
    assert arrivals == [
        Arrival(0.0, RequestLengths(2, 513, 500, (0, 1))),
        Arrival(1.5, RequestLengths(1, 600, 7, (0, 2))),
    ]


def test_an_azure_trace_has_times_with_seven_digits_and_with_zones(tmp_path: Path) -> None:
    path = written(tmp_path, f"\ufeff{_AZURE}2023-11-16 18:17:04.4799600+00:00,110,27\r\n")
    kind, arrivals = read_trace(path)
    assert kind == "azure"
    assert [each.content for each in arrivals] == [RequestLengths(2, 4808, 10), RequestLengths(3, 110, 27)]
    assert arrivals[1].seconds == pytest.approx(0.5, abs=1e-6)


def test_a_log_has_bodies_at_seconds_or_dates(tmp_path: Path) -> None:
    for times in (("10.5", "11"), ('"2026-01-01T00:00:00Z"', '"2026-01-01T00:00:00.500Z"')):
        lines = [f'{{"timestamp": {time}, "body": {{"prompt": "{time[-2:-1]}"}}}}\n' for time in times]
        kind, arrivals = read_trace(written(tmp_path, "".join(lines)))
        assert kind == "log"
        assert [each.seconds for each in arrivals] == [0.0, 0.5]
        assert isinstance(arrivals[0].content, dict)


def test_the_limit_is_of_the_file_and_lines_after_it_are_not_read(tmp_path: Path) -> None:
    path = written(tmp_path, mooncake(0, 5, 1, [0]) + "\n" + "not JSON\n")
    assert len(read_trace(path, limit=1)[1]) == 1
    with pytest.raises(TraceError, match=r"trace:3: not a line of the format mooncake: .*Invalid JSON"):
        read_trace(path)


@each_case(
    ("text", "message"),
    [
        ("", "has no requests"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests"),
        ("hello\n", r"trace:1: not a known trace: 'hello'; it must begin with a Mooncake line"),
        ("[1]\n", r"trace:1: not a known trace"),
        ('{"timestamp": 1}\n', r"trace:1: not a known trace"),
        (mooncake(0, -5, 1, [0]), r"trace:1: .*mooncake: input_length is '-5': Input should be greater than 0"),
        (mooncake(0, 513, 1, [0]), r"trace:1: .*hash_ids has 1 ids for an input_length of 513; it must have 2"),
        (f"{_AZURE}2023-11-16 18:17:04,many,3\n", r"trace:3: .*azure: ContextTokens is 'many'"),
        (f"{_AZURE}yesterday,1,3\n", r"trace:3: .*azure: TIMESTAMP is 'yesterday'"),
        (f"{_AZURE}2023-11-16 18:17:04,1\n", r"trace:3: .*azure: GeneratedTokens: Field required"),
        ('{"timestamp": NaN, "body": {"prompt": "x"}}\n', r"trace:1: .*log: .*"),
        (
            '{"timestamp": 1, "body": {"text": "x"}}\n',
            r"trace:1: .*body has the keys \['text'\]; it must have prompt",
        ),
        ('{"timestamp": 1, "body": 3}\n', r"trace:1: .*log: body is '3'"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(written(tmp_path, text))


def test_a_trace_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="trace is not UTF-8"):
        read_trace(path)


def test_equal_ids_make_equal_prefixes() -> None:
    prompts = Prompts(scale=1 / 32)
    first, second = (prompts.body(RequestLengths(1, 1200, 320, ids)) for ids in ((7, 8, 9), (7, 8, 10)))
    assert (len(first["prompt"]), first["max_tokens"], first["ignore_eos"]) == (38, 10, True)
    assert first["prompt"][:32] == second["prompt"][:32]
    assert first["prompt"][32:] != second["prompt"][32:]
    assert all(3 <= token < 1000 for token in first["prompt"])


def test_prompts_without_ids_share_nothing_and_are_the_same_in_each_replay() -> None:
    prompts = Prompts(scale=0.1, ignore_eos=False)
    first, second = (prompts.body(RequestLengths(line, 800, 4)) for line in (1, 2))
    assert first == prompts.body(RequestLengths(1, 800, 4))
    assert (len(first["prompt"]), first["max_tokens"]) == (80, 1)
    assert first["prompt"][:4] != second["prompt"][:4]
    assert "ignore_eos" not in first


def test_prompt_and_output_fit_the_context() -> None:
    prompts = Prompts(context_tokens=100)
    for lengths in (
        RequestLengths(1, 5000, 5000, tuple(range(10))),
        RequestLengths(1, 95, 30),
        RequestLengths(1, 0, 0),
    ):
        fitted = prompts.lengths(lengths)
        assert fitted.prompt_tokens + fitted.output_tokens <= 100
        assert fitted.prompt_tokens >= 1 <= fitted.output_tokens
        assert len(prompts.body(lengths)["prompt"]) == fitted.prompt_tokens
    assert prompts.is_cut(RequestLengths(1, 95, 30))
    assert not prompts.is_cut(RequestLengths(1, 60, 30))


def test_repeated_tokens_are_those_of_leading_blocks() -> None:
    chains = ((0, 1, 2), (0, 1, 3), (4, 1), (0, 1))
    lengths = [RequestLengths(1, 10 * len(chain) - 5, 1, chain) for chain in chains]
    assert repeated_tokens(lengths, 10) == 0 + 20 + 0 + 15


def test_the_public_traces_are_read() -> None:
    sizes = {"conversation_trace.jsonl": 12031, "azure2023-code.csv": 8819}
    for name, size in sizes.items():
        arrivals = read_trace(shared_data(f"traces/{name}"))[1]
        assert len(arrivals) == size
        assert 3000 < arrivals[-1].seconds < 3600
