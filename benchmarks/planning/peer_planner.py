"""Errors of TPOT on rows measured on H100s: aiconfigurator's tables of kernels and the step model, on the same rows.

    python -m benchmarks.planning.peer_planner ../shared/data/plan/h100-serving.csv --python VENV/bin/python

VENV has aiconfigurator (0.12.0 was tried). It has tables of newer versions of the engines, and is fitted to no row.
The step model is fitted to 8 rows of each group, as in `benchmarks.planning.step_model`; both are judged on the other
rows. Rows that aiconfigurator refuses are counted, with its reason.
"""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.device import device_facts
from benchmarks.paths import ROOT
from benchmarks.planning.h100_rows import Group, calibration_rows, read_groups
from benchmarks.planning.step_model import CALIBRATION_ROWS, calibrated
from ingot.planning.serving_rows import ServingRow

_CHILD = Path(__file__).with_name("call_aiconfigurator.py")
_NAMES = {
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
}
"""Names of models of equal shape whose configuration it brings along."""


@dataclass(frozen=True)
class Compared:
    """Relative errors of TPOT on the same rows, and why it has none for others."""

    name: str
    ours: list[float]
    theirs: list[float]
    refusals: list[str]

    def as_json(self) -> dict[str, object]:
        """Mean and median errors in percent."""
        figures = {
            f"{who}_{name}": round(100 * float(of(errors)), 1)
            for who, errors in (("ingot", self.ours), ("aiconfigurator", self.theirs))
            for name, of in (("mape", np.mean), ("median", np.median))
            if errors
        }
        refused = {"refused": len(self.refusals), "why": self.refusals[0]} if self.refusals else {}
        return {"name": self.name, "rows": len(self.theirs), **figures, **refused}


def request(group: Group, row: ServingRow) -> dict[str, Any]:
    """Arguments of `cli_estimate` for a row."""
    engine, _, model, precision, tensor, expert_tensor, expert_parallel = group.key
    weights = {"fp8": "fp8_block" if "Qwen3-235B" in model else "fp8"}.get(precision)
    experts = {"moe_tp_size": int(expert_tensor or 1), "moe_ep_size": int(expert_parallel or 1)}
    return {
        "model": _NAMES.get(model, model),
        "system": "h100_sxm",
        "backend_name": engine,
        "isl": row.load.prompt_tokens,
        "osl": row.load.output_tokens,
        "batch_size": row.load.concurrency,
        "tp_size": int(tensor),
        **({"gemm_quant_mode": weights} if weights else {}),
        **(experts if group.shape.experts[0] else {}),
    }


def compared(group: Group, answers: list[dict[str, Any]]) -> Compared:
    """The errors on the rows of a group that were not fitted to."""
    chosen = calibration_rows(group.rows, CALIBRATION_ROWS)
    others = [row for index, row in enumerate(group.rows) if index not in chosen]
    ours, theirs, refusals = [], [], []
    for row, answer, error in zip(others, answers, calibrated(group).errors, strict=True):
        if "error" in answer:
            refusals.append(answer["error"])
        else:
            ours.append(float(error))
            theirs.append(abs(answer["tpot"] / (1e3 * row.tpot_seconds) - 1))
    return Compared(" ".join(group.key), ours, theirs, refusals)


@click.command(help=__doc__)
@click.argument("file", type=click.Path(path_type=Path, exists=True))
@click.option("--python", type=click.Path(path_type=Path, exists=True), required=True, help="Has aiconfigurator.")
def main(file: Path, python: Path) -> None:
    """Print a line for each group and one for all, and write benchmarks/results/planning-peer.json."""
    found = []
    for group in read_groups(file):
        chosen = calibration_rows(group.rows, CALIBRATION_ROWS)
        rows = [request(group, row) for index, row in enumerate(group.rows) if index not in chosen]
        done = subprocess.run(
            [str(python), str(_CHILD)], input=json.dumps(rows), capture_output=True, text=True, check=True
        )
        found.append(compared(group, json.loads(done.stdout.splitlines()[-1])))
        click.echo(json.dumps(found[-1].as_json()))
    whole = Compared(
        "all",
        [error for each in found for error in each.ours],
        [error for each in found for error in each.theirs],
        [reason for each in found for reason in each.refusals],
    )
    click.echo(json.dumps(whole.as_json()))
    groups = [each.as_json() for each in (*found, whole)]
    target = ROOT / "benchmarks" / "results" / "planning-peer.json"
    target.write_text(json.dumps({"device": device_facts(), "groups": groups}, indent=1) + "\n")


if __name__ == "__main__":
    main()
