"""`ingot run` streams text or prints JSON, and refuses requests that cannot be served."""

import io
import json
import shutil
import sys
from pathlib import Path

import pytest

from ingot.artifact import Artifact, verdict_warning
from ingot.cli.main import run
from ingot.runtime import METRICS, BeamParams, Engine
from tests.cli.refusals import assert_refused
from tests.conftest import BuildArtifact
from tests.data_paths import DEMO_MODEL

Captured = pytest.CaptureFixture[str]
NOTICE = f"{verdict_warning('not measured')}\n"  # before all else: the artifact of these tests has no evidence


@pytest.fixture
def artifact(build_unmeasured: BuildArtifact) -> Artifact:
    return build_unmeasured("int4-cpu")


@pytest.fixture
def without_template(build_unmeasured: BuildArtifact, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    model = tmp_path_factory.mktemp("model") / DEMO_MODEL.name
    shutil.copytree(DEMO_MODEL, model, ignore=shutil.ignore_patterns("chat_template.jinja"))
    return build_unmeasured("int4-cpu", model)


def test_a_conversation_without_a_chat_template_is_refused(without_template: Artifact, capsys: Captured) -> None:
    code = run(["run", str(without_template.path), "def f", "--chat"])
    assert_refused(code, capsys.readouterr().err.removeprefix(NOTICE), "chat template", expected_code=2)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["def f", "--max-tokens", "0"], "--max-tokens is 0; it must be a whole number, at least 1"),
        (["def f", "--temperature", "nan"], "temperature"),
        (["def f", "--top-p", "0"], "--top-p is 0.0; it must be above 0"),
        (["def f", "--system", "x"], "--chat"),
        (["word " * 3000], "1024"),
        ([""], "no tokens"),
        (["def f", "--max-tokens", "many"], "max-tokens"),
        (["def f", "--no-such-option"], "--no-such-option"),
        (["def f", "--beam-width", "65"], "beam search: width is 65; it must be a whole number from 1 to 64"),
        (["def f", "--beam-width", "2", "--length-penalty", "17"], "it must be from -16 to 16"),
        (["def f", "--length-penalty", "2"], "--length-penalty is 2.0, and only a beam search has one"),
        (["def f", "--beam-width", "2", "--n", "3"], "a beam search returns its best sequence"),
        (["def f", "--beam-width", "2", "--best-of", "3"], "a beam search returns its best sequence"),
        (["def f", "--beam-width", "2", "--temperature", "0.7"], "a beam search samples nothing"),
        (["def f", "--beam-width", "2", "--repetition-penalty", "1.2"], "--repetition-penalty is 1.2 and beam_width 2"),
        (["def f", "--beam-width", "2", "--stop", "x"], "a beam search ends at tokens alone"),
        (["def f", "--set", "kv_host_byte=1GiB"], "unknown option 'kv_host_byte'"),
        (["def f", "--set", "kv_host_bytes=1"], "kv_host_bytes is 1; one block takes"),
        (["def f", "--beam-width", "2", "--speculate", "lookup"], "--speculate lookup drafts tokens of one sequence"),
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
    for errors in ("strict", "surrogateescape"):  # the second is Python's in the locale C
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), encoding="utf-8", errors=errors))
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


def test_stats_include_what_closing_writes_to_disk(artifact: Artifact, capsys: Captured, tmp_path: Path) -> None:
    disk = ["--set", f"kv_disk_path={tmp_path / 'kv'}", "--set", "kv_disk_bytes=64MiB"]
    command = ["run", str(artifact.path), "def f(x): return x\n" * 20, "--max-tokens", "5", "--stats", *disk]
    assert run([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["engine"]
    assert found["kv_disk_blocks_used"] == found["kv_disk_blocks_written"] > 0
    assert found["kv_disk_takes_writes"]
    assert "kv_disk_refusal" not in found
    assert run(command) == 0
    assert f"disk: {found['kv_disk_blocks_used']} blocks, " in capsys.readouterr().err


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


def test_a_beam_search_prints_its_best_sequence_and_its_score(artifact: Artifact, capsys: Captured) -> None:
    command = ["run", str(artifact.path), "def f", "--max-tokens", "6", "--beam-width", "3", "--length-penalty", "0.5"]
    assert run(command) == 0
    shown = capsys.readouterr()
    assert run([*command, "--json"]) == 0
    best = json.loads(capsys.readouterr().out)
    with Engine.load(artifact) as engine:
        expected = engine.beam_search("def f", BeamParams(width=3, max_tokens=6, length_penalty=0.5))
    assert (best["text"], best["token_ids"]) == (expected.text, list(expected.token_ids))
    assert best["score"] == expected.score
    assert "choices" not in best
    assert shown.out == f"def f{best['text']}\n"
    assert f"; score {best['score']:.3f}, the best of 3 beams" in shown.err


def test_a_chat_cannot_search_with_beams(artifact: Artifact, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    code = run(["run", str(artifact.path), "--beam-width", "2"])
    assert_refused(code, capsys.readouterr().err, "--beam-width 2 requires a prompt", expected_code=2)
