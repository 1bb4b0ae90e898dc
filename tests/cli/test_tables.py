"""What `ingot build` prints of mixed-precision: its table once it has run, its prediction beside the measurement."""

import json
from pathlib import Path

import pytest

from ingot.cli.main import run
from tests.data_paths import ROOT

pytestmark = pytest.mark.usefixtures("memory_of_this_process")

Captured = pytest.CaptureFixture[str]

RECIPE = f"""\
calibration: {{text: {ROOT / "README.md"}, sequences: 4, sequence_tokens: 64}}
evaluation: {{text: {ROOT / "CHANGELOG.md"}, tokens: 64, window_tokens: 32, layer_kl_tokens: 0}}
passes:
  - mixed-precision: {{bits: [4, 8], block_sizes: [64], points: 1, tokens: 64, budget_bits: 6.0}}
  - quantize-weights
"""


def test_the_table_and_the_prediction_are_printed(two_layers: Path, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "mine.yaml").write_text(f"checkpoint: {two_layers}\n{RECIPE}")
    assert run(["build", str(tmp_path / "mine.yaml"), "-o", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr()
    assert "Mixed precision: KL in nats per token, of each weight alone" in shown.out
    assert "layers.1.mlp.down_proj" in shown.out
    assert "mixed-precision predicted a KL of" in shown.err.replace("\n", " ")


def test_json_stays_json(two_layers: Path, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "mine.yaml").write_text(f"checkpoint: {two_layers}\n{RECIPE}")
    assert (
        run(["build", str(tmp_path / "mine.yaml"), "--json", "--set", "evaluation=null", "-o", str(tmp_path / "out")])
        == 0
    )
    assert "mixed-precision" in [row["name"] for row in json.loads(capsys.readouterr().out)["passes"]]
