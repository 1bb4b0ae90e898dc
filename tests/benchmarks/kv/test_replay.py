"""The replay's requests keep the trace's prefixes and fit the model; its summary counts what went wrong."""

import json
from pathlib import Path

import click
import numpy as np
import pytest
from benchmarks.kv.policies import unlimited_hits
from benchmarks.kv.replay import Report, Runs, Sizes, summary
from benchmarks.kv.replay_lane import Replay, scaled_requests
from benchmarks.kv.step_times import Step, Work

from tests.conftest import BuildArtifact


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


def test_wrong_and_lost_answers_are_counted_and_hits_compared_with_bounds() -> None:
    step = Step(0.1, Work(np.array([3]), np.array([3])), moved=False)
    result = Replay(answers={0: "a", 1: "x"}, prompt_tokens=100, steps=[step])
    result.cached.update(device=16, host=32, disk=0)
    found = summary(result, {0: "a", 1: "b", 2: "c"}, 3, {"unlimited": 4}, 16)
    assert (found["wrong"], found["lost"], found["all"], found["steps"]) == (1, 1, 0.48, 1)
    assert found["of_bounds"] == {"unlimited": 0.75}


def test_a_replay_answers_the_same_with_tiers_and_continues_its_report(
    build_unmeasured: BuildArtifact, two_layers: Path, tmp_path: Path
) -> None:
    artifact = build_unmeasured("fp32-cpu", two_layers)
    rows = [[*range(6 * group, 6 * group + 5)] for group in (0, 1, 2, 3, 0, 1, 2, 3)]
    trace, output = tmp_path / "trace.jsonl", tmp_path / "replay.json"
    trace.write_text("".join(json.dumps({"hash_ids": ids, "output_length": 128}) + "\n" for ids in rows))
    facts = artifact.manifest.model
    requests = scaled_requests(trace, 8, block_tokens=16, context_tokens=facts.context_tokens, vocab=facts.vocab_size)
    bounds = {"unlimited": unlimited_hits([request.chain for request in requests])}
    pool = Sizes(14, 0, 0).options(artifact.manifest.kv.block_bytes, tmp_path)
    tiers = Sizes(14, 64, 64).options(artifact.manifest.kv.block_bytes, tmp_path / "kv")
    for _ in range(2):
        report = Report(output, {"requests": 8})
        runs = Runs(artifact, requests, 2, report)
        runs.alone("no cache", bounds, prefix_cache=False, **pool)
        runs.in_turns(("pool", "tiers", "pool, again"), bounds, pool, tiers, 2)
    found = json.loads(output.read_text())["runs"]
    assert all((run["wrong"], run["lost"]) == (0, 0) for run in found.values())
    assert found["tiers"]["all"] > found["pool"]["all"]
    with pytest.raises(click.UsageError, match="move it away"):
        Report(output, {"requests": 9})
