"""A run of the comparison with adapters that have no model: what is measured, left, resumed, and named."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from benchmarks import peers
from benchmarks.cpu import compare, comparison_engines
from benchmarks.cpu.comparison_results import all_results
from benchmarks.cpu.comparison_tables import BEGIN, END
from benchmarks.peers import Peer
from click.testing import CliRunner, Result

ADAPTER = "tests.benchmarks.counting_adapter"


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Peer]:
    """Ingot and a peer, a peer that fails at its first prompt, and one whose environment does not exist."""

    def row(runs_in: Any = "this", **options: str) -> Peer:
        return Peer("counting", ADAPTER, runs_in, {"log": str(tmp_path / "log"), **options})

    found = {
        "ingot-native": row(),
        "llama.cpp-q4_0": row(),
        "genai": row(fails="start"),
        "openvino": row("peers"),
    }
    for module in (compare, comparison_engines, peers):
        monkeypatch.setattr(module, "ENGINES", found)
    monkeypatch.setattr(compare, "PEERS", found)
    monkeypatch.setattr(comparison_engines, "measure_read_bandwidth", lambda threads: 1e9)
    monkeypatch.setattr(
        comparison_engines, "write_checkpoint", lambda shape, folder, context_tokens: checkpoint(folder)
    )
    for name in ("document.md", "readme.md"):
        (tmp_path / name).write_text(f"{BEGIN}\n{END}\n")
    return found


def checkpoint(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 50}))


def run(folder: Path, *options: str) -> Result:
    places = {"work": "work", "output": "results", "document": "document.md", "readme": "readme.md"}
    arguments = [text for name, place in places.items() for text in (f"--{name}", str(folder / place))]
    arguments += ["--peers-python", str(folder / "no-python"), "--threads", "1", "--rounds", "2", "--patience", "0"]
    names = "ingot-native,llama.cpp-q4_0,genai,openvino"
    result = CliRunner().invoke(compare.main, [*arguments, "--engines", names, "--scale", "0.001", *options])
    assert result.exit_code == 0, result.output
    return result


def records(folder: Path) -> list[dict[str, Any]]:
    return [record for results in all_results(folder / "results") for record in results.records]


def test_a_quick_run_names_what_fails_and_what_is_missing_and_measures_the_others(
    tmp_path: Path, engines: dict[str, Peer]
) -> None:
    result = run(tmp_path, "--quick", "--shapes", "smollm2-135m")
    found = records(tmp_path)
    assert [(one["part"], one["batch"], one["prompt_tokens"]) for one in found] == [
        ("decode", 1, 64),
        ("decode", 8, 16),
        ("decode", 64, 16),
        ("prefill", 1, 512),
    ]
    for one in found:
        assert set(one["engines"]) == {"ingot-native", "llama.cpp-q4_0"}
        assert one["failed"] == {"genai": "RuntimeError: start is impossible"}
        assert list(one["missing"]) == ["openvino"]
        assert all("huge_bytes" in engine["facts"] for engine in one["engines"].values())
    assert "no-python does not exist; make it with" in found[0]["missing"]["openvino"]
    assert "genai failed: RuntimeError: start is impossible" in result.output
    assert "| decode, batch 1, context 64 |" in (tmp_path / "document.md").read_text()
    assert " of 4 |" in (tmp_path / "readme.md").read_text()


def test_a_resumed_run_measures_only_what_is_left(tmp_path: Path, engines: dict[str, Peer]) -> None:
    options = ("--parts", "decode", "--shapes", "smollm2-135m")
    run(tmp_path, *options)
    file = next((tmp_path / "results").iterdir())
    content = json.loads(file.read_text())
    del content["cells"][1]
    file.write_text(json.dumps(content))
    (tmp_path / "log").unlink()
    run(tmp_path, *options, "--resume")
    assert [one["batch"] for one in records(tmp_path)] == [1, 64, 8]
    starts = {line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("start")}
    assert starts == {"start 8 16 272"}
    (tmp_path / "log").unlink()
    run(tmp_path, *options, "--resume")
    assert not (tmp_path / "log").exists()


def test_a_peer_that_was_missing_is_measured_by_a_resumed_run(tmp_path: Path, engines: dict[str, Peer]) -> None:
    options = ("--parts", "decode", "--shapes", "smollm2-135m", "--resume")
    run(tmp_path, *options)
    engines["openvino"] = engines["llama.cpp-q4_0"]
    run(tmp_path, *options)
    assert all("openvino" in one["engines"] and not one["missing"] for one in records(tmp_path))


def test_no_cell_begins_that_would_end_after_the_time(tmp_path: Path, engines: dict[str, Peer]) -> None:
    # 0.03 s are enough for one cell of 25 and 30 thousandths of a second at most, and none of 45
    result = run(tmp_path, "--quick", "--shapes", "smollm2-135m", "--minutes", "0.0004")
    left = [line for line in result.output.splitlines() if line.startswith("no time was left for")]
    assert len(left) == 4 - len(records(tmp_path)) >= 2
    assert left[-1] == ("no time was left for smollm2-135m, 1 threads, prefill of 512 tokens; measure it with --resume")


def test_without_a_limit_time_does_not_end() -> None:
    plan = comparison_engines.Plan((), 2, 1.0, 0.0, Path(), peers.Programs(), Path(), False, False, math.inf)
    assert plan.seconds_left == math.inf
