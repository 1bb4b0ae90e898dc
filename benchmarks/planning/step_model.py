"""Errors of the step model on rows that were measured on H100s: fitted to 8 rows of a group, and without the engine.

    python -m benchmarks.planning.step_model ../shared/data/plan/h100-serving.csv

Prints, for each group, the mean and median error of TPOT on its other rows and the share of them inside the 95 %
interval; then the error on each engine of a data sheet's terms that were fitted to the other engines, and the factors
of all engines together, from which planning/roofline.py has its shares and seconds.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.planning.h100_rows import Group, calibration_rows, h100, read_groups
from ingot.planning.fitting import Fit, fit_factors, fit_steps
from ingot.planning.roofline import Overheads, roofline_terms
from ingot.planning.serving_rows import TERMS, expert_term

CALIBRATION_ROWS = 8
_UNITS = Overheads(layer_seconds=1e-6, row_seconds=1e-6)
"""An ideal machine, and a microsecond for each layer and sequence: the factors are shares and microseconds."""

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Score:
    """Relative errors of TPOT on rows outside of the fit, and the share inside the interval; NaN without one."""

    name: str
    errors: FloatArray
    covered: float = float("nan")

    @property
    def mean(self) -> float:
        """Mean of the errors."""
        return float(self.errors.mean())

    @property
    def median(self) -> float:
        """Median of the errors."""
        return float(np.median(self.errors))

    def as_json(self) -> dict[str, object]:
        """The figures in percent."""
        figures = {"mape": 100 * self.mean, "median": 100 * self.median, "p95": 100 * np.quantile(self.errors, 0.95)}
        covered = {} if np.isnan(self.covered) else {"inside_interval": round(100 * self.covered, 1)}
        return {"name": self.name, "rows": len(self.errors), **{k: round(v, 2) for k, v in figures.items()}, **covered}


def calibrated(group: Group) -> Score:
    """Fit a group's terms to 8 of its rows and predict the others."""
    measured = group.measured(h100())
    chosen = calibration_rows(group.rows, CALIBRATION_ROWS)
    experts = group.shape.experts
    terms = (*TERMS, expert_term(*experts)) if experts[0] else TERMS
    model = fit_steps(terms, [measured[index] for index in chosen], "8 rows")
    others = [one for index, one in enumerate(measured) if index not in chosen]
    errors = np.array([abs(model.seconds(one.step) / one.seconds - 1) for one in others])
    intervals = [model.interval(one.step) for one in others]
    inside = [low <= one.seconds <= high for (low, high), one in zip(intervals, others, strict=True)]
    return Score(" ".join(group.key), errors, float(np.mean(inside)))


def pooled(groups: Sequence[Group]) -> tuple[tuple[str, ...], FloatArray, FloatArray]:
    """Names of a data sheet's terms, their ideal seconds [rows, terms], and the measured seconds [rows]."""
    hardware, rows, seconds = h100(), [], []
    for group in groups:
        shape = group.shape
        terms = tuple(roofline_terms(shape, hardware, _UNITS, group.devices))
        for one in group.measured(hardware):
            row = {term.name: term.of(one.step).seconds for term in terms}
            rows.append({**row, "expert layers": shape.num_layers * 1e-6 * bool(shape.experts[0])})
            seconds.append(one.seconds)
    names = tuple(dict.fromkeys(name for row in rows for name in row))
    return names, np.array([[row.get(name, 0.0) for name in names] for row in rows]), np.array(seconds)


def without_engine(groups: Sequence[Group]) -> list[Score]:
    """For each engine, the errors on its rows of a fit to the rows of all others."""
    _, columns, seconds = pooled(groups)
    of_row = np.array([group.engine for group in groups for _ in group.rows])
    found = []
    for engine in sorted(set(of_row)):
        own = of_row == engine
        fit = fit_factors(columns[~own], seconds[~own])
        found.append(Score(engine, np.abs(columns[own] @ fit.factors / seconds[own] - 1)))
    return found


def joined(name: str, scores: Sequence[Score]) -> Score:
    """One score of all rows."""
    rows = [len(score.errors) for score in scores]
    covered = float(np.average([score.covered for score in scores], weights=rows))
    return Score(name, np.concatenate([score.errors for score in scores]), covered)


@click.command(help=__doc__)
@click.argument("file", type=click.Path(path_type=Path, exists=True))
def main(file: Path) -> None:
    """Print the scores as JSON, one line each."""
    groups = read_groups(file)
    by_group, by_engine = [calibrated(group) for group in groups], without_engine(groups)
    for score in (*by_group, joined(f"all, fitted to {CALIBRATION_ROWS} rows of each group", by_group)):
        print(json.dumps(score.as_json()))
    for score in (*by_engine, joined("all, fitted to the other engines", by_engine)):
        print(json.dumps(score.as_json()))
    names, columns, seconds = pooled(groups)
    fit: Fit = fit_factors(columns, seconds)
    print(json.dumps({name: round(float(factor), 2) for name, factor in zip(names, fit.factors, strict=True)}))


if __name__ == "__main__":
    main()
