"""The pass awq: scales input channels before quantization, so that those with large inputs lose least.

    Matched         y = Gemm(x, W, b?, transB=1), and others that read x      x made by a norm, a Mul, an attention
    Replacement     y = Gemm(x / s, W * s, b?, transB=1)                      1 / s in the node that makes x, or, with
                                                                              `fold: always`, in a Mul

channel_scaling.py lists the nodes that absorb 1 / s. Lin et al., AWQ, arXiv:2306.00978: a large input magnifies the
rounding error of its column; a column that is scaled up is rounded more finely than the others of its block. For each
group of layers that read one input, the pass searches for the scale with the smallest objective: the squared error of
what the block adds to the residual stream on calibration data, with the group's weights rounded as the options say.
Candidates are s = mean|x|^a and s = mean|x|^a / mean|w|^(1 - a) for a up to 1, and no scale. Where the block is one
layer, its error comes from X^T X over all calibration tokens instead of a run.

The model's function stays the same, and no weight is rounded here. quantize-weights or gptq must follow, with the same
bits, block_size, symmetric and scale_dtype; before gptq, `rounding: gptq` searches for gptq's own loss (docs/log.md).
Run the pass after fold-constants and pack-projections. Its kind is quantization because it is useless without: a
baseline leaves it out.

Left alone, with the reason in the log: weights that are shared or quantized, inputs that are zero on all data; with
`fold: exact`, inputs that others read too, norms whose weight is computed (run fold-constants before). The head, which
usually has 8 bits or more, is left alone silently. The choices are in the model's metadata "ingot.awq" as JSON:
[{layers, exponent, by_weights, error_before, error_after}, ...], errors relative to the block's output.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
import onnx_ir as ir

from ingot.errors import PassError
from ingot.options import Range
from ingot.passes.base import TOKENS, Pass, PassKind
from ingot.passes.calibration import CalibrationStage, LinearGroup
from ingot.passes.model_facts import Fact, Rows
from ingot.passes.numerics.arrays import Float32Array, Float64Array
from ingot.passes.numerics.channel_scales import awq_scale, relative_magnitudes
from ingot.passes.numerics.gptq_rounding import DampedGram, gptq_round
from ingot.passes.numerics.rounding import round_weight
from ingot.passes.numerics.scheme import BlockSize, ScaleDtype, Scheme, WeightBits
from ingot.passes.quantization.channel_scaling import (
    Choice,
    Facts,
    FoldOption,
    OwnMul,
    Place,
    Weights,
    block_of,
    gram_error,
    relative_error,
    scale_groups,
    weights_of,
)
from ingot.passes.quantization.gptq import factored_gram
from ingot.passes.weights import weight_sites
from ingot.settings import num_threads

AWQ_FACTS = Fact("ingot.awq", Rows)  # see the module's docstring
DAMPING = 0.01

_log = logging.getLogger("ingot.passes")


@dataclass(frozen=True)
class Awq(Pass):
    """Options:

    bits, block_size, symmetric, scale_dtype    how the weights will be rounded: those of the pass that follows
    rounding                       "nearest" or "gptq": how each trial is rounded; "gptq" takes longer
    steps                          exponents to try between 0 and 1
    search_tokens                  calibration tokens that a block is run on, in whole sequences
    fold                           "exact": scale only where the node that makes the input absorbs it; "always": else by
                                   a Mul, which no checkpoint format can hold
    least_gain                     share of the block's error that such a Mul must take away
    """

    name: ClassVar[str] = "awq"
    kind: ClassVar[PassKind] = "quantization"
    summary: ClassVar[str] = "Scales input channels so that quantization hurts least; rounds nothing itself."
    needs_calibration: ClassVar[bool] = True
    keeps_schemes: ClassVar[bool] = True

    bits: WeightBits = 4
    block_size: BlockSize = 32
    symmetric: bool = False
    scale_dtype: ScaleDtype = "float32"
    rounding: Literal["nearest", "gptq"] = "nearest"
    steps: Annotated[int, Range(ge=1, le=1000)] = 10
    search_tokens: Annotated[int, TOKENS] = 2048
    fold: FoldOption = "exact"
    least_gain: Annotated[float, Range(ge=0, lt=1)] = 0.1

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Search group by group on the unscaled model; then scale everything at once."""
        heads = {site.node for site in weight_sites(model) if site.role == "head"}

        def search(stage: CalibrationStage, group: LinearGroup, fold: Place) -> Choice | None:
            return self._search(model.graph, stage, group, fold)

        choices = scale_groups(self.name, model, self.fold, heads, search)
        if choices:
            AWQ_FACTS.record(model, choices)
        return ir.passes.PassResult(model, modified=bool(choices))

    def _search(self, graph: ir.Graph, stage: CalibrationStage, group: LinearGroup, fold: Place) -> Choice | None:
        """The best scale of a group; None where none is better than no scale."""
        name = group.linears[0].name
        if reason := stage.too_few(group.source):
            _log.info("%s: left alone: %s: %s", self.name, name, reason)
            return None
        gram = stage.gram(group.source)
        if not gram.any():
            _log.info("%s: left alone: the inputs of %s are all zero", self.name, name)
            return None
        weights, factored = weights_of(group), self._factored(gram, group)
        objective = self._objective(graph, stage, group, weights, gram)

        def error(scale: Float32Array) -> float:
            return objective({node: self._rounded(weight, scale, factored) for node, weight in weights.items()})

        before = best = error(np.ones(len(gram), np.float32))
        found: Choice | None = None
        for facts, scale in self._candidates(stage, group, fold, weights):
            after = error(scale)
            if after < best:
                best, found = after, (facts | {"error_before": before, "error_after": after}, scale)
        if isinstance(fold, OwnMul) and found is not None and best > (1 - self.least_gain) * before:
            _log.info("%s: left alone: a Mul before %s gains %.1f %%", self.name, name, 100 * (1 - best / before))
            return None
        return found

    def _objective(
        self, graph: ir.Graph, stage: CalibrationStage, group: LinearGroup, weights: Weights, gram: Float64Array
    ) -> Callable[[Weights], float]:
        """The error of the block's output, relative to its norm, as a function of the group's weights."""
        nodes, outputs = block_of(graph, group)
        if not outputs:
            raise PassError(f"{group.linears[0].name!r} adds nothing to a residual stream; awq has no objective for it")
        if set(nodes) == set(group.linears):
            return gram_error(weights, gram)
        run = stage.block(nodes, outputs, self.search_tokens)
        exact = [np.array(output) for output in run({})]
        return lambda trial: relative_error(run(trial), exact)

    def _factored(self, gram: Float64Array, group: LinearGroup) -> DampedGram | None:
        """X^T X factored, once for all trials; None where they are rounded to nearest."""
        if not np.isfinite(gram).all():
            raise PassError(f"{group.source.name!r} gives its linear layers inputs that are not finite")
        return factored_gram(gram, group.source, DAMPING, act_order=True) if self.rounding == "gptq" else None

    def _rounded(self, weight: Float32Array, scale: Float32Array, factored: DampedGram | None) -> Float32Array:
        """The weight scaled, rounded as the options say, and scaled back: what the layer would compute with."""
        scheme = Scheme.of(self.bits, self.block_size, self.symmetric, scale_dtype=self.scale_dtype)
        scaled = weight * scale
        rounded = round_weight(scaled, scheme, num_threads())
        if factored is not None:
            rounded = gptq_round(scaled, rounded, factored.scaled(scale), scheme, refine=0)
        return rounded.restored(scheme) / scale

    def _candidates(
        self, stage: CalibrationStage, group: LinearGroup, fold: Place, weights: Weights
    ) -> Iterator[tuple[Facts, Float32Array]]:
        """Layers, exponent and whether weights count; s [in]."""
        mean = stage.mean_absolute(group.source)
        block_columns = Scheme.of(self.bits, self.block_size, self.symmetric).block_columns(len(mean))
        inputs = fold.shared(mean)
        magnitudes = fold.shared(relative_magnitudes(list(weights.values()), block_columns))
        layers = [node.name or "" for node in group.linears]
        for step in range(1, self.steps + 1):
            for by_weights in (False, True):
                exponent = step / self.steps
                scale = awq_scale(inputs, magnitudes if by_weights else None, exponent)
                yield {"layers": layers, "exponent": exponent, "by_weights": by_weights}, scale
