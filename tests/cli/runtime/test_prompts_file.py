"""`ingot run --prompts-file`: results in the file's order, one error for each prompt that cannot be served."""

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from ingot.artifact import Artifact
from ingot.cli.main import run
from ingot.cli.runtime.prompts_file import MOST_IN_FLIGHT, read_prompts, write_results
from ingot.errors import UsageError
from ingot.runtime import BeamParams, Engine, RequestOutput, SamplingParams
from ingot.runtime.requests.engine_request import GenerationParams
from tests.cli.refusals import assert_refused
from tests.cli.runtime.test_run import NOTICE
from tests.conftest import BuildArtifact
from tests.each_case import each_case
from tests.runtime.engines import text_engine
from tests.simulators.faulty_executors import Faults, FaultyExecutor

Captured = pytest.CaptureFixture[str]
FOUR = SamplingParams(max_tokens=4)


@pytest.fixture
def artifact(build_unmeasured: BuildArtifact) -> Artifact:
    return build_unmeasured("int4-cpu")


def records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_every_line_of_a_text_file_gets_what_it_gets_alone(
    artifact: Artifact, tmp_path: Path, capsys: Captured
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("def f\r\n\nimport os\n", encoding="utf-8-sig")
    assert run(["run", str(artifact.path), "--prompts-file", str(file), "--max-tokens", "5"]) == 0
    found = records(capsys.readouterr().out)
    assert [one["line"] for one in found] == [1, 3]
    for one, prompt in zip(found, ["def f", "import os"], strict=True):
        assert run(["run", str(artifact.path), prompt, "--max-tokens", "5", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["token_ids"] == one["token_ids"]


def test_records_choose_their_parameters_and_one_that_fails_fails_alone(
    artifact: Artifact, tmp_path: Path, capsys: Captured
) -> None:
    file, output = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    lines: list[dict[str, Any]] = [
        {"id": "a", "prompt": "def f", "max_tokens": 3},
        {"id": 7, "prompt": "word " * 3000},
        {"prompt": [1, 2, 3], "stop": ["x"]},
        {"messages": [{"role": "user", "content": "hi"}]},
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    arguments = ["--prompts-file", str(file), "-o", str(output), "--max-tokens", "2", "--stats"]
    assert run(["run", str(artifact.path), *arguments]) == 1
    found = records(output.read_text())
    assert [one.get("id") for one in found] == ["a", 7, None, None]
    assert [len(one.get("token_ids", ())) for one in found] == [3, 0, 2, 2]
    assert "1024" in found[1]["error"]
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "3 prompts, 1 failed" in shown.err
    assert "first token: p50" in shown.err
    assert not list(tmp_path.glob("*.partial"))


def test_records_choose_between_sampling_and_a_beam_search(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines: list[dict[str, Any]] = [
        {"prompt": [1, 2]},
        {"prompt": [1, 2], "max_tokens": 3, "beam_width": 2, "length_penalty": 0},
        {"prompt": [1, 2], "beam_width": None, "temperature": 0.5},
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    beams = BeamParams(width=3, max_tokens=4, length_penalty=2.0)
    prompts = read_prompts(str(file), beams, False, None)
    assert [one.params for one in prompts] == [
        beams,
        BeamParams(width=2, max_tokens=3, length_penalty=0),
        SamplingParams(max_tokens=4, temperature=0.5),
    ]
    with text_engine() as engine:
        assert write_results(engine, prompts, tmp_path / "out.jsonl", False) == 0
        best = engine.beam_search([1, 2], beams)
    found = records((tmp_path / "out.jsonl").read_text())
    assert (found[0]["token_ids"], found[0]["score"]) == (list(best.token_ids), best.score)
    assert ["score" in one for one in found] == [True, True, False]


@pytest.mark.parametrize(
    ("params", "values", "message"),
    [
        (
            BeamParams(),
            {"temperature": 0.7},
            "1: temperature is 0.7 and beam_width 4, but a beam search sam",
        ),
        (BeamParams(), {"n": 2}, "1: n is 2 and beam_width 4, but a beam search returns its best sequence"),
        (BeamParams(), {"beam_width": None, "length_penalty": 2}, "only a beam search has one; give beam_width too"),
        (SamplingParams(seed=1), {"beam_width": 2}, "1: seed is 1 and beam_width 2"),
        (SamplingParams(), {"beam_width": "2"}, "beam search: width is '2'; it must be a whole number"),
    ],
)
def test_a_record_that_combines_a_beam_search_with_sampling_is_refused(
    tmp_path: Path, params: GenerationParams, values: dict[str, Any], message: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": [1], **values}))
    with pytest.raises(UsageError, match=re.escape(message)):
        read_prompts(str(file), params, False, None)


def test_a_file_longer_than_the_batch_keeps_its_order(tmp_path: Path) -> None:
    count = 2 * MOST_IN_FLIGHT + 3
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": [n % 200 + 1], "id": n}) for n in range(count)))
    with text_engine(num_blocks=64) as engine:
        prompts = read_prompts(str(file), FOUR, False, None)
        assert write_results(engine, prompts, tmp_path / "out.jsonl", False) == 0
        assert not engine.has_unfinished()
    found = records((tmp_path / "out.jsonl").read_text())
    assert [one["id"] for one in found] == list(range(count))


def test_a_prompt_that_fails_while_it_is_computed_is_an_error_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": [n, n + 1]}) for n in (1, 3, 5)))
    with Engine(FaultyExecutor(Faults(lost_rows={1}))) as engine:
        assert write_results(engine, read_prompts(str(file), FOUR, False, None), tmp_path / "out.jsonl", False) == 1
    found = records((tmp_path / "out.jsonl").read_text())
    assert [one.get("finish_reason") for one in found] == ["length", None, "length"]
    assert "logits must be finite" in found[1]["error"]


@each_case(
    ("line", "wanted"),
    [
        ("{", "prompts.jsonl:2: invalid JSON in column 2"),
        ("[" * 100_000, "prompts.jsonl:2: invalid JSON"),
        ("3", "prompts.jsonl:2: 3 is not an object"),
        ("{}", "either prompt or messages"),
        ('{"prompt": "a", "messages": []}', "either prompt or messages"),
        ('{"messages": []}', "at least one message"),
        ('{"prompt": "a", "max_token": 3}', "Did you mean 'max_tokens'?"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens is 0"),
        ('{"prompt": "a", "stop": 3}', "stop is 3"),
    ],
)
def test_a_wrong_record_is_refused_before_any_work(tmp_path: Path, line: str, wanted: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with pytest.raises(UsageError, match="prompts") as refused:
        read_prompts(str(file), FOUR, False, None)
    assert wanted in str(refused.value)


def test_many_wrong_records_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("3\n" * 40)
    with pytest.raises(UsageError, match=r"and 30 more$"):
        read_prompts(str(file), FOUR, False, None)


def test_the_keys_of_a_logit_bias_are_token_ids(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": [1], "logit_bias": {"5": 100}, "max_tokens": 3}')
    with text_engine() as engine:
        write_results(engine, read_prompts(str(file), FOUR, False, None), tmp_path / "out.jsonl", False)
    assert records((tmp_path / "out.jsonl").read_text())[0]["token_ids"] == [5, 5, 5]


def test_text_is_a_message_with_chat(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("hello\n")
    (prompt,) = read_prompts(str(file), FOUR, True, "be brief")
    assert prompt.messages == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]


def test_standard_input_is_a_file_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\nb\n")))
    assert [one.prompt for one in read_prompts("-", FOUR, False, None)] == ["a", "b"]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--prompts-file", "missing.txt"], "missing.txt: No such file"),
        (["--prompts-file", "."], "Is a directory"),
        (["--prompts-file", "empty.txt"], "has no prompts"),
        (["--prompts-file", "bytes.txt"], "bytes.txt:2: byte 2 is not UTF-8"),
        (["--prompts-file", "one.txt", "def f"], "give one of them"),
        (["--prompts-file", "one.txt", "--system", "x"], "--system requires --chat"),
        (["--prompts-file", "one.txt", "-o", "no/such/folder"], "No such file"),
        (["def f", "-o", "x"], "--prompts-file"),
    ],
)
def test_a_wrong_file_is_refused(
    artifact: Artifact,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
    arguments: list[str],
    wanted: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in (("empty.txt", b"\n \n"), ("bytes.txt", b"a\n\xff"), ("one.txt", b"def f")):
        (tmp_path / name).write_bytes(content)
    code = run(["run", str(artifact.path), *arguments])
    shown = capsys.readouterr()
    assert_refused(code, shown.err.removeprefix(NOTICE), wanted, expected_code=2)
    assert shown.out == ""


def test_results_of_a_run_that_is_cut_off_are_kept(tmp_path: Path, capsys: Captured) -> None:
    file, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b", "max_tokens": 90}\n')
    with text_engine() as engine:
        prompts = read_prompts(str(file), FOUR, False, None)
        step, calls = engine.step, iter(range(100))

        def interrupted() -> list[RequestOutput]:
            if next(calls) > 6:
                raise KeyboardInterrupt
            return step()

        engine.step = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            write_results(engine, prompts, output, False)
    assert not output.exists()
    assert [one["line"] for one in records((tmp_path / "out.jsonl.partial").read_text())] == [1]
    assert "out.jsonl.partial" in capsys.readouterr().err
