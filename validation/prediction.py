"""Predictions that a build makes before it measures, their scores afterwards, and the scores of many artifacts.

prediction.json has the figures, each with a 95 % interval and a source, as they were before the measurement; the scores
are added after it. A figure is named like what is measured: `weight_bytes`, `peak_memory_bytes`, and at a concurrency
`ttft_seconds@4`, `tpot_seconds@4`, `tokens_per_second@4`.
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ingot.artifact import Artifact
from ingot.artifact.json_text import invalid_file, read_limited
from ingot.errors import ArtifactError, UsageError, shown_path
from ingot.validation.statistics import Measured

PREDICTION_FILE = "prediction.json"
_MEASURED = {
    "ttft_ratio": "ttft_seconds",
    "tpot_ratio": "tpot_seconds",
    "throughput_ratio": "tokens_per_second",
    "peak_memory_ratio": "peak_memory_bytes",
}
"""Metrics whose candidate's value is predicted, and the figure."""
_UNITS = {"bytes": "bytes", "seconds": "seconds", "per_second": "tokens/s"}
MOST_FOLDERS = 10_000
_Number = Annotated[float, Field(allow_inf_nan=False)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PredictedFigure(_Frozen):
    """A predicted value with its 95 % interval, and in words where it is from. low == high: exact."""

    value: _Number
    low: _Number
    high: _Number
    source: str = Field(max_length=1000)


class Score(_Frozen):
    """A predicted figure after the measurement; `error` is predicted over measured, less 1."""

    measured: _Number
    error: _Number
    inside: bool = Field(description="whether the measured value is in the predicted interval")


class Prediction(_Frozen):
    """Figures by name, predicted at a time (UTC, as 2026-01-31T12:00:00Z), and the scores of those that were measured.

    left_out  what was not predicted, and why
    """

    made_at: str = Field(max_length=40)
    figures: Mapping[str, PredictedFigure] = Field(max_length=1000)
    left_out: tuple[str, ...] = ()
    scores: Mapping[str, Score] = Field(default_factory=dict, max_length=1000)

    def scored(self, measured: Mapping[str, float]) -> "Prediction":
        """Return the prediction with scores of the figures in `measured`."""
        scores = {name: _score(figure, measured[name]) for name, figure in self.figures.items() if name in measured}
        return self.model_copy(update={"scores": scores})

    @property
    def sentence(self) -> str:
        """The outcome in a sentence; "" without scores."""
        if not self.scores:
            return ""
        name = max(self.scores, key=lambda name: abs(self.scores[name].error))
        inside = sum(score.inside for score in self.scores.values())
        return (
            f"{inside} of {len(self.scores)} figures are inside of the intervals predicted before the measurement; the"
            f" largest error is {self.scores[name].error:+.1%}, of {figure_title(name)}"
        )


def _score(figure: PredictedFigure, measured: float) -> Score:
    error = figure.value / measured - 1 if measured else (0.0 if figure.value == 0 else math.copysign(1e9, 1))
    return Score(measured=measured, error=error, inside=figure.low <= measured <= figure.high)


def measured_figures(measured: Mapping[str, Measured], weight_bytes: int) -> dict[str, float]:
    """The measured values that predictions are compared with, by the name of the figure."""
    found = {"weight_bytes": float(weight_bytes)}
    for one in measured.values():
        name = _MEASURED.get(one.metric)
        if name is not None and one.candidate is not None:
            found[name if one.level is None else f"{name}@{one.level}"] = one.candidate
    return found


def figure_title(name: str) -> str:
    """A figure's name in words, with its concurrency."""
    base, _, level = name.partition("@")
    words = _TITLES.get(base, base.replace("_", " "))
    return f"{words}, {level} in flight" if level else words


_TITLES = {
    "weight_bytes": "weights",
    "peak_memory_bytes": "peak memory",
    "ttft_seconds": "time to first token",
    "tpot_seconds": "time per output token",
    "tokens_per_second": "throughput",
}


def figure_unit(name: str) -> str:
    """The unit of a figure: bytes, seconds or tokens/s."""
    base = name.partition("@")[0]
    return next((unit for ending, unit in _UNITS.items() if base.endswith(ending)), "")


def sealed_prediction(artifact: Artifact) -> Prediction | None:
    """Read the prediction of the artifact's build; None for an artifact without. ArtifactError for a wrong file."""
    name = f"evidence/{PREDICTION_FILE}"
    return read_prediction(artifact.file(name)) if artifact.has(name) else None


def read_prediction(file: Path) -> Prediction:
    """Read prediction.json. ArtifactError for a wrong file."""
    try:
        return Prediction.model_validate_json(read_limited(file))
    except OSError as error:
        raise ArtifactError(f"{file}: cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise invalid_file(file, "prediction", error) from error


class ScoreRow(NamedTuple):
    """The scores of one figure over artifacts: `num_scores` of them, of which `inside` were in the predicted interval.

    mean_error, median_error  of the absolute relative errors
    bias                      median of the relative errors: above 0, predictions are too high
    """

    figure: str
    num_scores: int
    inside: int
    mean_error: float
    median_error: float
    worst_error: float
    bias: float

    @property
    def coverage(self) -> float:
        """The share of artifacts whose measured value was in the interval."""
        return self.inside / self.num_scores


class Scoreboard(NamedTuple):
    """Scores by kind of figure over the artifacts of a folder, and their files."""

    rows: tuple[ScoreRow, ...]
    files: tuple[Path, ...]
    unscored: int


def read_scoreboard(folder: Path) -> Scoreboard:
    """Score every prediction in the folder: of artifacts, rejected builds and comparisons.

    UsageError for a folder without any; ArtifactError for a file that is damaged.
    """
    if not folder.is_dir():
        raise UsageError(f"{shown_path(folder)} is not a folder; name one that has artifacts")
    files = sorted(_prediction_files(folder))
    if not files:
        raise UsageError(
            f"{shown_path(folder)}: no artifact in it has a prediction ({PREDICTION_FILE} of its evidence); builds that"
            " measure make one"
        )
    predictions = [read_prediction(file) for file in files]
    kinds: dict[str, list[Score]] = {}
    for prediction in predictions:
        for name, score in prediction.scores.items():
            kinds.setdefault(name.partition("@")[0], []).append(score)
    order = [*_TITLES, *sorted(set(kinds) - set(_TITLES))]
    rows = tuple(_row(kind, kinds[kind]) for kind in order if kind in kinds)
    return Scoreboard(rows, tuple(files), sum(not each.scores for each in predictions))


def _prediction_files(folder: Path) -> Iterable[Path]:
    for count, file in enumerate(folder.rglob(f"evidence/{PREDICTION_FILE}")):
        if count >= MOST_FOLDERS:
            raise UsageError(f"{shown_path(folder)}: has more than {MOST_FOLDERS:,} predictions; name a folder in it")
        yield file


def _row(kind: str, scores: list[Score]) -> ScoreRow:
    errors = [abs(score.error) for score in scores]
    return ScoreRow(
        figure=kind,
        num_scores=len(scores),
        inside=sum(score.inside for score in scores),
        mean_error=sum(errors) / len(errors),
        median_error=median(errors),
        worst_error=max(errors),
        bias=median(score.error for score in scores),
    )
