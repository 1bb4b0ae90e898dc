"""`ingot simulate` on the command line: tables and JSON, of a config, an artifact and a profile, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest

from ingot.cli.main import run
from tests.conftest import BuildArtifact
from tests.data_paths import FIXTURES
from tests.each_case import each_case

CONFIG = FIXTURES / "checkpoints" / "llama" / "config.json"
QUICK = ("--requests", "40", "--prompt-tokens", "20", "--output-tokens", "8")
STEPS = ("--steps", "steps=0.01,rows=0.0001", "--set", "kv_blocks=200")


def figures(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert run(["simulate", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_config_is_simulated_on_a_gpu_before_anything_is_built(capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(capsys, str(CONFIG), "--on", "h100", "--load", "poisson:20", *QUICK)
    assert found["figures"]["num_finished"] == 40
    assert "H100" in found["step_times"]
    assert found["relative_error"] > 0
    assert found["capacity"] is None
    assert found["figures"]["ttft"]["p50"] > 0
    again = figures(capsys, str(CONFIG.parent), "--on", "h100", "--load", "poisson:20", *QUICK)
    assert again["figures"] == found["figures"]
    assert figures(capsys, str(CONFIG), "--on", "h100", "--load", "poisson:20", "--seed", "1", *QUICK) != found


def test_an_artifact_is_simulated_with_stated_times_and_its_capacity_found(
    build_unmeasured: BuildArtifact, two_layers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = str(build_unmeasured("demo", two_layers).path)
    words = (
        artifact,
        *STEPS,
        "--load",
        "poisson:5",
        "--capacity",
        "--slo",
        "ttft=0.5",
        *QUICK,
        "--set",
        "max_sequences=4",
    )
    found = figures(capsys, *words)
    capacity = found["capacity"]
    assert capacity["bracket"][0] == capacity["requests_per_second"] < capacity["bracket"][1]
    assert found["max_sequences"] == 4
    assert len(capacity["runs"]) == 8
    assert run(["simulate", *words]) == 0
    printed = capsys.readouterr().out
    assert "capacity" in printed
    assert "TTFT p50/p99 ms" in printed
    measured = figures(capsys, artifact, "--measure", "--load", "poisson:5", *QUICK)
    assert "measured on this machine" in measured["step_times"]
    assert measured["figures"]["num_finished"] == 40


def test_a_slow_part_of_the_pool_serves_what_the_fast_one_cannot_hold(capsys: pytest.CaptureFixture[str]) -> None:
    words = (str(CONFIG), "--steps", "steps=0.01", "--set", "kv_blocks=2", "--load", "poisson:1", *QUICK)
    assert figures(capsys, *words)["figures"]["num_refused"] > 0
    found = figures(capsys, *words, "--set", "kv_offload=500%")
    assert (found["kv_blocks"], found["kv_slow_blocks"], found["figures"]["num_refused"]) == (2, 10, 0)


def test_a_fleet_scales_and_a_load_that_no_engine_serves_is_called_so(capsys: pytest.CaptureFixture[str]) -> None:
    fleet = ("--replicas", "2", "--router", "cost", "--autoscale", "3", "--startup-seconds", "1", "--fail", "0.5:0:1")
    found = figures(capsys, str(CONFIG), *STEPS, "--load", "poisson:50", *fleet, *QUICK)
    assert found["figures"]["num_finished"] == 40
    words = (str(CONFIG), *STEPS, "--set", "max_sequences=1", "--load", "poisson:500", *QUICK)
    assert run(["simulate", *words]) == 0
    assert "grows without bound: requests arrive faster than they end" in capsys.readouterr().out


def test_pools_for_prompts_and_decoding_are_compared_with_the_same_replicas_together(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = (str(CONFIG), "--on", "h100", "--load", "poisson:20", "--disaggregate", "2:3", *QUICK)
    found = figures(capsys, *words, "--drain", "0.5:0:1")
    assert found["disaggregation"]["link"]["bytes_per_second"] == 450e9
    assert found["figures"]["num_finished"] == found["figures_together"]["num_finished"] == 40
    transfer = found["figures"]["kv_transfer"]
    assert transfer["num_transfers"] > 30
    assert transfer["mean_seconds"] >= transfer["mean_bytes"] / 450e9
    assert run(["simulate", *words, "--kv-link", "1"]) == 0
    printed = capsys.readouterr().out
    assert "2 for prompts, 3 decode" in printed
    assert "link of 1 GB/s" in printed


def test_regions_serve_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    regions = ("--region", "eu:1:0.02:9", "--region", "us:2:0.03", "--fail", "0.2:0:50")
    words = (str(CONFIG), *STEPS, "--load", "poisson:20", *regions, *QUICK)
    found = figures(capsys, *words)
    assert found["figures"]["num_finished"] == 40
    assert found["figures"]["abroad_share"] > 0.5
    assert [each["name"] for each in found["regions"]] == ["eu", "us"]
    assert run(["simulate", *words]) == 0
    assert "of requests served by another than their user's" in capsys.readouterr().out


@each_case(
    ("words", "message"),
    [
        ((*STEPS, "--load", "poisson:1", "--region", "eu:1:0.1"), "there is one region, eu"),
        (
            (*STEPS, "--load", "poisson:1", "--region", "eu:1:0.1", "--region", "us:1:0.1", "--replicas", "2"),
            "gives the numbers of replicas: leave out --replicas",
        ),
        (
            (*STEPS, "--load", "poisson:1", "--disaggregate", "1:1"),
            "nothing says how fast KV blocks move; give --on HARDWARE or --kv-link GIGABYTES",
        ),
        ((*STEPS, "--load", "poisson:1", "--kv-link", "1"), "--kv-link is the link of --disaggregate"),
        (
            (*STEPS, "--load", "poisson:1", "--disaggregate", "1:1", "--replicas", "2"),
            "--disaggregate PREFILL:DECODE gives the numbers of replicas: leave out --replicas",
        ),
        ((*STEPS, "--load", "poisson:1", "--disaggregate", "2", "--kv-link", "1"), "it must be PREFILL:DECODE"),
        ((*STEPS, "--load", "poisson:1", "--drain", "5"), "the drain '5' must be SECOND:REPLICA"),
        ((*STEPS, "--load", "poisson:0"), "the load poisson:0 has '0' for a number; it must be above 0"),
        (("--load", "poisson:1"), "the times of steps come from --on HARDWARE"),
        (("--on", "h1000", "--load", "poisson:1"), "unknown hardware 'h1000'. Did you mean 'h100'?"),
        (("--steps", "rows=1", "--load", "poisson:1"), "give --on HARDWARE or --set kv_blocks=N"),
        (("--steps", "row=1", "--load", "poisson:1"), "unknown count 'row'. Did you mean 'rows'?"),
        (("--steps", "rows=-1", "--load", "poisson:1"), "--steps: rows is '-1'; it must be seconds from 0 on"),
        (("--steps", "rows=0", "--load", "poisson:1"), "a step would take no time"),
        (
            ("--on", "h100", "--measure", "--load", "poisson:1"),
            "--measure measures steps on this machine: leave out --on",
        ),
        (("--measure", "--load", "poisson:1"), "--measure runs an artifact, and"),
        ((*STEPS, "--profile", "x", "--load", "poisson:1"), "give one of them"),
        ((*STEPS, "--load", "poisson:1", "--acceptance", "2"), "--acceptance is 2; it must be a chance from 0 to 1"),
        ((*STEPS, "--load", "poisson:1", "--slo", "chatty"), "unknown service level 'chatty'"),
        ((*STEPS, "--load", "poisson:1", "--slo", "ttft=-1"), "the service level 'ttft=-1' is not valid: ttft"),
        ((*STEPS, "--load", "poisson:1", "--router", "near"), "unknown router 'near'"),
        ((*STEPS, "--load", "poisson:1", "--set", "batching=none"), "batching"),
        ((*STEPS, "--load", "poisson:1", "--slo", "ttft=0.000001", "--capacity"), "no rate keeps the service level"),
        ((*STEPS, "--load", "at-once", "--capacity"), "has no rate; a capacity needs requests that arrive over time"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_one_message(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["simulate", str(CONFIG), *words, "--requests", "20"]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert "Traceback" not in printed


def test_a_broken_line_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,48,10\n2023-11-16 18:17:04.97,x,10\n"
    )
    assert run(["simulate", str(CONFIG), *STEPS, "--load", str(trace)]) == 1
    assert f"{trace}:3: not a line of the format azure: ContextTokens is 'x'" in capsys.readouterr().err
