"""The benchmark of the work around the model."""

import json
from pathlib import Path

from benchmarks.cpu.step_overhead import PARAMS, main
from click.testing import CliRunner


def test_it_measures_each_batch_with_each_kind_of_sampling(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    arguments = ["--vocab-size", "100", "--batch", "1", "--batch", "3", "--output", str(output)]
    CliRunner().invoke(main, arguments, catch_exceptions=False)
    found = json.loads(output.read_text())["microseconds_of_a_step"]
    assert set(found) == set(PARAMS)
    assert all(set(figures) == {"1", "3"} and min(figures.values()) > 0 for figures in found.values())
