"""The replay's requests keep the trace's prefixes and fit the model; its summary counts what went wrong."""

import json
from pathlib import Path

from benchmarks.kv.replay import Replay, scaled_requests, summary


def test_prefixes_of_the_trace_are_prefixes_of_the_prompts(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = ([0, 1, 2], [0, 1, 3], list(range(40)))
    path.write_text("".join(json.dumps({"hash_ids": ids, "output_length": 480}) + "\n" for ids in rows))
    first, second, long = scaled_requests(path, 3, block_tokens=16, context_tokens=256, vocab=100)
    assert first.prompt[:32] == second.prompt[:32]
    assert first.prompt[32:48] != second.prompt[32:48]
    assert (len(first.prompt), first.output_tokens) == (49, 15)
    assert len(long.chain) == 12
    assert len(long.prompt) + long.output_tokens <= 256
    assert all(3 <= token < 100 for token in long.prompt)


def test_wrong_and_lost_answers_are_counted() -> None:
    right = Replay(answers={0: (1, 2), 1: (3,), 2: (4,)})
    result = Replay(answers={0: (1, 2), 1: (9,)}, prompt_tokens=10, step_seconds=[0.1, 0.2], moving=[True, False])
    result.cached.update(device=2, host=3, disk=0)
    found = summary(result, right, 3)
    assert (found["wrong"], found["lost"], found["all"]) == (1, 1, 0.5)
    assert found["step_ms_otherwise"] == {"p50": 200.0, "p90": 200.0, "p99": 200.0, "p100": 200.0}
