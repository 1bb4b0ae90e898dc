"""`ingot compare` prints one table over recipes and artifacts, writes the report and the winner, and resumes."""

import json
from pathlib import Path

import pytest

from ingot.builder.compare import run as compare_run
from ingot.cli.main import run
from ingot.errors import EngineError
from ingot.pipeline.recipe.load import load_recipe
from tests.builder.compare.conftest import SMALL

Captured = pytest.CaptureFixture[str]
SETTINGS = [word for override in SMALL for word in ("--set", override)]
TITLES = ("bits", "size", "perplexity x", "KL, nats", "top-1 %", "TTFT ms @1", "TPOT ms @1", "tokens/s @2")


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which all tests of this file go on with one comparison."""
    return tmp_path_factory.mktemp("compare") / "state"


@pytest.fixture
def command(two_layers: Path, state: Path) -> list[str]:
    given = ["--checkpoint", str(two_layers), *SETTINGS, "--state", str(state), "--quiet"]
    return ["compare", "fp32-cpu", "int8-cpu", *given]


def test_a_table_a_report_and_the_winner(
    command: list[str], two_layers: Path, state: Path, tmp_path: Path, capsys: Captured
) -> None:
    winner = tmp_path / "winner.yaml"
    given = ["--gate", "size_ratio=0.9", "--gate", "kl_mean=1.0", "--price", "0.4", "-o", str(winner)]
    assert run([*command, *given]) == 0
    text = capsys.readouterr().out
    for title in (*TITLES, "$ a 1M tokens @2", "of the baseline", "against the best, int8-cpu"):
        assert title in text
    assert "Front on kl_mean, tpot, bytes: fp32-cpu, int8-cpu." in text  # no KL, and the fewest bytes
    assert "Winner: int8-cpu, the best tpot where its gates pass." in text
    assert "Gates that do not pass: fp32-cpu size_ratio FAIL." in text
    assert "figures are inside of their intervals" in text
    recipe = load_recipe(winner)
    assert {name: gate.max for name, gate in recipe.gates.items()} == {"size_ratio": 0.9, "kl_mean": 1.0}
    assert recipe.require_checkpoint() == two_layers
    page = (state / "report.html").read_text()
    assert "against the best, int8-cpu" in page
    links = [part.split('"')[0] for part in page.split('href="')[1:] if ".measured" in part.split('"')[0]]
    assert len(links) == 2
    assert all((state / link).is_file() for link in links)


def test_json_has_every_figure_and_nothing_is_measured_again(
    command: list[str], capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise EngineError("must not be made again")

    run(command)
    capsys.readouterr()
    monkeypatch.setattr(compare_run, "build", refuse)
    monkeypatch.setattr(compare_run, "measure", refuse)
    assert run([*command, "--prefer", "kl_mean", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    [comparison] = found["comparisons"]
    assert comparison["winner"] == "fp32-cpu"
    assert found["winners"] == {}
    assert comparison["concurrency"] == {"ttft_tpot": 1, "tokens_per_second": 2}
    one, other = comparison["candidates"]
    assert (one["name"], other["name"]) == ("fp32-cpu", "int8-cpu")
    figure = other["figures"]["kl_mean"]
    assert figure["low"] <= figure["value"] <= figure["high"]
    assert other["against_best"]["kl_mean"]["value"] == pytest.approx(
        figure["value"] - one["figures"]["kl_mean"]["value"]
    )
    assert set(other["prediction"]["scores"]) >= {"weight_bytes", "tpot_seconds@1"}


def test_exit_codes_say_what_the_gates_decided(
    command: list[str], capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run([*command, "--gate", "size_ratio=0.01"]) == 3
    assert "No winner: no candidate passes its gates." in capsys.readouterr().out

    def refuse(*_: object) -> None:
        raise EngineError("no memory")

    monkeypatch.setattr(compare_run, "build", refuse)
    command.insert(1, "int4-cpu")
    assert run(command) == 1
    out = capsys.readouterr().out
    assert "int4-cpu: no memory" in out
    assert "Winner: " in out


def test_predictions_build_nothing(
    command: list[str], tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    command[command.index("--state") + 1] = str(tmp_path / "none")
    assert run([*command, "--predict", "--on", "epyc-9654", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    [rows] = found["predicted"].values()
    assert [row["name"] for row in rows] == ["baseline", "fp32-cpu", "int8-cpu"]
    assert rows[2]["weight_bytes"] < rows[1]["weight_bytes"]
    assert rows[2]["latency"]["tpot_seconds"] < rows[1]["latency"]["tpot_seconds"]
    assert {row["accuracy"] for row in rows} == {None}
    assert not (tmp_path / "none").exists()
    command.remove("--quiet")
    assert run([*command, "--predict"]) == 0
    printed = capsys.readouterr()
    assert "unknown" in printed.out
    assert "accuracy is unknown until it is measured: run the same command without --predict" in printed.err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--axes", "kl_mean,speed"], "unknown axis 'speed'; axes: bits"),
        (["--prefer", "cost"], "the axis cost needs a price: give --price"),
        (["-o", "winner.json"], "name a .yaml file"),
        (["--on", "abacus"], "abacus"),
        (["--gate", "kl_mean"], "kl_mean"),
        (["--gate", "kl_meen=1"], "kl_meen"),
        (["--checkpoint", "nowhere"], "nowhere"),
        (["int8-cpu"], "two things that are compared have the name"),
        (["int9-cpu"], "int9-cpu"),
        (["int4-gptq-cpu"], "calibration"),
    ],
)
def test_a_mistake_is_one_error_before_any_work(
    command: list[str], given: list[str], message: str, tmp_path: Path, capsys: Captured
) -> None:
    command[command.index("--state") + 1] = str(tmp_path / "none")
    assert run([*command, *given]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
