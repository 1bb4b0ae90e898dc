"""The pass awq: scales input channels before quantization, so that those with large inputs lose least.

    Matched         y = Gemm(x, W, b?, transB=1), and others that read x      x made by a norm, a product, an attention
    Replacement     y = Gemm(x / s, W * s, b?, transB=1)                      1 / s in what makes x: channel_folds.py
                                                                              or, `fold: always`, in a Mul

Lin et al., AWQ, arXiv:2306.00978. A large input magnifies the rounding error of its column; a column that is scaled
up is rounded more finely beside its neighbours in the block. For each group of layers that read one input, the scale
is searched for on the real objective: the squared error of what the block adds to the residual stream on calibration
data, with the group's weights rounded as the options say. Candidates are s = mean|x|^a and
s = mean|x|^a / mean|w|^(1 - a) for a up to 1; no scale at all is one of them. Where the block is one layer, its error
comes from X^T X instead of a run.

The model's function stays the same; no weight is rounded here. quantize-weights or gptq follow, with the same bits,
block_size and symmetric; before gptq, `rounding: gptq` searches for what gptq will lose (docs/log.md). Run it behind
fold-constants and pack-projections. Its kind is quantization because a model that is not quantized has no use for it:
the baseline leaves it out.

Left alone, with the reason in the log: weights that are shared or quantized, inputs that are zero on all data; without
a Mul, inputs that others read too, norms whose weight is computed (run fold-constants before); and the head, which is
mostly left at 8 bits or more. What was chosen stands in the model's metadata "ingot.awq" as JSON: [{layers, exponent,
by_weights, error_before, error_after}, ...], errors relative to the block's output.

The error of a block's output as a function of the weights that a group of its linear layers would compute with.

The block reaches from the layers to where their results join the residual stream. Where it is the layers alone, the
error comes from X^T X over all calibration tokens instead of a run.
"""

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.errors import PassError, UsageError
from ingot.passes.base import Pass, PassKind
from ingot.passes.calibration import (
    Arrays,
    CalibrationStage,
    Float32Array,
    Float64Array,
    LinearGroup,
    fact_arrays,
    recorded_facts,
    require_calibration,
)
from ingot.passes.numerics.gptq_rounding import DampedGram, damped_gram, gptq_round
from ingot.passes.numerics.rounding import dequantize, round_weight
from ingot.passes.numerics.scale_search import Scheme, WeightBits
from ingot.passes.quantization.channel_folds import Fold, OwnMul, Scalings, block_of, can_scale, find_fold, weights_of
from ingot.passes.quantization.quantize_weights import BlockSize
from ingot.passes.rewriting import Refusal
from ingot.passes.weights import weight_sites
from ingot.progress import report_progress
from ingot.settings import num_threads

Weights = dict[ir.Node, Float32Array]
Loss = Callable[[Weights], float]


def block_error(
    graph: ir.Graph,
    stage: CalibrationStage,
    group: LinearGroup,
    weights: Weights,
    gram: Float64Array,
    search_tokens: int,
) -> Loss:
    """Error of the block's output, relative to its norm, as a function of the group's weights."""
    nodes, outputs = block_of(graph, group)
    if not outputs:
        raise PassError(f"{group.linears[0].name!r} adds nothing to a residual stream; awq knows no objective for it")
    if set(nodes) == set(group.linears):
        return _gram_loss(gram, weights)
    run = stage.block(nodes, outputs, search_tokens)
    exact = [np.array(output) for output in run({})]
    norm = sum(float(np.square(output, dtype=np.float64).sum()) for output in exact) or 1.0

    def loss(trial: Weights) -> float:
        results = zip(run(trial), exact, strict=True)
        return float((sum(float(np.square(a - b, dtype=np.float64).sum()) for a, b in results) / norm) ** 0.5)

    return loss


def _gram_loss(gram: Float64Array, weights: Weights) -> Loss:
    """The same from X^T X over all calibration tokens, where the block is linear."""

    def squared(arrays: Weights) -> float:
        return float(sum(np.einsum("oi,oi->", array @ gram, array) for array in arrays.values()))

    norm = squared(weights) or 1.0
    return lambda trial: float((squared({node: weights[node] - array for node, array in trial.items()}) / norm) ** 0.5)


AWQ_KEY = "ingot.awq"  # model.metadata_props: JSON, see the module's docstring

Taker = Fold | OwnMul

_log = logging.getLogger("ingot.passes")
_LEAST = 1e-4
DAMPING = 0.01


@dataclass(frozen=True)
class Choice:
    """A group's scale and what it gains. Errors are relative to the norm of the block's output."""

    layers: tuple[str, ...]
    exponent: float
    by_weights: bool
    error_before: float
    error_after: float


@dataclass(frozen=True)
class Awq(Pass):
    """Options:

    bits, block_size, symmetric    how the weights will be rounded: as the pass that follows has them
    rounding                       "nearest" or "gptq": how each trial is rounded; the latter takes its time
    steps                          exponents to try between 0 and 1
    search_tokens                  calibration tokens that a block is run on, in whole sequences
    fold                           "exact": only where what makes the input takes up the scale; "always": else by a Mul,
                                   which no checkpoint format has a place for
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
    rounding: Literal["nearest", "gptq"] = "nearest"
    steps: int = 10
    search_tokens: int = 2048
    fold: Literal["exact", "always"] = "exact"
    least_gain: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        for option, value in (("steps", self.steps), ("search_tokens", self.search_tokens)):
            if value < 1:
                raise UsageError(f"{self.name}: {option} is {value}; allowed: 1 or more")
        if not 0 <= self.least_gain < 1:
            raise UsageError(f"{self.name}: least_gain is {self.least_gain}; allowed: from 0 to below 1")

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Search group by group on the model as it is; then scale everything at once."""
        calibration = require_calibration(self.name)
        sites = weight_sites(model)
        heads, total = {site.node for site in sites if site.role == "head"}, len(sites)
        scalings, choices, done = Scalings(), [], 0
        for stage in calibration.stages(model):
            known, made = stage.recorded(), dict[str, NDArray[Any]]()
            for group in stage.groups:
                name = group.linears[0].name or ""
                found = None
                if known is not None:
                    found = _recalled(known, name, self._fold(group))
                elif not heads & set(group.linears):
                    found = self._search(model.graph, stage, group)
                if found is not None:
                    choice, fold, scale = found
                    scalings.add(group, fold, scale)
                    choices.append(choice)
                    made |= {f"{name}.scale": scale, **fact_arrays(name, asdict(choice))}
                done += len(group.linears)
                report_progress(self.name, done, total)
            if known is None:
                stage.record(made)
        if not choices:
            return ir.passes.PassResult(model, modified=False)
        scalings.apply(model.graph)
        calibration.facts.record(model)
        model.metadata_props[AWQ_KEY] = json.dumps([asdict(choice) for choice in choices])
        return ir.passes.PassResult(model, modified=True)

    def _search(
        self, graph: ir.Graph, stage: CalibrationStage, group: LinearGroup
    ) -> tuple[Choice, Taker, Float64Array] | None:
        """The best scale of a group; None where nothing can take it up, or none is better than no scale."""
        fold = self._fold(group)
        if isinstance(fold, Refusal):
            _log.info("%s: left alone: %s", self.name, fold)
            return None
        gram = stage.gram(group.source)
        if not gram.any():
            _log.info("%s: left alone: %s is fed nothing but zeros", self.name, group.linears[0].name)
            return None
        weights, damped = weights_of(group), self._damped(gram, group)
        loss = block_error(graph, stage, group, weights, gram, self.search_tokens)
        one = np.ones(len(gram), np.float32)
        before = best = loss({node: self._rounded(weight, one, damped) for node, weight in weights.items()})
        found: tuple[float, bool, Float64Array] | None = None
        for exponent, by_weights, scale in self._candidates(stage, group, fold, weights):
            error = loss({node: self._rounded(weight, scale, damped) for node, weight in weights.items()})
            if error < best:
                best, found = error, (exponent, by_weights, scale.astype(np.float64))
        if found is None or self._is_too_little(group, fold, before, best):
            return None
        layers = tuple(node.name or "" for node in group.linears)
        return Choice(layers, found[0], found[1], before, best), fold, found[2]

    def _fold(self, group: LinearGroup) -> Taker | Refusal:
        """What takes up the scale of a group's input."""
        fold = find_fold(group)
        return OwnMul() if isinstance(fold, Refusal) and self.fold == "always" and can_scale(group) else fold

    def _is_too_little(self, group: LinearGroup, fold: Taker, before: float, after: float) -> bool:
        """Whether a Mul costs more than it gains."""
        if not isinstance(fold, OwnMul) or after <= (1 - self.least_gain) * before:
            return False
        _log.info(
            "%s: left alone: a Mul before %s gains %.1f %%",
            self.name,
            group.linears[0].name,
            100 * (1 - after / before),
        )
        return True

    def _damped(self, gram: Float64Array, group: LinearGroup) -> DampedGram | None:
        """X^T X factorised, once for all trials; None where they are rounded to the nearest."""
        if not np.isfinite(gram).all():
            raise PassError(f"{group.source.name!r} gives its linear layers inputs that are not finite")
        return damped_gram(gram, DAMPING, act_order=True) if self.rounding == "gptq" else None

    def _rounded(self, weight: Float32Array, scale: Float32Array, damped: DampedGram | None) -> Float32Array:
        """The weight, scaled, rounded as the options say, and scaled back: what the layer would compute with."""
        block_size = 0 if self.block_size == "channel" else self.block_size
        scheme = Scheme(self.bits, block_size, self.symmetric)
        scaled = weight * scale
        rounded = round_weight(scaled, scheme, num_threads())
        if damped is not None:
            rounded = gptq_round(scaled, rounded, damped.scaled(scale), scheme, refine=0)
        block = scheme.block_columns(weight.shape[1])
        restored: Float32Array = dequantize(rounded.codes, rounded.scale, rounded.zero_point, block) / scale
        return restored

    def _candidates(
        self, stage: CalibrationStage, group: LinearGroup, fold: Taker, weights: Weights
    ) -> Iterator[tuple[float, bool, Float32Array]]:
        """Exponent, whether weights count, and s [in] around 1."""
        inputs = np.maximum(fold.shared(stage.mean_absolute(group.source)), _LEAST)
        sizes = np.maximum(fold.shared(self._sizes(weights)), _LEAST)
        for step in range(1, self.steps + 1):
            exponent = step / self.steps
            yield exponent, False, _around_one(inputs**exponent)
            yield exponent, True, _around_one(inputs**exponent / sizes ** (1 - exponent))

    def _sizes(self, weights: Weights) -> Float64Array:
        """Mean over all rows of |w| over the largest |w| of its block: [in]."""
        parts = []
        for weight in weights.values():
            size = self.block_size if isinstance(self.block_size, int) and self.block_size else weight.shape[1]
            magnitude = np.abs(weight)
            starts = np.arange(0, weight.shape[1], size)
            largest = np.maximum.reduceat(magnitude, starts, axis=1)
            parts.append(magnitude / np.maximum(np.repeat(largest, size, axis=1)[:, : weight.shape[1]], 1e-30))
        mean: Float64Array = np.concatenate(parts).mean(axis=0, dtype=np.float64)
        return mean


def _recalled(arrays: Arrays, name: str, fold: Taker | Refusal) -> tuple[Choice, Taker, Float64Array] | None:
    """A group's choice from a build that was cut off; None where it was to leave the group alone."""
    if f"{name}.scale" not in arrays:
        return None
    assert not isinstance(fold, Refusal)
    facts = recorded_facts(arrays, name)
    return Choice(**{**facts, "layers": tuple(facts["layers"])}), fold, arrays[f"{name}.scale"]


def _around_one(scale: Float64Array) -> Float32Array:
    """Geometric middle of the extremes at 1."""
    centred: Float32Array = (scale / np.sqrt(scale.max() * scale.min())).astype(np.float32)
    return centred
