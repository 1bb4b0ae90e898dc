"""`ingot run` streams text or prints JSON, and refuses requests that cannot be served."""

import io
import json
import sys

import pytest

from ingot.artifact import Artifact, verdict_warning
from ingot.cli.main import run
from ingot.runtime import METRICS
from tests.cli.refusals import assert_refused
from tests.conftest import BuildArtifact

Captured = pytest.CaptureFixture[str]
NOTICE = f"{verdict_warning('not measured')}\n"  # before all else: the artifact of these tests has no evidence


@pytest.fixture
def artifact(build_unmeasured: BuildArtifact) -> Artifact:
    return build_unmeasured("int4-cpu")


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["def f", "--max-tokens", "0"], "max_tokens"),
        (["def f", "--temperature", "nan"], "temperature"),
        (["def f", "--top-p", "0"], "top_p"),
        (["def f", "--system", "x"], "--chat"),
        (["def f", "--chat"], "chat template"),
        (["word " * 3000], "1024"),
        ([""], "no tokens"),
        (["def f", "--max-tokens", "many"], "max-tokens"),
        (["def f", "--no-such-option"], "--no-such-option"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(
    artifact: Artifact, capsys: pytest.CaptureFixture[str], options: list[str], wanted: str
) -> None:
    code = run(["run", str(artifact.path), *options])
    shown = capsys.readouterr()
    assert_refused(code, shown.err.removeprefix(NOTICE), wanted, expected_code=2)
    assert shown.out == ""


def test_a_prompt_from_standard_input_that_is_no_text_is_refused(
    artifact: Artifact, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), encoding="utf-8"))
    code = run(["run", str(artifact.path), "-"])
    assert_refused(code, capsys.readouterr().err, "standard input is not utf-8 text (byte 0xff)", expected_code=2)


def test_text_is_streamed_after_the_prompt_with_a_summary_on_stderr(artifact: Artifact, capsys: Captured) -> None:
    assert run(["run", str(artifact.path), "def f", "--max-tokens", "5"]) == 0
    shown = capsys.readouterr()
    assert run(["run", str(artifact.path), "def f", "--max-tokens", "5", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert shown.out == f"def f{facts['text']}\n"
    assert shown.err.startswith(
        f"{NOTICE}{len(facts['token_ids'])} tokens, {facts['finish_reason']}; first token after "
    )
    assert (len(facts["token_ids"]), facts["finish_reason"]) == (5, "length")
    assert facts["prompt_tokens"] > 0


def test_stats_are_printed_on_stderr_and_every_metric_is_in_the_json(artifact: Artifact, capsys: Captured) -> None:
    command = ["run", str(artifact.path), "def f", "--max-tokens", "5", "--stats"]
    assert run(command) == 0
    shown = capsys.readouterr().err
    assert "engine: 1 requests ended (1 length), 5 steps" in shown
    for text in ("first token p50 ", "between tokens p50 ", "queue p50 ", "prefix cache: 0 of ", "KV pool: "):
        assert text in shown
    assert "preemptions" not in shown, "nothing was preempted"
    assert run([*command, "--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)["engine"]
    assert (found["generation_tokens"], found["request_success"], found["steps"]) == (5, {"length": 1}, 5)
    latency = found["inter_token_latency_seconds"]
    assert latency["count"] == 4
    assert 0 < latency["p50"] <= latency["p99"]
    assert {metric.name for metric in METRICS} >= found.keys() >= {"kv_cache_usage_perc", "num_preemptions"}
    assert "engine:" not in printed.err


def test_standard_input_is_the_prompt_if_none_is_given(
    artifact: Artifact, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("def f"))
    assert run(["run", str(artifact.path), "--max-tokens", "3", "--no-verify"]) == 0
    assert capsys.readouterr().out.startswith("def f")


def test_several_choices_are_printed_under_headings_and_as_json(artifact: Artifact, capsys: Captured) -> None:
    command = ["run", str(artifact.path), "def f", "--max-tokens", "6", "--temperature", "1", "--seed", "3"]
    assert run([*command, "--n", "3"]) == 0
    shown = capsys.readouterr().out
    assert run([*command, "--n", "3", "--json"]) == 0
    choices = json.loads(capsys.readouterr().out)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert shown == "".join(
        f"--- choice {number}, seed {choice['seed']}\ndef f{choice['text']}\n" for number, choice in enumerate(choices)
    )
    command[-1] = str(choices[2]["seed"])
    assert run([*command, "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["token_ids"] == choices[2]["token_ids"]
    assert "choices" not in alone


def test_the_best_of_several_choices_is_printed_alone(artifact: Artifact, capsys: Captured) -> None:
    command = ["run", str(artifact.path), "def f", "--max-tokens", "6", "--temperature", "1", "--seed", "3", "--json"]
    assert run([*command, "--best-of", "4"]) == 0
    best = json.loads(capsys.readouterr().out)
    assert run([*command, "--n", "2", "--best-of", "4"]) == 0
    two = json.loads(capsys.readouterr().out)["choices"]
    assert two[0]["token_ids"] == best["token_ids"]
    assert two[0]["mean_logprob"] >= two[1]["mean_logprob"]
