"""One weight rounded in many ways: what each costs the model, run or inferred.

Runs cost (weights x schemes x what lies behind the weight). `points` bounds them: with 1 or 2, only one or two schemes
of a weight are run, and the others' KL comes from the squared error E = sum (x (W - W')^T)^2 of the weight's outputs
over calibration tokens, which costs no run. For small errors KL is a quadratic form in the change of the logits:

    points: 1    KL = KL_1 * E / E_1
    points: 2    the same below the finer point; KL = KL_1 * (E / E_1)^a above it, with a from both: the coarsest
                 scheme's KL grows more slowly, or faster, than its error

docs/log.md says how well that predicts.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np

from ingot.errors import PassError
from ingot.passes.calibration import CalibrationStage, Float32Array, Float64Array, Trial
from ingot.passes.quantization.gptq_rounding import DampedGram, gptq_round, output_error
from ingot.passes.quantization.rounding import RoundedWeight, dequantize, round_weight
from ingot.passes.quantization.scale_search import Scheme
from ingot.passes.weight_sites import WeightSite
from ingot.passes.weight_values import float32_values
from ingot.settings import num_threads

Rounding = Literal["nearest", "gptq"]
Points = Literal["all", 1, 2]


@dataclass(frozen=True)
class Sensitivity:
    """What quantizing one weight costs.

    sites           the nodes that read it
    kl              scheme -> mean KL in nats per token when this weight alone is quantized so
    output_error    scheme -> sum of squared errors of the weight's outputs over the calibration tokens, damped as gptq
                    does; of the weight itself where it is an embedding's or several layers'
    measured        schemes whose KL was run and not inferred
    """

    sites: tuple[WeightSite, ...]
    kl: Mapping[Scheme, float]
    output_error: Mapping[Scheme, float]
    measured: frozenset[Scheme]

    @property
    def name(self) -> str:
        """The first reader's path."""
        return self.sites[0].node.name or ""

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]."""
        tensor = self.sites[0].weight.const_value
        assert tensor is not None, "the manager verifies that initializers hold tensors"
        rows, columns = tensor.shape.numpy()
        return int(rows), int(columns)

    def table(self) -> Float64Array:
        """[schemes, 3]: KL, squared error, whether it was run."""
        rows = [(self.kl[scheme], self.output_error[scheme], scheme in self.measured) for scheme in self.kl]
        return np.array(rows, np.float64)

    @classmethod
    def from_table(cls, sites: tuple[WeightSite, ...], schemes: Sequence[Scheme], table: Float64Array) -> "Sensitivity":
        """What `table` gave of these schemes."""
        rows = dict(zip(schemes, table.tolist(), strict=True))
        return cls(
            sites,
            {scheme: row[0] for scheme, row in rows.items()},
            {scheme: row[1] for scheme, row in rows.items()},
            frozenset(scheme for scheme, row in rows.items() if row[2]),
        )


@dataclass
class WeightTrials:
    """One weight under all schemes. `gram` is that of its inputs, where one layer reads it."""

    sites: tuple[WeightSite, ...]
    schemes: Sequence[Scheme]
    rounding: Rounding
    gram: DampedGram | None
    _weight: Float32Array = field(init=False)
    _errors: dict[Scheme, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._weight = float32_values(self.sites[0].operand)

    def sensitivity(self, stage: CalibrationStage, tokens: int, points: Points) -> Sensitivity:
        """Run some schemes, infer the others."""
        run = chosen_points(self.schemes, points)
        trials = [trial_of(self.sites, partial(self._rounded, scheme)) for scheme in run]
        kl = dict(zip(run, stage.divergences(trials, tokens), strict=True))
        for scheme in self.schemes:
            if scheme not in self._errors:
                self._rounded(scheme)
        known = [(self._errors[scheme], kl[scheme]) for scheme in run]
        kl |= {scheme: inferred(self._errors[scheme], known) for scheme in self.schemes if scheme not in kl}
        return Sensitivity(self.sites, {scheme: kl[scheme] for scheme in self.schemes}, self._errors, frozenset(run))

    def _rounded(self, scheme: Scheme) -> Float32Array:
        """What the layer would compute with; its error is noted."""
        rounded = _round(self._weight, scheme, self.sites[0])
        if self.rounding == "gptq" and self.gram is not None:
            rounded = gptq_round(self._weight, rounded, self.gram, scheme, refine=0)
        block = scheme.block_columns(self._weight.shape[1])
        values = dequantize(rounded.codes, rounded.scale, rounded.zero_point, block)
        self._errors[scheme] = _squared_error(self._weight - values, self.gram)
        return values


def _round(weight: Float32Array, scheme: Scheme, site: WeightSite) -> RoundedWeight:
    try:
        return round_weight(weight, scheme, num_threads())
    except ValueError as error:
        raise PassError(f"weight {site.weight.name!r} holds {error} values; check the checkpoint") from error


def _squared_error(error: Float32Array, gram: DampedGram | None) -> float:
    return float(np.square(error, dtype=np.float64).sum()) if gram is None else output_error(error, gram.gram)


def chosen_points(schemes: Sequence[Scheme], points: Points) -> list[Scheme]:
    """The schemes that are run: all; or, from coarse to fine, the one at a quarter; or the first and the middle one."""
    ordered = sorted(schemes, key=lambda scheme: (scheme.bits, -(scheme.block_size or math.inf)))
    if points == "all" or len(ordered) <= points:
        return list(schemes)
    places = (len(ordered) // 4,) if points == 1 else (0, len(ordered) // 2)
    return [ordered[place] for place in places]


def inferred(error: float, known: Sequence[tuple[float, float]]) -> float:
    """KL at a squared error, from one or two points (squared error, KL): see the module's docstring.

    The exponent is kept between 1/2 and 2: points that noise has brought close say nothing better.
    """
    (large, large_kl), (small, small_kl) = max(known), min(known)
    if error <= 0 or small <= 0 or small_kl <= 0:
        return 0.0 if error <= 0 else small_kl
    exponent = 1.0
    if error > small and large > small:
        exponent = min(2.0, max(0.5, math.log(large_kl / small_kl) / math.log(large / small)))
    nearest, nearest_kl = min(known, key=lambda point: abs(math.log(point[0] / error)))
    return nearest_kl * float((error / nearest) ** exponent)


def trial_of(sites: Sequence[WeightSite], make: Callable[[], Float32Array]) -> Trial:
    """All readers of a weight get another one."""
    return dict.fromkeys((site.operand for site in sites), make)
