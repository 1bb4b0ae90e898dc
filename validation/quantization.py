"""Statistics of every quantized weight, and advice on the weights that cost the model most.

A statistic that was not measured is None. To add one: its field here, its column in report/quantization_text.py, its
line in docs/evidence.md.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pydantic import TypeAdapter

FLOAT_BITS = 32  # the baseline's weights
WORST = 5
_LEAST_SHARE = 0.1  # share of the summed KL from which a weight gets advice
_MORE_BITS = 8
_MOST_ADVICE = 3


@dataclass(frozen=True)
class WeightFigures:
    """One weight of the program.

    name             the node that reads it, such as "layers.0.mlp.down_proj"
    tensor           name of its codes in the program
    kind             type of the codes: integer, or float (fp8 e4m3)
    activations      quantization of the layer's inputs, such as "int8 dynamic per token"; "" for none
    bits             bits of a code; block_size: columns that share a scale, 0 for a whole row
    stored_bytes     bytes of codes, scales and zero points in the artifact
    method           rounding method: "gptq", "round-to-nearest"
    relative_error   ||W - W'|| / ||W||, Frobenius norms
    output_error     ||X (W - W')^T|| / ||X W^T|| on calibration data; output_error_nearest: with round-to-nearest
    scale_min ...    smallest, median and largest scale
    scale_dtype      the narrowest float type that holds every scale; engines may store a wider one
    outlier_share    share of weights beyond 4 times the root mean square; peak_over_rms: largest |w| over it
    end_share        share of codes at either end of their range
    code_histogram   counts over the range of the codes, in up to 16 bins; () if codes were not read
    kl               mean KL per token, in nats, of the model's predictions with only this weight quantized
    """

    name: str
    tensor: str
    bits: int
    block_size: int
    symmetric: bool
    elements: int
    kind: Literal["integer", "float"] = "integer"
    activations: str = ""
    stored_bytes: int | None = None
    method: str | None = None
    relative_error: float | None = None
    output_error: float | None = None
    output_error_nearest: float | None = None
    scale_min: float | None = None
    scale_median: float | None = None
    scale_max: float | None = None
    scale_dtype: Literal["float32", "float16"] | None = None
    outlier_share: float | None = None
    peak_over_rms: float | None = None
    end_share: float | None = None
    code_histogram: tuple[int, ...] = ()
    kl: float | None = None

    @property
    def format(self) -> str:
        """The quantization scheme in words."""
        block = f"blocks of {self.block_size}" if self.block_size else "per channel"
        sides = "" if self.kind == "float" else f", {'symmetric' if self.symmetric else 'asymmetric'}"
        bits = f"fp{self.bits}" if self.kind == "float" else f"{self.bits} bits"
        return f"{bits}, {block}{sides}" + (f"; inputs {self.activations}" if self.activations else "")

    @property
    def float_bytes(self) -> int:
        """Bytes of the weight in the baseline."""
        return self.elements * FLOAT_BITS // 8

    @property
    def effective_bits(self) -> float | None:
        """Stored bits per element, scales and zero points included."""
        return None if self.stored_bytes is None else 8 * self.stored_bytes / self.elements


@dataclass(frozen=True)
class KlMeasurement:
    """Measurement of the KL of single weights: text, tokens and time."""

    text: str
    sha256: str
    tokens: int
    window_tokens: int
    seconds: float


@dataclass(frozen=True)
class Quantization:
    """All quantized weights, in the program's order.

    kl    how KL was measured; None if it was not, for the reason in `kl_absent`
    """

    weights: tuple[WeightFigures, ...] = ()
    kl: KlMeasurement | None = None
    kl_absent: str = ""

    @property
    def worst_first(self) -> list[WeightFigures]:
        """The weights, sorted by KL, then output error, weight error and share of codes at the ends."""
        return sorted(self.weights, key=_badness, reverse=True)

    def as_json(self) -> dict[str, Any]:
        """Return the content of evidence/quantization.json."""
        rows = [
            {**asdict(weight), "format": weight.format, "effective_bits": weight.effective_bits}
            for weight in self.weights
        ]
        return {
            "summary": asdict(summarize(self)),
            "kl": asdict(self.kl) if self.kl else None,
            "kl_absent": self.kl_absent,
            "weights": rows,
        }

    @classmethod
    def from_json(cls, text: bytes | str) -> "Quantization":
        """Parse quantization.json, ignoring derived values. pydantic's ValidationError for an invalid record."""
        return TypeAdapter(cls).validate_json(text, strict=True)


@dataclass(frozen=True)
class QuantizationSummary:
    """Totals over all weights; `advice` are sentences.

    effective_bits    stored bits per quantized weight, scales and zero points included
    kl_sum            sum of the KL of each weight quantized alone; worst_share: share of the WORST worst weights
    """

    num_weights: int
    elements: int
    float_bytes: int
    stored_bytes: int | None
    effective_bits: float | None
    kl_sum: float | None
    worst_share: float | None
    advice: tuple[str, ...]


def summarize(found: Quantization) -> QuantizationSummary:
    """Totals over all weights, and advice on the worst of them."""
    weights = found.weights
    elements = sum(weight.elements for weight in weights)
    sizes = [weight.stored_bytes for weight in weights]
    stored = None if None in sizes or not sizes else sum(size for size in sizes if size is not None)
    kls = sorted((weight.kl for weight in weights if weight.kl is not None), reverse=True)
    total = sum(kls) if kls else None
    return QuantizationSummary(
        num_weights=len(weights),
        elements=elements,
        float_bytes=sum(weight.float_bytes for weight in weights),
        stored_bytes=stored,
        effective_bits=8 * stored / elements if stored is not None and elements else None,
        kl_sum=total,
        worst_share=sum(kls[:WORST]) / total if total else None,
        advice=tuple(_advice(found.worst_first, total, stored)) if total else (),
    )


def _badness(weight: WeightFigures) -> tuple[float, ...]:
    figures = (weight.kl, weight.output_error, weight.relative_error, weight.end_share)
    return tuple(-1.0 if figure is None else figure for figure in figures)


def _advice(worst: Sequence[WeightFigures], total: float, stored: int | None) -> list[str]:
    sentences = []
    for weight in worst[:_MOST_ADVICE]:
        share = (weight.kl or 0.0) / total
        if share < _LEAST_SHARE or weight.bits >= _MORE_BITS:
            continue
        more = weight.elements * (_MORE_BITS - weight.bits) // 8
        cost = f"{more / 1e3:,.0f} kB more" + (f" ({100 * more / stored:+.1f} %)" if stored else "")
        sentences.append(
            f"Give {weight.name} {_MORE_BITS} bits: alone it causes {100 * share:.0f} % of the summed KL; cost: {cost}"
        )
    return sentences
