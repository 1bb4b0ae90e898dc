"""Predictions of figures, their scores, and the scoreboard of a folder."""

import json
from pathlib import Path

import pytest

from ingot.errors import ArtifactError, UsageError
from ingot.validation.prediction import (
    PredictedFigure,
    Prediction,
    figure_title,
    figure_unit,
    measured_figures,
    read_prediction,
    read_scoreboard,
)
from ingot.validation.statistics import Estimate, Measured

FIGURES = {
    "weight_bytes": PredictedFigure(value=1000, low=1000, high=1000, source="the recipe"),
    "tpot_seconds@4": PredictedFigure(value=0.01, low=0.008, high=0.0125, source="steps"),
    "peak_memory_bytes": PredictedFigure(value=5e8, low=4.5e8, high=5.5e8, source="sizes"),
}
PREDICTION = Prediction(made_at="2026-01-31T12:00:00Z", figures=FIGURES, left_out=("ttft: none",))


def measured(metric: str, candidate: float, level: int | None = None) -> Measured:
    return Measured(metric, Estimate(1.0, 0.9, 1.1, 5, "t"), candidate, candidate, level=level)


def test_a_score_is_the_error_and_whether_the_interval_held() -> None:
    found = measured_figures({"tpot_ratio@4": measured("tpot_ratio", 0.02, 4)}, 1000)
    assert found == {"weight_bytes": 1000.0, "tpot_seconds@4": 0.02}
    scored = PREDICTION.scored(found)
    assert scored.figures == PREDICTION.figures
    assert set(scored.scores) == {"weight_bytes", "tpot_seconds@4"}  # no score without a measurement
    assert (scored.scores["weight_bytes"].error, scored.scores["weight_bytes"].inside) == (0, True)
    assert scored.scores["tpot_seconds@4"].error == pytest.approx(-0.5)
    assert not scored.scores["tpot_seconds@4"].inside
    assert scored.sentence == (
        "1 of 2 figures are inside of the intervals predicted before the measurement; the largest error is -50.0%, of"
        " time per output token, 4 in flight"
    )
    assert PREDICTION.sentence == ""


def test_titles_and_units_follow_from_names() -> None:
    assert figure_title("tokens_per_second@2") == "throughput, 2 in flight"
    assert [figure_unit(name) for name in ("weight_bytes", "ttft_seconds@1", "tokens_per_second@1", "bits")] == [
        "bytes",
        "seconds",
        "tokens/s",
        "",
    ]


def write(folder: Path, prediction: Prediction) -> Path:
    file = folder / "evidence" / "prediction.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(prediction.model_dump(mode="json")))
    return file


def test_a_scoreboard_has_error_and_coverage_of_each_figure(tmp_path: Path) -> None:
    for name, tpot in (("a", 0.01), ("b", 0.0125), ("c", 0.02)):
        file = write(tmp_path / name, PREDICTION.scored({"weight_bytes": 1000, "tpot_seconds@4": tpot}))
        assert read_prediction(file).scores["tpot_seconds@4"].measured == tpot
    write(tmp_path / "deep" / "d.measured", PREDICTION)
    board = read_scoreboard(tmp_path)
    assert (len(board.files), board.unscored) == (4, 1)
    rows = {row.figure: row for row in board.rows}
    assert list(rows) == ["weight_bytes", "tpot_seconds"]
    assert (rows["weight_bytes"].coverage, rows["weight_bytes"].worst_error) == (1, 0)
    row = rows["tpot_seconds"]
    assert (row.num_scores, row.inside) == (3, 2)
    assert row.coverage == pytest.approx(2 / 3)
    assert (row.mean_error, row.median_error, row.worst_error) == pytest.approx((0.7 / 3, 0.2, 0.5))
    assert row.bias == pytest.approx(-0.2)


def test_a_scoreboard_refuses_what_has_no_predictions_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing is not a folder"):
        read_scoreboard(tmp_path / "nothing")
    with pytest.raises(UsageError, match=r"no artifact in it has a prediction \(prediction\.json of its evidence\)"):
        read_scoreboard(tmp_path)
    file = write(tmp_path / "a", PREDICTION)
    for text, place in (
        ("{", "Invalid JSON"),
        ('{"made_at": "", "figures": {"tpot": {"value": 1e999}}}', "figures.tpot.value"),
        ('{"made_at": "", "figures": {}, "other": 1}', "other"),
    ):
        file.write_text(text)
        with pytest.raises(
            ArtifactError, match=rf"prediction\.json: invalid prediction \(.*{place}.*build the artifact"
        ):
            read_scoreboard(tmp_path)
