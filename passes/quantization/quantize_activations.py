"""The pass quantize-activations: the inputs of linear layers to 8 bits, as integers or float8.

    Matched         y = Gemm(x, W, b?, transB=1), and others that read x; not the head
    Replacement     y = Gemm(x', W, b?, transB=1)         x' = DequantizeLinear(QuantizeLinear(x, ...), ...)

activation_nodes.py draws x' and what `outliers` adds. Where the weights are int8 per channel (symmetric), the CPU
computes such a layer in integers: integer_matmul.py. Passes that round weights may run before or after this one;
gptq after it rounds for the quantized inputs.

Scales are found on the model before the pass. `dynamic` without outliers needs no data; everything else
needs the recipe's section `calibration`. The choices are in the model's metadata "ingot.activations" as JSON,
[{layers, bits, kind, dynamic, strategy, scale?, peak?, outliers?}, ...], and in the weights' statistics.

Refuses: inputs that are NaN or infinite on calibration data; with `static`, inputs that are zero on all of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.errors import PassError, UsageError
from ingot.passes.base import Pass, PassKind, Range
from ingot.passes.calibration import Arrays, CalibrationStage, fact_arrays, recorded_facts, require_calibration
from ingot.passes.model_facts import Fact, Rows
from ingot.passes.numerics.activation_rounding import (
    ActivationScheme,
    Channels,
    Kind,
    RangeMethod,
    outlier_channels,
    static_scheme,
)
from ingot.passes.numerics.arrays import Float64Array
from ingot.passes.quantization.activation_nodes import (
    ACTIVATIONS_KEY,
    dequantizer,
    insert_activation_quantization,
    split_outliers,
)
from ingot.passes.quantization.quantize_weights import QUANTIZATION_FACTS
from ingot.passes.rewriting import require_plain_gemm
from ingot.passes.weights import WeightSite, require_matches, weight_sites
from ingot.progress import report_progress

ActivationScale = Literal["dynamic", "static", "none"]  # the option `activations` of passes that quantize weights, too
KINDS: Mapping[str, Kind] = {"int8": "int", "float8": "float"}
SAMPLE_ROWS = 2048


ACTIVATIONS_FACTS = Fact(ACTIVATIONS_KEY, Rows)


@dataclass(frozen=True)
class _Plan:
    """Quantization of one input. linears: the layers that read it, in graph order."""

    source: ir.Value
    linears: tuple[ir.Node, ...]
    scheme: ActivationScheme
    peak: float | None = None
    outliers: Channels = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def facts(self) -> dict[str, object]:
        """The plan as the metadata holds it."""
        facts = {**self.scheme.facts}
        if self.peak is not None:
            facts["peak"] = self.peak
        return facts | ({"outliers": len(self.outliers)} if len(self.outliers) else {})


PERCENTILE = Range(ge=50, le=100, usual=99.99)
OUTLIERS = Range(ge=0, le=65_536)  # a share below 1, or a whole number
OUTLIER_THRESHOLD = Range(ge=0, le=1_000_000, usual=6)


@dataclass(frozen=True)
class QuantizeActivations(Pass):
    """Options:

    dtype                "int8" or "float8" (e4m3fn)
    mode                 "dynamic": a scale per token, computed at run time; "static": one scale, from calibration data
    range                how a static scale is found: "absmax", "percentile" or "mse", see activation_rounding.py
    percentile           of |x|, for range percentile
    outliers             input channels that keep their precision: a number, or, below 1, a share of the layer's
    outlier_threshold    keep only channels whose |x| exceeds it on calibration data; 0: no threshold
    exclude              patterns (fnmatch's) of layers to leave alone, by module path or tensor name
    """

    name: ClassVar[str] = "quantize-activations"
    kind: ClassVar[PassKind] = "quantization"
    summary: ClassVar[str] = "Rounds the inputs of linear layers to 8 bits, with scales per token or calibrated."

    dtype: Literal["int8", "float8"] = "int8"
    mode: Literal["dynamic", "static"] = "dynamic"
    range: RangeMethod = "absmax"
    percentile: Annotated[float, PERCENTILE] = 99.99
    outliers: Annotated[float, OUTLIERS] = 0.0
    outlier_threshold: Annotated[float, OUTLIER_THRESHOLD] = 0.0
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_options(self)

    @property
    def needs_calibration(self) -> bool:
        """Dynamic scales alone need no data."""
        return self.mode == "static" or self._splits

    @property
    def needs_float8(self) -> bool:
        """Float8 activations are multiplied as float8."""
        return self.dtype == "float8"

    @property
    def changes_weights(self) -> bool:
        """Outlier columns move into a matmul of their own."""
        return self._splits

    @property
    def _splits(self) -> bool:
        return bool(self.outliers or self.outlier_threshold)

    def requires(self, model: ir.Model) -> None:
        """Every layer is x @ W.T + b, and every pattern matches one."""
        sites = [site for site in weight_sites(model) if site.role == "linear"]
        for site in sites:
            require_plain_gemm(site.node)
        require_matches(sites, "exclude", self.exclude)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Plan everything, then change everything: scales are those of the unchanged model."""
        layers = self._unquantized(model)
        plan = (self._plan_on_data(model, layers) if self.needs_calibration else self._plan(layers)) if layers else []
        for planned in plan:
            source = planned.source
            if len(planned.outliers):
                source = split_outliers(model.graph, source, planned.linears, planned.outliers)
            insert_activation_quantization(model.graph, source, planned.linears, planned.scheme)
        if plan:
            _record(model, plan)
        return ir.passes.PassResult(model, modified=bool(plan))

    def ensures(self, model: ir.Model) -> None:
        """Every layer that should have quantized inputs has them."""
        left = [node.name for nodes in self._unquantized(model).values() for node in nodes]
        if left:
            raise PassError(f"{left[0]!r} and {len(left) - 1} more were left with unquantized inputs")

    def _unquantized(self, model: ir.Model) -> dict[ir.Value, tuple[ir.Node, ...]]:
        """Layers that are left to quantize, by their input."""
        found: dict[ir.Value, tuple[ir.Node, ...]] = {}
        for site in weight_sites(model):
            source = site.node.inputs[0]
            if source is not None and self._is_unquantized(site):
                found[source] = (*found.get(source, ()), site.node)
        return found

    def _is_unquantized(self, site: WeightSite) -> bool:
        return site.role == "linear" and not site.matches(self.exclude) and dequantizer(site.node) is None

    def _plan(self, layers: Mapping[ir.Value, tuple[ir.Node, ...]]) -> list[_Plan]:
        scheme = ActivationScheme(KINDS[self.dtype])
        return [_Plan(source, linears, scheme) for source, linears in layers.items()]

    def _plan_on_data(self, model: ir.Model, layers: Mapping[ir.Value, tuple[ir.Node, ...]]) -> list[_Plan]:
        calibration = require_calibration(self.name)
        plan: list[_Plan] = []
        for stage in calibration.stages(model):
            recorded, made = stage.recorded(), dict[str, NDArray[Any]]()
            for source in (group.source for group in stage.groups if group.source in layers):
                linears = layers[source]
                done = None if recorded is None else _recorded(recorded, source, linears)
                plan.append(done or self._planned(stage, source, linears))
                made |= _plan_arrays(plan[-1])
                report_progress(self.name, len(plan), len(layers))
            if recorded is None:
                stage.record(made)
        calibration.facts.record(model)
        return plan

    def _planned(self, stage: CalibrationStage, source: ir.Value, linears: tuple[ir.Node, ...]) -> _Plan:
        name, few = linears[0].name, stage.too_few(source)
        if few and self.mode != "dynamic":
            raise PassError(
                f"{name!r} has no data for a static scale: {few}. Raise calibration.sequences, lower "
                "calibration.expert_tokens, take mode: dynamic, or leave the expert out with exclude"
            )
        peaks = finite_peaks(stage, source, linears)
        outliers = outlier_channels(peaks, self.outliers, self.outlier_threshold)
        rest = np.delete(peaks, outliers)
        if self.mode == "dynamic":
            return _Plan(source, linears, ActivationScheme(KINDS[self.dtype]), float(rest.max()), outliers)
        if not rest.any():
            raise PassError(
                f"{name!r} reads {source.name!r}, which is zero on all calibration data: a static scale has no range. "
                "Give other calibration text, take mode: dynamic, or leave the layer out with exclude"
            )
        x = np.delete(stage.rows(source, SAMPLE_ROWS), outliers, axis=1)
        scheme = static_scheme(KINDS[self.dtype], self.range, float(rest.max()), self.percentile, x)
        return _Plan(source, linears, scheme, float(rest.max()), outliers)


def finite_peaks(stage: CalibrationStage, source: ir.Value, linears: Sequence[ir.Node]) -> Float64Array:
    """Largest |x| of each channel [in] of the layers' input; PassError when one is NaN or infinite."""
    peaks = stage.max_absolute(source)
    if not np.isfinite(peaks).all():
        channel = int(np.argmin(np.isfinite(peaks)))
        raise PassError(
            f"{linears[0].name!r} reads {source.name!r}, whose channel {channel} is NaN or infinite on calibration "
            "data; check the checkpoint with `ingot lint-checkpoint`"
        )
    return peaks


def _plan_arrays(plan: _Plan) -> dict[str, NDArray[Any]]:
    """The plan as arrays, for a build that resumes: see CalibrationStage.record."""
    name, scheme = plan.linears[0].name or "", plan.scheme
    facts = {"kind": scheme.kind, "scale": scheme.scale, "peak": plan.peak}
    return {f"{name}.outliers": plan.outliers, **fact_arrays(name, facts)}


def _recorded(arrays: Arrays, source: ir.Value, linears: tuple[ir.Node, ...]) -> _Plan:
    """The plan that _plan_arrays stored."""
    name = linears[0].name or ""
    facts = recorded_facts(arrays, name)
    scheme = ActivationScheme(facts["kind"], facts["scale"])
    return _Plan(source, linears, scheme, facts["peak"], arrays[f"{name}.outliers"])


def _record(model: ir.Model, plans: Sequence[_Plan]) -> None:
    """Write the choices to the metadata, and to the statistics of weights that are quantized already."""
    rows = [{"layers": [node.name for node in plan.linears], **plan.facts} for plan in plans]
    ACTIVATIONS_FACTS.record(model, [*(ACTIVATIONS_FACTS.find(model) or []), *rows])
    if not QUANTIZATION_FACTS.is_in(model):
        return
    by_layer = {node.name: plan.scheme.facts for plan in plans for node in plan.linears}
    statistics = QUANTIZATION_FACTS.of(model)
    for row in statistics.weights:
        if row["name"] in by_layer:
            row["activations"] = by_layer[row["name"]]
    QUANTIZATION_FACTS.record(model, statistics)


def _check_options(options: QuantizeActivations) -> None:
    """Raise UsageError for options that are out of range or do not combine."""
    name = options.name
    if options.mode == "dynamic" and options.range != "absmax":
        raise UsageError(
            f"{name}: range is {options.range!r}, but dynamic scales are each token's largest value; "
            "make them static, or leave range out"
        )
    if options.outliers > 1 and options.outliers != int(options.outliers):
        raise UsageError(f"{name}: outliers is {options.outliers}; allowed: a share below 1, or a whole number")
