"""`ingot doctor` and `ingot top`: from a server, from files, and what cannot be read."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ingot.cli.main import run
from tests.runtime.doctor.test_diagnosis import healthy
from tests.runtime.engines import text_engine
from tests.runtime.server.servers import Running, running

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(text_engine()) as started:
        yield started


def test_a_file_is_diagnosed_with_cause_action_and_numbers(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "metrics.txt"
    file.write_text(healthy(3) + "ingot_prompt_pieces_total 500\ningot_repeated_prompt_pieces_total 400\n")
    assert run(["doctor", str(file)]) == 3
    shown = capsys.readouterr().out
    assert shown.startswith(
        "1. 80 % of the prompts' text was seen before, and the prefix cache has 0 %  [prefix-differs]"
    )
    for word in ("cause:", "action:", "numbers: repeated_share 0.8, prefix_hit_rate"):
        assert word in shown


def test_of_two_files_what_was_counted_in_between_is_diagnosed(tmp_path: Path, capsys: Captured) -> None:
    before, after = tmp_path / "before.txt", tmp_path / "after.txt"
    failed = healthy(1).replace("ingot:failed_requests_total 0", "ingot:failed_requests_total 7")
    before.write_text(failed)
    after.write_text(failed)
    assert run(["doctor", str(after)]) == 3
    assert "7 requests ended with an error" in capsys.readouterr().out
    assert run(["doctor", str(before), str(after), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"machine": []}


def test_a_server_is_diagnosed_and_watched(server: Running, capsys: Captured) -> None:
    with server.client() as client:
        client.completions.create(model="fake", prompt="def read", max_tokens=7)
    run(["doctor", server.url, "--seconds", "0.2", "--json"])  # the machine of the test may be busy
    assert list(json.loads(capsys.readouterr().out)) == ["fake"]
    assert run(["top", server.url, "--seconds", "0.1", "--once", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["model"], row["running"], row["tokens_per_second"]) == ("fake", 0.0, 0.0)
    assert run(["top", server.url, "--seconds", "0.1", "--once"]) == 0
    assert "fake" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["doctor", "http://127.0.0.1:1"], "http://127.0.0.1:1/metrics cannot be read"),
        (["doctor", "nowhere.txt"], "nowhere.txt cannot be read as metrics: No such file or directory"),
        (["doctor", "a.txt", "b.txt", "c.txt"], "give one server, one file, or two files of one server"),
        (["doctor", "--preflight", "http://x"], "--preflight looks at this machine alone"),
        (["top", "http://127.0.0.1:1"], "cannot be read"),
    ],
)
def test_what_cannot_be_read_is_refused(arguments: list[str], message: str, capsys: Captured) -> None:
    assert run(arguments) in (1, 2)
    assert message in capsys.readouterr().err


def test_a_text_without_metrics_is_refused(tmp_path: Path, capsys: Captured) -> None:
    for text, message in (("hello\n", "has no metrics of Ingot"), ("ingot_steps_total many\n", "not a number")):
        (tmp_path / "other.txt").write_text(text)
        assert run(["doctor", str(tmp_path / "other.txt")]) == 2
        assert message in capsys.readouterr().err
