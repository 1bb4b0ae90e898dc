"""Rows of serving benchmarks are read with every value checked, and fitted."""

from pathlib import Path

import pytest

from ingot.errors import DataError
from ingot.planning.load import Load
from ingot.planning.serving_rows import fit_rows, read_rows

HEADER = "engine,concurrency,isl,osl,tpot_ms,ttft_ms\n"


def rows_file(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "rows.csv"
    file.write_text(text)
    return file


def test_rows_become_loads_and_seconds(tmp_path: Path) -> None:
    (row,) = read_rows(rows_file(tmp_path, HEADER + "e,4,1024,128,20.5,\n"))
    assert row.load == Load(4, 1024, 128)
    assert row.tpot_seconds == pytest.approx(0.0205)
    assert row.ttft_seconds is None
    assert row.columns["engine"] == "e"


def test_a_model_of_rows_predicts_them(tmp_path: Path) -> None:
    lines = [f"e,{c},{i},128,{5 + 0.1 * c + 0.01 * c * i / 128},\n" for c in (1, 8, 32) for i in (128, 1024)]
    read = read_rows(rows_file(tmp_path, HEADER + "".join(lines)))
    model = fit_rows(read, "rows.csv")
    for row in read:
        assert model.seconds(row.load.average_step()) == pytest.approx(row.tpot_seconds, rel=0.01)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEADER + "e,4,1024,128,fast,\n", "rows.csv:2: tpot_ms is 'fast'; it must be a number above 0"),
        (HEADER + "e,4,1024,128,-1,\n", "rows.csv:2: tpot_ms is '-1'"),
        (HEADER + "e,4,1024,128,nan,\n", "rows.csv:2: tpot_ms is 'nan'"),
        (HEADER + "e,4.5,1024,128,1,\n", "rows.csv:2: concurrency is 4.5; it must be a whole number"),
        (HEADER + "e,4,1024\n", "rows.csv:2: has more or fewer fields than the header"),
        ("engine,isl\ne,4\n", "has no column concurrency"),
        (HEADER, "has no row with"),
        ("", "has no column concurrency"),
    ],
)
def test_a_broken_row_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_rows(rows_file(tmp_path, text))


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(DataError, match="cannot be read as CSV"):
        read_rows(file)
