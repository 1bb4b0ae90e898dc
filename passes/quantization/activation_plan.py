"""What quantize-activations decides of one input: its scheme and outliers, as metadata and as arrays to recall."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.errors import PassError
from ingot.passes.calibration import Arrays, CalibrationStage, Float64Array
from ingot.passes.quantization.activation_outliers import Channels
from ingot.passes.quantization.activation_quantization import ACTIVATIONS_KEY, ActivationScheme
from ingot.passes.quantization.quantize_weights import QUANTIZATION_KEY
from ingot.passes.recall import fact_arrays, recalled_facts


@dataclass(frozen=True)
class Planned:
    """What is to become of one input: the layers that read it, in graph order."""

    source: ir.Value
    linears: tuple[ir.Node, ...]
    scheme: ActivationScheme
    peak: float | None = None
    outliers: Channels = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def facts(self) -> dict[str, object]:
        """As the metadata has them."""
        facts = {**self.scheme.facts}
        if self.peak is not None:
            facts["peak"] = self.peak
        return facts | ({"outliers": len(self.outliers)} if len(self.outliers) else {})


def planned_arrays(planned: Planned) -> dict[str, NDArray[Any]]:
    """For a build that is cut off: what CalibrationStage.remember keeps."""
    name, scheme = planned.linears[0].name or "", planned.scheme
    facts = {"kind": scheme.kind, "scale": scheme.scale, "peak": planned.peak}
    return {f"{name}.outliers": planned.outliers, **fact_arrays(name, facts)}


def recalled_plan(arrays: Arrays, source: ir.Value, linears: tuple[ir.Node, ...]) -> Planned:
    """What planned_arrays was given."""
    name = linears[0].name or ""
    facts = recalled_facts(arrays, name)
    scheme = ActivationScheme(facts["kind"], facts["scale"])
    return Planned(source, linears, scheme, facts["peak"], arrays[f"{name}.outliers"])


def finite_peaks(stage: CalibrationStage, source: ir.Value, linears: Sequence[ir.Node]) -> Float64Array:
    """Largest |x| of each channel [in]; PassError when one is NaN or infinite."""
    peaks = stage.max_absolute(source)
    if not np.isfinite(peaks).all():
        channel = int(np.argmin(np.isfinite(peaks)))
        raise PassError(
            f"{linears[0].name!r} reads {source.name!r}, whose channel {channel} is NaN or infinite on calibration "
            "data; check the checkpoint with `ingot lint-checkpoint`"
        )
    return peaks


def record_plan(model: ir.Model, plan: Sequence[Planned]) -> None:
    """Write the choices to the metadata, and into the statistics of weights that are quantized already."""
    rows = [{"layers": [node.name for node in planned.linears], **planned.facts} for planned in plan]
    before = json.loads(model.metadata_props.get(ACTIVATIONS_KEY, "[]"))
    model.metadata_props[ACTIVATIONS_KEY] = json.dumps([*before, *rows])
    if QUANTIZATION_KEY not in model.metadata_props:
        return
    by_layer = {node.name: planned.scheme.facts for planned in plan for node in planned.linears}
    statistics = json.loads(model.metadata_props[QUANTIZATION_KEY])
    for row in statistics["weights"]:
        if row["name"] in by_layer:
            row["activations"] = by_layer[row["name"]]
    model.metadata_props[QUANTIZATION_KEY] = json.dumps(statistics)
