"""The pass quantize-activations: what linear layers read, to 8 bits, by integers or by float8.

    Matched         y = Gemm(x, W, b?, transB=1), and others that read x; not the head
    Replacement     y = Gemm(x', W, b?, transB=1)         x' = DequantizeLinear(QuantizeLinear(x, ...), ...)

activation_quantization.py draws x', activation_plan.py what `outliers` adds. Where the weights are int8 per channel
(symmetric), the CPU computes such a layer in integers: integer_matmul.py. Passes that round weights may stand
before or behind this one; gptq behind it rounds for the inputs that the layer will really have.

Scales are found on the model as it stands when the pass begins. `dynamic` without outliers needs no data; everything
else needs the recipe's section `calibration`. What was chosen stands in the model's metadata "ingot.activations" as
JSON, [{layers, bits, kind, dynamic, strategy, scale?, peak?, outliers?}, ...], and in the weights' statistics.

Refuses: inputs that are NaN or infinite on calibration data; with `static`, inputs that are zero on all of it.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.errors import PassError, UsageError
from ingot.passes.base import Pass, PassKind
from ingot.passes.calibration import CalibrationStage, require_calibration
from ingot.passes.quantization.activation_plan import (
    SAMPLE_ROWS,
    Planned,
    RangeMethod,
    finite_peaks,
    outlier_channels,
    planned_arrays,
    record_plan,
    recorded_plan,
    split_outliers,
    static_scheme,
)
from ingot.passes.quantization.activation_quantization import (
    ActivationScheme,
    Kind,
    dequantizer,
    insert_activation_quantization,
)
from ingot.passes.rewriting import require_plain_gemm
from ingot.passes.weights import WeightSite, require_matches, weight_sites
from ingot.progress import report_progress

KINDS: Mapping[str, Kind] = {"int8": "int", "float8": "float"}

_log = logging.getLogger("ingot.passes")


@dataclass(frozen=True)
class QuantizeActivations(Pass):
    """Options:

    dtype                "int8" or "float8" (e4m3fn)
    mode                 "dynamic": a scale per token, computed as it comes; "static": one scale, from calibration data
    range                how a static scale is found: "absmax", "percentile" or "mse", see activation_plan.py
    percentile           of |x|, for range percentile
    outliers             input channels that keep their precision: so many, or, below 1, that share of a layer's
    outlier_threshold    only channels whose |x| exceeds it on calibration data; 0: no threshold
    exclude              patterns (fnmatch's) of layers to leave alone, by module path or tensor name
    """

    name: ClassVar[str] = "quantize-activations"
    kind: ClassVar[PassKind] = "quantization"
    summary: ClassVar[str] = "Rounds what linear layers read to 8 bits, by token or by calibrated range."

    dtype: Literal["int8", "float8"] = "int8"
    mode: Literal["dynamic", "static"] = "dynamic"
    range: RangeMethod = "absmax"
    percentile: float = 99.99
    outliers: float = 0.0
    outlier_threshold: float = 0.0
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_activation_options(self)

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
        """Look at everything, then change everything: scales are those of the model as it was."""
        wanted = self._wanted(model)
        plan = (self._plan_on_data(model, wanted) if self.needs_calibration else self._plan(wanted)) if wanted else []
        for planned in plan:
            source = planned.source
            if len(planned.outliers):
                source = split_outliers(model.graph, source, planned.linears, planned.outliers)
            insert_activation_quantization(model.graph, source, planned.linears, planned.scheme)
        if plan:
            record_plan(model, plan)
        return ir.passes.PassResult(model, modified=bool(plan))

    def ensures(self, model: ir.Model) -> None:
        """What should be quantized is."""
        left = [node.name for nodes in self._wanted(model).values() for node in nodes]
        if left:
            raise PassError(f"{left[0]!r} and {len(left) - 1} more were left with unquantized inputs")

    def _wanted(self, model: ir.Model) -> dict[ir.Value, tuple[ir.Node, ...]]:
        """Layers that are not done yet, by what they read."""
        found: dict[ir.Value, tuple[ir.Node, ...]] = {}
        for site in weight_sites(model):
            source = site.node.inputs[0]
            if source is not None and self._is_wanted(site):
                found[source] = (*found.get(source, ()), site.node)
        return found

    def _is_wanted(self, site: WeightSite) -> bool:
        return site.role == "linear" and not site.matches(self.exclude) and dequantizer(site.node) is None

    def _plan(self, wanted: Mapping[ir.Value, tuple[ir.Node, ...]]) -> list[Planned]:
        scheme = ActivationScheme(KINDS[self.dtype])
        return [Planned(source, linears, scheme) for source, linears in wanted.items()]

    def _plan_on_data(self, model: ir.Model, wanted: Mapping[ir.Value, tuple[ir.Node, ...]]) -> list[Planned]:
        calibration = require_calibration(self.name)
        plan: list[Planned] = []
        for stage in calibration.stages(model):
            known, made = stage.recorded(), dict[str, NDArray[Any]]()
            for source in (group.source for group in stage.groups if group.source in wanted):
                recalled = None if known is None else recorded_plan(known, source, wanted[source])
                plan.append(recalled or self._planned(stage, source, wanted[source]))
                made |= planned_arrays(plan[-1])
                report_progress(self.name, len(plan), len(wanted))
            if known is None:
                stage.record(made)
        calibration.facts.record(model)
        return plan

    def _planned(self, stage: CalibrationStage, source: ir.Value, linears: tuple[ir.Node, ...]) -> Planned:
        name, peaks = linears[0].name, finite_peaks(stage, source, linears)
        outliers = outlier_channels(peaks, self.outliers, self.outlier_threshold)
        rest = np.delete(peaks, outliers)
        if self.mode == "dynamic":
            return Planned(source, linears, ActivationScheme(KINDS[self.dtype]), float(rest.max()), outliers)
        if not rest.any():
            raise PassError(
                f"{name!r} reads {source.name!r}, which is zero on all calibration data: a static scale has no range. "
                "Give other calibration text, take mode: dynamic, or leave the layer out with exclude"
            )
        x = np.delete(stage.rows(source, SAMPLE_ROWS), outliers, axis=1)
        scheme = static_scheme(KINDS[self.dtype], self.range, float(rest.max()), self.percentile, x)
        return Planned(source, linears, scheme, float(rest.max()), outliers)


def check_activation_options(options: QuantizeActivations) -> None:
    """UsageError for what is out of range or does not combine."""
    name = options.name
    if options.mode == "dynamic" and options.range != "absmax":
        raise UsageError(
            f"{name}: range is {options.range!r}, but dynamic scales are each token's largest value; "
            "make them static, or leave range out"
        )
    if not 50 <= options.percentile <= 100:
        raise UsageError(f"{name}: percentile is {options.percentile}; allowed: 50 to 100 (99.99 is usual)")
    if options.outliers < 0 or (options.outliers > 1 and options.outliers != int(options.outliers)):
        raise UsageError(f"{name}: outliers is {options.outliers}; allowed: a share below 1, or a whole number")
    if options.outlier_threshold < 0:
        raise UsageError(f"{name}: outlier_threshold is {options.outlier_threshold}; allowed: 0 or more (6 is usual)")
