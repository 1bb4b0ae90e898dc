"""The pass gptq: weight matrices to 2, 3, 4 or 8 bits, each rounded for the inputs that it gets on calibration data.

Matched and Replacement are those of quantize-weights. This pass extends its options and statistics.
See gptq_rounding.py for the algorithm (Frantar et al., GPTQ, arXiv:2210.17323).

Layers are rounded in the order in which they run, on inputs that the already quantized layers before them make. So a
layer compensates for the errors of those before it. The embedding is quantized first.

Rounded to nearest, with the clip: the embedding table, a head that shares the table's tensor, a tensor that several
layers share, a layer whose inputs are zero on all of the data, an expert that too few tokens reach. The
statistics of a weight gain

    method           "gptq", or "round-to-nearest" with a `reason`
    output_error     ||X (W - W')^T|| / ||X W^T|| on the calibration data, damped as for the rounding;
                     output_error_nearest: the same for the weight rounded to nearest
    damping          share of the mean diagonal that was added to X^T X
    tokens           calibration tokens that reached the layer

Refuses: inputs that are not finite, and what quantize-weights refuses.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.errors import PassError
from ingot.passes.base import DAMPING, PassKind, Range
from ingot.passes.calibration import (
    CalibrationStage,
    RecordedWeight,
    note_errors,
    report_error,
    require_calibration,
    weight_arrays,
)
from ingot.passes.numerics.arrays import Float32Array, Float64Array
from ingot.passes.numerics.gptq_rounding import DampedGram, damped_gram, gptq_round, output_error
from ingot.passes.numerics.rounding import RoundedWeight, round_weight
from ingot.passes.numerics.scheme import Scheme
from ingot.passes.quantization.quantize_weights import Groups, Key, QuantizeWeights, append_statistics, num_elements
from ingot.passes.weights import WeightSite
from ingot.progress import report_progress
from ingot.settings import num_threads

Statistics = dict[str, object]
_ZEROS = "its inputs are zero on all of the calibration data"


@dataclass(frozen=True)
class Gptq(QuantizeWeights):
    """Options, in addition to those of QuantizeWeights:

    act_order    round columns with the largest inputs first; the stored order stays
    damping      share of the mean diagonal of X^T X that is added to it; ten times as much where Cholesky fails
    refine       rounds of fitting scales and choosing codes again after GPTQ; 0 for plain GPTQ
    """

    name: ClassVar[str] = "gptq"
    kind: ClassVar[PassKind] = "quantization"
    summary: ClassVar[str] = "Rounds weight matrices to 2 to 8 bits for the inputs they get on calibration data."
    needs_calibration: ClassVar[bool] = True

    act_order: bool = True
    damping: Annotated[float, DAMPING] = 0.01
    refine: Annotated[int, Range(ge=0, le=100)] = 2

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Round the weights that need no data; then the others, layer by layer."""
        calibration = require_calibration(self.name)
        work = _Work(self.plan(model))
        statistics = [self._nearest(model.graph, key, reason, work) for key, reason in work.unreachable()]
        if work.groups:
            for stage in calibration.stages(model):
                statistics += self._stage(model.graph, stage, work)
            calibration.facts.record(model)
        for key in list(work.groups):
            statistics.append(self._nearest(model.graph, key, "no calibration data reaches it", work))
        if statistics:
            append_statistics(model, statistics)
            note_errors(self.name, {str(row["name"]): pair for row in statistics if (pair := _errors(row))})
        return ir.passes.PassResult(model, modified=bool(statistics))

    def _nearest(self, graph: ir.Graph, key: Key, reason: str, work: "_Work") -> Statistics:
        """Round to nearest, for a weight that gptq cannot round."""
        found = self._quantize(graph, key, work.take(key, self.name))
        return {**found, "method": "round-to-nearest", "reason": reason}

    def _stage(self, graph: ir.Graph, stage: CalibrationStage, work: "_Work") -> Iterable[Statistics]:
        """Quantize the stage's layers; those that read one input share its factorization."""
        recorded, made = stage.recorded(), dict[str, NDArray[Any]]()
        for group in stage.groups:
            keys = work.keys_of(group.linears)
            damped = self._damped(stage, group.source) if keys and recorded is None else _ZEROS
            for key in keys:
                sites = work.take(key, self.name)
                name = sites[0].node.name or ""
                rounder: _Rounder | RecordedWeight = RecordedWeight(recorded or {}, name)
                if recorded is None:
                    rounder = _Rounder(damped, key[1], self.refine, stage.tokens(group.source))
                found = self._quantize(graph, key, sites, rounder)
                if isinstance(rounder, _Rounder):
                    made |= weight_arrays(name, rounder.rounded, rounder.facts)
                if pair := _errors(rounder.facts):
                    report_error(self.name, name, *pair)
                yield {**found, **rounder.facts}
        if recorded is None:
            stage.record(made)

    def _damped(self, stage: CalibrationStage, source: ir.Value) -> DampedGram | str:
        """The factored X^T X, or the reason to round without it."""
        if reason := stage.too_few(source):
            return reason
        gram = stage.gram(source)
        return factored_gram(gram, source, self.damping, self.act_order) if gram.any() else _ZEROS


def factored_gram(gram: Float64Array, source: ir.Value, damping: float, act_order: bool) -> DampedGram:
    """Damp and factor X^T X of the layers that read `source`; PassError when it is zero, not finite or singular."""
    try:
        return damped_gram(gram, damping, act_order)
    except ValueError as error:
        raise PassError(f"{source.name!r} gives its linear layers {error}; give other calibration text") from error


class _Work:
    """The weights that are left to quantize."""

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self._total = sum(num_elements(weight) for weight, _ in groups)
        self._done = 0

    def unreachable(self) -> list[tuple[Key, str]]:
        """Weights that gptq does not round, and why."""
        return [(key, reason) for key, sites in self.groups.items() if (reason := _reason_to_skip(sites))]

    def keys_of(self, nodes: Iterable[ir.Node]) -> list[Key]:
        """The weights of these layers that are left to quantize."""
        readers = set(nodes)
        return [key for key, sites in self.groups.items() if sites[0].node in readers]

    def take(self, key: Key, name: str) -> list[WeightSite]:
        """Remove a weight from the work; return its sites."""
        self._done += num_elements(key[0])
        report_progress(name, self._done, self._total)
        return self.groups.pop(key)


def _reason_to_skip(sites: list[WeightSite]) -> str | None:
    if any(site.role == "embedding" for site in sites):
        return "embedding table" if len(sites) == 1 else "shares the embedding table's tensor"
    return None if len(sites) == 1 else "shared by several layers"


@dataclass
class _Rounder:
    """Rounds one weight and keeps the result."""

    damped: DampedGram | str
    scheme: Scheme
    refine: int
    tokens: int
    facts: Statistics = field(default_factory=dict)
    rounded: RoundedWeight = field(init=False)

    def __call__(self, values: NDArray[Any]) -> RoundedWeight:
        weight = values.astype(np.float32)
        self.rounded = grid = round_weight(weight, self.scheme, num_threads())
        if isinstance(self.damped, str):
            self.facts = {"method": "round-to-nearest", "reason": self.damped}
            return grid
        self.rounded = gptq_round(weight, grid, self.damped, self.scheme, self.refine)
        self.facts = {
            "method": "gptq",
            "output_error": self._relative_error(weight, self.rounded, self.damped),
            "output_error_nearest": self._relative_error(weight, grid, self.damped),
            "damping": self.damped.damping,
            "tokens": self.tokens,
        }
        return self.rounded

    def _relative_error(self, weight: Float32Array, rounded: RoundedWeight, damped: DampedGram) -> float:
        error = weight - rounded.restored(self.scheme)
        norm = output_error(weight, damped.gram)
        return float((output_error(error, damped.gram) / norm) ** 0.5) if norm else 0.0


def _errors(facts: Statistics) -> tuple[float, float] | None:
    """Output errors rounded to nearest and by gptq; None for a weight that gptq did not round."""
    nearest, after = facts.get("output_error_nearest"), facts.get("output_error")
    return (nearest, after) if isinstance(nearest, float) and isinstance(after, float) else None
