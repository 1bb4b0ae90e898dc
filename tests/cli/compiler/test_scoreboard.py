"""`ingot plan --scoreboard` prints error and coverage of the predictions that a folder's builds made."""

import json
from pathlib import Path

import pytest

from ingot.builder import build
from ingot.cli.main import run

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folder(two_layers: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two artifacts that were measured."""
    folder = tmp_path_factory.mktemp("artifacts")
    latency = "latency={concurrency: [1], prompt_tokens: 16, output_tokens: 4, requests: 2, rounds: 2}"
    for recipe in ("fp32-cpu", "int8-cpu"):
        build(
            recipe, [f"checkpoint={two_layers}", "evaluation=null", "memory=null", "gates={}", latency], folder / recipe
        )
    return folder


def test_a_scoreboard_has_a_row_for_each_figure(folder: Path, capsys: Captured) -> None:
    assert run(["plan", "--scoreboard", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["predictions"]) == 2
    assert set(found["figures"]) == {"weight_bytes", "ttft_seconds", "tpot_seconds", "tokens_per_second"}
    size = found["figures"]["weight_bytes"]
    assert (size["num_scores"], size["coverage"], size["worst_error"]) == (2, 1.0, 0.0)
    assert run(["plan", "--scoreboard", str(folder)]) == 0
    printed = capsys.readouterr()
    assert "Predictions of 2 builds, scored by what they measured" in printed.out
    assert "time per output token" in printed.out
    assert "bias: above 0, predictions are too high" in printed.err


def test_inspect_says_how_the_prediction_fared(folder: Path, capsys: Captured) -> None:
    assert run(["inspect", str(folder / "int8-cpu")]) == 0
    assert "of 4 figures are inside of the intervals predicted" in " ".join(capsys.readouterr().out.split())


def test_a_scoreboard_is_not_a_plan(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    assert run(["plan", str(folder / "int8-cpu"), "--scoreboard", str(folder)]) == 2
    assert "leave out WHAT" in capsys.readouterr().err
    assert run(["plan", "--scoreboard", str(tmp_path)]) == 2
    assert "no artifact in it has a prediction" in capsys.readouterr().err
