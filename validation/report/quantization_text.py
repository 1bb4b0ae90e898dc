"""The table of quantized weights as text, for the report, the summary and the command line."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ingot.sizes import format_bytes
from ingot.validation.quantization import WORST, Quantization, WeightFigures, summarize
from ingot.validation.report import formatting as fmt

_BARS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Column:
    """A column of the table: its title, its meaning, and a function for a weight's cell."""

    title: str
    meaning: str
    cell: Callable[[WeightFigures], str]


def _number(value: float | None) -> str:
    return "-" if value is None else fmt.significant(value, 3)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{fmt.significant(100 * value, 3)} %"


def _bytes(value: float | None) -> str:
    return "-" if value is None else format_bytes(value)


def _output_error(weight: WeightFigures) -> str:
    if weight.output_error is None or weight.output_error_nearest is None:
        return _percent(weight.output_error)
    return f"{_percent(weight.output_error)} (nearest {_percent(weight.output_error_nearest)})"


def _scales(weight: WeightFigures) -> str:
    found = " / ".join(map(_number, (weight.scale_min, weight.scale_median, weight.scale_max)))
    return f"{found} (float16)" if weight.scale_dtype == "float16" else found


COLUMNS: Mapping[str, Column] = {
    column.title: column
    for column in (
        Column("Weight", "the layer that reads it", lambda weight: weight.name),
        Column("Format", "bits of a code, columns that share a scale, zero points", lambda weight: weight.format),
        Column("Bytes", "codes, scales and zero points in the artifact", lambda weight: _bytes(weight.stored_bytes)),
        Column(
            "Bits",
            "stored bits per element, scales and zero points included",
            lambda weight: _number(weight.effective_bits),
        ),
        Column(
            "KL alone",
            "mean KL per token, in nats, of the predictions with only this weight quantized",
            lambda weight: _number(weight.kl),
        ),
        Column("Weight error", "‖W - Q‖ / ‖W‖", lambda weight: _percent(weight.relative_error)),
        Column(
            "Output error",
            "‖X(W - Q)ᵀ‖ / ‖XWᵀ‖ on the calibration data; in brackets with round-to-nearest",
            _output_error,
        ),
        Column("Scales", "smallest / median / largest; whether all are float16 numbers", _scales),
        Column(
            "Outliers",
            "share of elements beyond 4 times the root mean square",
            lambda weight: _percent(weight.outlier_share),
        ),
        Column("Peak", "largest |w| over the RMS", lambda weight: _number(weight.peak_over_rms)),
        Column("At ends", "share of codes at either end of their range", lambda weight: _percent(weight.end_share)),
    )
}


def shown_columns(found: Quantization) -> dict[str, Column]:
    """The columns that have a value for any weight, by title."""
    return {
        title: column
        for title, column in COLUMNS.items()
        if any(column.cell(weight).strip("-/ ") for weight in found.weights)
    }


def weight_cells(weight: WeightFigures, columns: Mapping[str, Column] = COLUMNS) -> dict[str, str]:
    """The weight's row of the table, by column."""
    return {title: column.cell(weight) for title, column in columns.items()}


def code_bars(weight: WeightFigures) -> str:
    """A histogram of the codes, from the lowest to the highest, as a row of bars; "-" if it was not measured."""
    most = max(weight.code_histogram, default=0)
    if not most:
        return "-"
    return "".join(_BARS[-(-count * (len(_BARS) - 1) // most)] for count in weight.code_histogram)


def summary_sentences(found: Quantization) -> list[str]:
    """Size, what the weights cost and which ones, how that was measured, and what would gain most."""
    if not found.weights:
        return []
    total = summarize(found)
    sentences = [f"{total.num_weights} weights, {total.elements:,} elements"]
    if total.stored_bytes is not None and total.effective_bits is not None:
        sentences[0] += (
            f": {format_bytes(total.stored_bytes)} instead of {format_bytes(total.float_bytes)} as float32, "
        )
        sentences[0] += f"{total.effective_bits:.3g} bits per element with scales and zero points"
    if total.kl_sum is not None and total.worst_share is not None:
        sentences.append(
            f"KL of each weight quantized alone sums to {total.kl_sum:.3g} nats; the {WORST} worst weights cause "
            f"{100 * total.worst_share:.0f} % of it"
        )
    if found.kl is not None:
        sentences.append(
            f"Measured on {found.kl.tokens:,} tokens of {found.kl.text} in float32, in {fmt.seconds(found.kl.seconds)}"
        )
    elif found.kl_absent:
        sentences.append(f"KL of single weights was not measured: {found.kl_absent}")
    return [*sentences, *total.advice]
