"""The pass smooth-quant: weights and activations of linear layers to 8 bits, with large inputs moved into the weights.

    Matched         y = Gemm(x, W, b?, transB=1), and others that read x

    Replacement     y = Gemm(x', W', b?, transB=1)
                    x'  of x / s, quantized as quantize-activations does
                    W'  of W * s, int8 symmetric as quantize-weights does, per channel or per tensor
                    1 / s in the node that makes x, or, with `fold: always`, in a Mul: channel_scaling.py

Xiao et al., SmoothQuant, arXiv:2211.10438. The inputs of a few channels are often far larger than the others and would
set the scale for all; s moves that into the weights, which vary less:

    s = max|x| ^ alpha / max|w| ^ (1 - alpha)        per input channel, over calibration tokens and over all rows

`alpha: auto` takes, for each group of layers that read one input, the alpha whose block output is nearest to the exact
one on calibration data, with weights and inputs rounded as in the result. While a group is searched, the graph holds
nodes that scale and round its input. Outlier channels can keep their precision, too (LLM.int8, arXiv:2208.07339).

Each of the three steps can be left out: `alpha: none`, `activations: none`, `weights: none`. So gptq can round the
weights:

    - smooth-quant: {weights: none}
    - gptq: {bits: 8, block_size: channel, symmetric: true}

Head and embedding are not smoothed, and the head's input is not rounded; their weights are, as `lm_head` and
`embedding` say. A layer whose input has no node that can absorb the scale is not smoothed; the log has the reason. The
choices are in the model's metadata "ingot.smooth-quant": [{layers, alpha, error_before, error_after}, ...].

Run the pass after fold-constants and pack-projections. Refuses what quantize-activations and quantize-weights refuse.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Final, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.errors import PassError, UsageError
from ingot.options import Range
from ingot.passes.base import TOKENS, Pass, PassKind
from ingot.passes.calibration import BlockRun, CalibrationStage, LinearGroup
from ingot.passes.model_facts import Fact, Rows
from ingot.passes.numerics.activation_rounding import LARGEST, ActivationScheme, RangeMethod
from ingot.passes.numerics.arrays import Float32Array, Float64Array
from ingot.passes.numerics.channel_scales import LEAST, smoothing_scale
from ingot.passes.numerics.rounding import RoundedWeight, round_per_tensor, round_weight
from ingot.passes.numerics.scheme import ScaleDtype, Scheme
from ingot.passes.quantization.activation_nodes import ACTIVATIONS_KEY, insert_activation_quantization
from ingot.passes.quantization.channel_scaling import (
    Choice,
    FoldOption,
    Place,
    block_of,
    relative_error,
    scale_groups,
    weights_of,
)
from ingot.passes.quantization.quantize_activations import (
    OUTLIER_THRESHOLD,
    OUTLIERS,
    PERCENTILE,
    ActivationScale,
    QuantizeActivations,
    finite_peaks,
)
from ingot.passes.quantization.quantize_weights import Bits, Key, QuantizeWeights, Rounder
from ingot.passes.quantization.weight_nodes import STRATEGY_KEY, float_value
from ingot.passes.rewriting import add_initializer
from ingot.passes.weights import WeightSite, drop_if_unused, weight_sites
from ingot.settings import num_threads

SMOOTHING_FACTS = Fact("ingot.smooth-quant", Rows)  # see the module's docstring
TABLE_BLOCK: Final = 64  # the widest in which a head of 8 bits needs no rows of padding: lower_onnxruntime_cpu.py

WeightScale = Literal["channel", "tensor", "none"]


@dataclass(frozen=True)
class SmoothQuant(Pass):
    """Options:

    alpha                how far inputs are moved into weights: 0 to 1; "auto": searched for each group of layers on its
                         block's output; "none": not at all
    weights              "channel" or "tensor": what shares a scale; "none": another pass rounds the weights
    activations          "dynamic": a scale per token; "static": one per layer, from data; "none": left as they are
    range, percentile    of static scales, as in quantize-activations
    outliers, outlier_threshold    input channels that keep their precision, as in quantize-activations
    clip                 search for the weights' scales with the smallest error; else take them from the largest values
    scale_dtype          float32, or float16: choose codes with weights' scales rounded to it, as in quantize-weights
    lm_head, embedding   bits of head and table, in blocks of TABLE_BLOCK; "none" to leave them as they are
    exclude              patterns of layers whose weights and inputs stay as they are
    fold                 "exact": only where the node that makes the input absorbs the scale; "always": else by a Mul
    steps                "auto" tries this many alphas above 0, up to 1
    search_tokens        calibration tokens that "auto" runs a block on, in whole sequences
    """

    name: ClassVar[str] = "smooth-quant"
    kind: ClassVar[PassKind] = "quantization"
    summary: ClassVar[str] = "Rounds weights and activations to 8 bits, after moving large inputs into the weights."

    alpha: Annotated[float, Range(ge=0, le=1, usual=0.5)] | Literal["auto", "none"] = 0.5
    weights: WeightScale = "channel"
    activations: ActivationScale = "dynamic"
    range: RangeMethod = "absmax"
    percentile: Annotated[float, PERCENTILE] = 99.99
    outliers: Annotated[float, OUTLIERS] = 0.0
    outlier_threshold: Annotated[float, OUTLIER_THRESHOLD] = 0.0
    clip: bool = True
    scale_dtype: ScaleDtype = "float32"
    lm_head: Bits = 8
    embedding: Bits = 8
    exclude: tuple[str, ...] = ()
    fold: FoldOption = "exact"
    steps: Annotated[int, Range(ge=1, le=1000)] = 10
    search_tokens: Annotated[int, TOKENS] = 2048

    @property
    def rounds_weights(self) -> Literal["none", "some", "all"]:
        """All, unless some are excluded or another pass rounds them."""
        if self.weights == "none":
            return "none"
        return "some" if self.exclude else "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.alpha, self.weights, self.activations) == ("none", "none", "none"):
            raise UsageError(f'{self.name}: alpha, weights and activations are all "none"; set one of them')
        if self.activations == "none" and (self.outliers or self.outlier_threshold):
            raise UsageError(f"{self.name}: outliers are kept next to quantized activations, and activations is none")
        self._quantize_activations()  # checks its own options

    @property
    def needs_calibration(self) -> bool:
        """Rounding to nearest with dynamic scales needs no data."""
        return self.alpha != "none" or (self.activations != "none" and self._quantize_activations().needs_calibration)

    @property
    def parts(self) -> tuple[Pass, ...]:
        """The passes that it runs after smoothing."""
        activations = () if self.activations == "none" else (self._quantize_activations(),)
        return (*activations, *(self._quantize_weights() if self.weights != "none" else ()))

    def requires(self, model: ir.Model) -> None:
        """The requirements of quantize-weights and quantize-activations."""
        self._quantize_weights()[0].requires(model)
        self._quantize_activations().requires(model)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Smooth, quantize activations, round weights, whose statistics include their activations."""
        modified = self.alpha != "none" and self._smooth(model)
        if self.activations != "none":
            modified |= self._quantize_activations().call(model).modified
        for weights in self._quantize_weights() if self.weights != "none" else ():
            modified |= weights.call(model).modified
        return ir.passes.PassResult(model, modified)

    def ensures(self, model: ir.Model) -> None:
        """Every chosen weight and input is quantized."""
        if self.activations != "none":
            self._quantize_activations().ensures(model)
        for weights in self._quantize_weights() if self.weights != "none" else ():
            weights.ensures(model)

    def _smooth(self, model: ir.Model) -> bool:
        """Choose and apply the scales; return whether any layer was scaled."""
        left = {site.node for site in weight_sites(model) if site.role == "head" or site.is_quantized}

        def choose(stage: CalibrationStage, group: LinearGroup, fold: Place) -> Choice | None:
            return self._choose(model.graph, stage, group, fold)

        choices = scale_groups(self.name, model, self.fold, left, choose)
        if choices:
            SMOOTHING_FACTS.record(model, choices)
        return bool(choices)

    def _choose(self, graph: ir.Graph, stage: CalibrationStage, group: LinearGroup, fold: Place) -> Choice | None:
        """The scale of one group; None where none is better than no scale."""
        if stage.too_few(group.source):
            return None
        peaks = finite_peaks(stage, group.source, group.linears)
        inputs, weights = fold.shared(peaks), fold.shared(_largest_weights(group))
        layers = [node.name or "" for node in group.linears]
        if isinstance(self.alpha, float):
            facts = {"layers": layers, "alpha": self.alpha, "error_before": None, "error_after": None}
            return facts, smoothing_scale(inputs, weights, self.alpha)
        found: Choice | None = None
        with self._trial(graph, stage, group, peaks) as trial:
            before = best = trial.error(np.ones(len(inputs), np.float32))
            for step in range(self.steps + 1):
                scale = smoothing_scale(inputs, weights, step / self.steps)
                error = trial.error(scale)
                if error < best:
                    facts = {"layers": layers, "alpha": step / self.steps, "error_before": before, "error_after": error}
                    best, found = error, (facts, scale)
        return found

    @contextmanager
    def _trial(
        self, graph: ir.Graph, stage: CalibrationStage, group: LinearGroup, peaks: Float64Array
    ) -> Iterator["_Trial"]:
        """The group's block with nodes in the graph that scale and round its input, removed at the end."""
        nodes, outputs = block_of(graph, group)
        if not outputs:
            raise PassError(f"{group.linears[0].name!r} adds nothing to a residual stream; set a fixed alpha")
        exact = [np.array(output) for output in stage.block(nodes, outputs, self.search_tokens)({})]
        with _rounded_inputs(graph, group, self.activations) as added:
            run = stage.block([*added, *nodes], outputs, self.search_tokens)
            yield _Trial(run, added[0], weights_of(group), self._round, exact, self.activations == "static", peaks)

    def _round(self, weight: Float32Array) -> Float32Array:
        """A weight [out, in] as rounded; with "none", where another pass will round it, per channel."""
        scheme = Scheme(8, 0, True, self.clip, self.scale_dtype)
        if self.weights == "tensor":
            return round_per_tensor(weight, scheme).restored(scheme)
        return round_weight(weight, scheme, num_threads()).restored(scheme)

    def _quantize_activations(self) -> QuantizeActivations:
        options: dict[str, Any] = {
            name: getattr(self, name) for name in ("range", "percentile", "outliers", "outlier_threshold", "exclude")
        }
        mode = "dynamic" if self.activations == "none" else self.activations
        return _Activations(mode=mode, **options)

    def _quantize_weights(self) -> tuple[QuantizeWeights, QuantizeWeights]:
        """The quantizer of linear layers, and the one of head and table, which runs after it."""
        overrides: Mapping[str, object] = dict.fromkeys(self.exclude, "none")
        common: dict[str, Any] = {
            "bits": 8,
            "symmetric": True,
            "clip": self.clip,
            "scale_dtype": self.scale_dtype,
            "overrides": overrides,
        }
        made = _PerTensorWeights if self.weights == "tensor" else QuantizeWeights
        linears = made(block_size="channel", lm_head="none", embedding="none", **common)
        return linears, QuantizeWeights(
            block_size=TABLE_BLOCK, lm_head=self.lm_head, embedding=self.embedding, **common
        )


@dataclass(frozen=True)
class _Trial:
    """A block whose group reads Mul(x, factors), rounded where inputs will be; `mul` is that Mul."""

    run: BlockRun
    mul: ir.Node
    weights: Mapping[ir.Node, Float32Array]
    round: Callable[[Float32Array], Float32Array]
    exact: Sequence[Float32Array]
    is_static: bool
    peaks: Float64Array

    def error(self, scale: Float32Array) -> float:
        """Error of the block's output with x / s and W * s rounded, relative to its norm."""
        step = np.float32(1)
        if self.is_static:  # the static scheme in the graph has scale 1
            step = np.float32(max((self.peaks / scale).max(), LEAST) / LARGEST["int"])
        arrays = {node: self.round(weight * scale) * step for node, weight in self.weights.items()}
        factors: Float32Array = (1 / (scale * step)).astype(np.float32)
        return relative_error(self.run({**arrays, self.mul: factors}), self.exact)


@contextmanager
def _rounded_inputs(graph: ir.Graph, group: LinearGroup, activations: ActivationScale) -> Iterator[Sequence[ir.Node]]:
    """Let the group read Mul(x, factors) [T, in], quantized as `activations` says, until the context ends."""
    first, source = group.linears[0], group.source
    assert source.shape is not None
    shape = tuple(size if isinstance(size, int) else str(size) for size in source.shape)
    ones = ir.Tensor(np.ones(int(shape[1]), np.float32), name=f"{first.name}.trial.factors")
    factors = add_initializer(graph, ones)
    fed = _node("Cast", f"{first.name}.trial.fed", [factors], (shape[1],), to=ir.DataType.FLOAT)  # calibration feeds it
    scaled = _node("Mul", f"{first.name}.trial.scaled", [source, fed.outputs[0]], shape)
    graph.insert_before(first, [fed, scaled])
    added = [scaled]
    if activations == "none":
        for node in group.linears:
            node.replace_input_with(0, scaled.outputs[0])
    else:
        scheme = ActivationScheme("int", None if activations == "dynamic" else 1.0)
        added += insert_activation_quantization(graph, scaled.outputs[0], group.linears, scheme)
    try:
        yield added
    finally:
        for node in group.linears:
            node.replace_input_with(0, source)
            node.metadata_props.pop(ACTIVATIONS_KEY, None)
        drop_if_unused(graph, added[-1].outputs[0])


def _node(op_type: str, name: str, inputs: list[ir.Value], shape: tuple[int | str, ...], **attributes: int) -> ir.Node:
    return ir.node(op_type, inputs, attributes, name=name, outputs=[float_value(name, shape)])


def _largest_weights(group: LinearGroup) -> Float64Array:
    """Largest |w| of each input channel [in] over a group's layers."""
    peaks = [np.abs(weight).max(axis=0) for weight in weights_of(group).values()]
    largest: Float64Array = np.max(peaks, axis=0).astype(np.float64)
    return largest


class _PerTensorWeights(QuantizeWeights):
    """Gives linear layers one scale for the whole weight, and marks their DequantizeLinear."""

    def _quantize(
        self, graph: ir.Graph, key: Key, sites: list[WeightSite], rounder: Rounder | None = None
    ) -> dict[str, object]:
        if sites[0].role != "linear":
            return super()._quantize(graph, key, sites, rounder)
        found = super()._quantize(graph, key, sites, partial(_round_per_tensor, scheme=key[1]))
        dequantize = sites[0].operand.producer()
        assert dequantize is not None
        dequantize.metadata_props[STRATEGY_KEY] = "tensor"
        return found | {"strategy": "tensor"}


def _round_per_tensor(weight: NDArray[Any], scheme: Scheme) -> RoundedWeight:
    return round_per_tensor(weight.astype(np.float32), scheme)


class _Activations(QuantizeActivations):
    """Reports errors in this pass's name."""

    name: ClassVar[str] = "smooth-quant"
