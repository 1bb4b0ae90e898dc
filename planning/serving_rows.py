"""Measured rows of a serving benchmark, from a CSV file: lengths, concurrency, TTFT and TPOT.

    concurrency,isl,osl,tpot_ms[,ttft_ms,...]      one row for each run; isl and osl are tokens of prompt and output

Further columns name what was measured (engine, model, parallelism), and group the rows.
"""

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ingot.artifact.programs.expert_choices import even_reach
from ingot.errors import DataError, shown
from ingot.planning.fitting import MeasuredStep, fit_steps
from ingot.planning.load import Arrival, Load
from ingot.planning.step_model import StepModel, Term, Use

MOST_ROWS = 1_000_000
MOST_FIELD = 4096
# Names of a column, the first that a file has.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "concurrency": ("concurrency",),
    "prompt_tokens": ("isl", "prompt_tokens", "input_tokens"),
    "output_tokens": ("osl", "output_tokens"),
    "tpot_ms": ("tpot_ms", "silicon_tpot_ms"),
    "ttft_ms": ("ttft_ms", "silicon_ttft_ms"),
}
_OPTIONAL = ("ttft_ms",)
TERMS: tuple[Term, ...] = (
    Term("step and weights", (Use("memory", "steps", 1.0),)),
    Term("decode rows", (Use("compute", "decode_rows", 1.0), Use("compute", "draft_rows", 1.0))),
    Term("KV read", (Use("memory", "context_tokens", 1.0),)),
    Term("prefill matmuls", (Use("compute", "prefill_tokens", 1.0),)),
    Term("prefill attention", (Use("compute", "prefill_context_tokens", 1.0),)),
)
"""Terms of an engine of which only rows are known; `expert_term` is one more for a mixture of experts."""


@dataclass(frozen=True)
class ServingRow:
    """One run of a benchmark: its load, seconds of TTFT (None where not measured) and TPOT, and all columns as text."""

    load: Load
    ttft_seconds: float | None
    tpot_seconds: float
    columns: Mapping[str, str]

    def measured(self, rows: float | None = None) -> MeasuredStep:
        """Its average step, of so many sequences at a time if not all fit."""
        return MeasuredStep(self.load.average_step(rows), self.tpot_seconds)


def expert_term(experts: int, chosen: int) -> Term:
    """Experts read, of which each row reaches a share."""
    return Term("experts read", (Use("memory", "rows", 1.0, even_reach(experts, chosen)),))


def read_rows(file: Path, arrival: Arrival = "steady") -> list[ServingRow]:
    """Read every row that has lengths and times.

    DataError, with the line, for a value that is not a positive number; for a file without the columns or rows.
    """
    try:
        with file.open(encoding="utf-8", newline="") as stream:
            rows = list(_rows(file, csv.DictReader(stream, strict=True), arrival))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{file}: cannot be read as CSV: {error}") from error
    if not rows:
        raise DataError(f"{file}: has no row with {', '.join(name for name in _NAMES if name not in _OPTIONAL)}")
    return rows


def _rows(file: Path, reader: "csv.DictReader[str]", arrival: Arrival) -> Iterator[ServingRow]:
    columns = _columns(file, reader.fieldnames or ())
    for count, values in enumerate(reader):
        place = f"{file}:{reader.line_num}"
        if count >= MOST_ROWS:
            raise DataError(f"{place}: more than {MOST_ROWS:,} rows; give fewer")
        if None in values or any(value is None or len(value) > MOST_FIELD for value in values.values()):
            raise DataError(f"{place}: has more or fewer fields than the header, or one above {MOST_FIELD} characters")
        found = {name: values[column] for name, column in columns.items()}
        if all(found[name] for name in found if name not in _OPTIONAL):
            numbers = {name: _number(place, columns[name], text) for name, text in found.items() if text}
            concurrency, prompt, output = (_whole(place, columns[n], numbers[n]) for n in tuple(_NAMES)[:3])
            concurrency, prompt, output = (_whole(place, columns[n], numbers[n]) for n in tuple(_NAMES)[:3])
            ttft = numbers.get("ttft_ms")
            yield ServingRow(
                Load(concurrency, prompt, output, arrival=arrival),
                None if ttft is None else ttft / 1e3,
                numbers["tpot_ms"] / 1e3,
                values,
            )


def _columns(file: Path, header: Sequence[str]) -> dict[str, str]:
    found = {}
    for name, names in _NAMES.items():
        column = next((one for one in names if one in header), None)
        if column is not None:
            found[name] = column
        elif name not in _OPTIONAL:
            raise DataError(f"{file}: has no column {' or '.join(names)}; its header is {shown(', '.join(header))}")
    return found


def _number(place: str, column: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise DataError(f"{place}: {column} is {shown(text)}; it must be a number above 0")
    return value


def _whole(place: str, column: str, value: float) -> int:
    if value != int(value) or value > 2**40:
        raise DataError(f"{place}: {column} is {value:g}; it must be a whole number")
    return int(value)


def fit_rows(rows: Sequence[ServingRow], source: str, experts: tuple[int, int] = (0, 0)) -> StepModel:
    """Fit a step model to rows of one engine, model and machine. UsageError for fewer than 3 rows."""
    terms = (*TERMS, expert_term(*experts)) if experts[0] else TERMS
    return fit_steps(terms, [row.measured() for row in rows], source)
