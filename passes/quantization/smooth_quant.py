"""The pass smooth-quant: weights and activations of linear layers to 8 bits, large inputs moved into weights before.

    Matched         y = Gemm(x, W, b?, transB=1), and others that read x

    Replacement     y = Gemm(x', W', b?, transB=1)
                    x'  of x / s, quantized as quantize-activations does it
                    W'  of W * s, int8 symmetric as quantize-weights does it, per channel or per tensor
                    1 / s in what makes x, or, `fold: always`, in a Mul: channel_folds.py

Xiao et al., SmoothQuant, arXiv:2211.10438. Inputs of a few channels are often far larger than the others and would set
the scale for all; s moves that into the weights, which have room for it. smoothing.py says how s is found. Outlier
channels can keep their precision besides (LLM.int8, arXiv:2208.07339).

Three steps, each of which can be left out: `alpha: none`, `activations: none`, `weights: none`. So gptq can do weights:

    - smooth-quant: {weights: none}
    - gptq: {bits: 8, block_size: channel, symmetric: true}

Head and embedding are not smoothed, and what the head reads is not rounded; their weights are, as `lm_head` and
`embedding` say. Layers whose input nothing can take a scale from are left as they are, with the reason in the log. What
was chosen stands in the model's metadata "ingot.smooth-quant": [{layers, alpha, error_before, error_after}, ...].

Run it behind fold-constants and pack-projections. Refuses what quantize-activations and quantize-weights refuse.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Final, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.errors import UsageError
from ingot.passes.base import Pass, PassKind
from ingot.passes.calibration import (
    Arrays,
    CalibrationStage,
    Float32Array,
    LinearGroup,
    fact_arrays,
    recorded_facts,
    require_calibration,
)
from ingot.passes.quantization.activation_plan import RangeMethod, finite_peaks
from ingot.passes.quantization.channel_folds import Fold, OwnMul, Scalings, can_scale, find_fold
from ingot.passes.quantization.per_tensor_weights import PerTensorWeights
from ingot.passes.quantization.quantize_activations import QuantizeActivations
from ingot.passes.quantization.quantize_weights import Bits, QuantizeWeights
from ingot.passes.quantization.smoothing import (
    ActivationScale,
    Rounding,
    Smoothing,
    WeightScale,
    largest_weights,
    migration,
    search,
)
from ingot.passes.rewriting import Refusal
from ingot.passes.weights import weight_sites
from ingot.progress import report_progress

SMOOTHING_KEY = "ingot.smooth-quant"  # model.metadata_props: JSON, see the module's docstring

TABLE_BLOCK: Final = 64  # the widest in which a head of 8 bits needs no rows of padding: lower_onnxruntime_cpu.py

_log = logging.getLogger("ingot.passes")


@dataclass(frozen=True)
class SmoothQuant(Pass):
    """Options:

    alpha                how far inputs are moved into weights: 0 to 1; "auto": searched for each group of layers on its
                         block's output; "none": not at all
    weights              "channel" or "tensor": who shares a scale; "none": another pass rounds the weights
    activations          "dynamic": a scale per token; "static": one per layer, from data; "none": left as they are
    range, percentile    of static scales, as in quantize-activations
    outliers, outlier_threshold    input channels that keep their precision, as in quantize-activations
    clip                 search the weights' scales for the smallest error; else take them from the largest values
    lm_head, embedding   bits of head and table, in blocks of TABLE_BLOCK; "none" to leave them as they are
    exclude              patterns of layers whose weights and inputs stay as they are
    fold                 "exact": only where what makes the input takes up the scale; "always": else by a Mul
    steps                alphas between 0 and 1 that "auto" tries
    search_tokens        calibration tokens that "auto" runs a block on, in whole sequences
    """

    name: ClassVar[str] = "smooth-quant"
    kind: ClassVar[PassKind] = "quantization"
    summary: ClassVar[str] = "Rounds weights and activations to 8 bits, after moving large inputs into the weights."

    alpha: float | Literal["auto", "none"] = 0.5
    weights: WeightScale = "channel"
    activations: ActivationScale = "dynamic"
    range: RangeMethod = "absmax"
    percentile: float = 99.99
    outliers: float = 0.0
    outlier_threshold: float = 0.0
    clip: bool = True
    lm_head: Bits = 8
    embedding: Bits = 8
    exclude: tuple[str, ...] = ()
    fold: Literal["exact", "always"] = "exact"
    steps: int = 10
    search_tokens: int = 2048

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.alpha, float) and not 0 <= self.alpha <= 1:
            raise UsageError(f'{self.name}: alpha is {self.alpha}; allowed: 0 to 1 (0.5 is usual), "auto" or "none"')
        for option, value in (("steps", self.steps), ("search_tokens", self.search_tokens)):
            if value < 1:
                raise UsageError(f"{self.name}: {option} is {value}; allowed: 1 or more")
        if (self.alpha, self.weights, self.activations) == ("none", "none", "none"):
            raise UsageError(f'{self.name}: alpha, weights and activations are all "none"; set one of them')
        if self.activations == "none" and (self.outliers or self.outlier_threshold):
            raise UsageError(f"{self.name}: outliers are kept beside quantized activations, and activations is none")
        self._quantize_activations()  # whose options are checked when it is made

    @property
    def needs_calibration(self) -> bool:
        """Rounding to the nearest with dynamic scales needs no data."""
        return self.alpha != "none" or (self.activations != "none" and self._quantize_activations().needs_calibration)

    def requires(self, model: ir.Model) -> None:
        """What the passes that it is made of require."""
        self._quantize_weights()[0].requires(model)
        self._quantize_activations().requires(model)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Smooth, quantize activations, round weights: statistics of the weights then know their activations."""
        modified = self.alpha != "none" and self._smooth(model)
        if self.activations != "none":
            modified |= self._quantize_activations().call(model).modified
        for weights in self._quantize_weights() if self.weights != "none" else ():
            modified |= weights.call(model).modified
        return ir.passes.PassResult(model, modified)

    def ensures(self, model: ir.Model) -> None:
        """What should be quantized is."""
        if self.activations != "none":
            self._quantize_activations().ensures(model)
        for weights in self._quantize_weights() if self.weights != "none" else ():
            weights.ensures(model)

    def _smooth(self, model: ir.Model) -> bool:
        """Find all scales on the model as it is; then apply them at once."""
        calibration = require_calibration(self.name)
        sites = weight_sites(model)
        left = {site.node for site in sites if site.role == "head" or site.is_quantized}
        scalings, chosen, done = Scalings(), list[Smoothing](), 0
        for stage in calibration.stages(model):
            known, made = stage.recorded(), dict[str, NDArray[Any]]()
            for group in stage.groups:
                found = None if left & set(group.linears) else self._scale_of(model.graph, stage, group, known)
                if found is not None:
                    smoothing, fold, scale = found
                    chosen.append(smoothing)
                    scalings.add(group, fold, scale.astype(np.float64))
                    made |= {
                        f"{smoothing.layers[0]}.scale": scale,
                        **fact_arrays(smoothing.layers[0], asdict(smoothing)),
                    }
                done += len(group.linears)
                report_progress(self.name, done, len(sites))
            if known is None:
                stage.record(made)
        if not chosen:
            return False
        scalings.apply(model.graph)
        calibration.facts.record(model)
        model.metadata_props[SMOOTHING_KEY] = json.dumps([asdict(smoothing) for smoothing in chosen])
        return True

    def _scale_of(
        self, graph: ir.Graph, stage: CalibrationStage, group: LinearGroup, known: Arrays | None
    ) -> tuple[Smoothing, Fold | OwnMul, Float32Array] | None:
        """A group's scale, chosen now or recalled; None where nothing takes it up or none is better."""
        fold: Fold | OwnMul | Refusal = find_fold(group)
        if isinstance(fold, Refusal) and self.fold == "always" and can_scale(group):
            fold = OwnMul()
        if isinstance(fold, Refusal):
            _log.info("%s: left alone: %s", self.name, fold)
            return None
        if known is not None:
            found = _recalled(known, group)
        else:
            finite_peaks(stage, group.source, group.linears)
            found = self._choose(graph, stage, group, fold)
        return None if found is None else (found[0], fold, found[1])

    def _choose(
        self, graph: ir.Graph, stage: CalibrationStage, group: LinearGroup, fold: Fold | OwnMul
    ) -> tuple[Smoothing, Float32Array] | None:
        if isinstance(self.alpha, float):
            inputs, weights = fold.shared(stage.max_absolute(group.source)), fold.shared(largest_weights(group))
            layers = tuple(node.name or "" for node in group.linears)
            return Smoothing(layers, self.alpha, None, None), migration(inputs, weights, self.alpha)
        alphas = [step / self.steps for step in range(self.steps + 1)]
        rounding = Rounding(self.weights, self.activations, self.clip)
        return search(graph, stage, group, fold, rounding, alphas, self.search_tokens)

    def _quantize_activations(self) -> QuantizeActivations:
        options: dict[str, Any] = {
            name: getattr(self, name) for name in ("range", "percentile", "outliers", "outlier_threshold", "exclude")
        }
        mode = "dynamic" if self.activations == "none" else self.activations
        return _Activations(mode=mode, **options)

    def _quantize_weights(self) -> tuple[QuantizeWeights, QuantizeWeights]:
        """First for linear layers; then, with those done, for head and table."""
        overrides: Mapping[str, object] = dict.fromkeys(self.exclude, "none")
        common: dict[str, Any] = {"bits": 8, "symmetric": True, "clip": self.clip, "overrides": overrides}
        made = PerTensorWeights if self.weights == "tensor" else QuantizeWeights
        linears = made(block_size="channel", lm_head="none", embedding="none", **common)
        return linears, QuantizeWeights(
            block_size=TABLE_BLOCK, lm_head=self.lm_head, embedding=self.embedding, **common
        )


def _recalled(arrays: Arrays, group: LinearGroup) -> tuple[Smoothing, Float32Array] | None:
    name = group.linears[0].name or ""
    if f"{name}.scale" not in arrays:
        return None
    facts = recorded_facts(arrays, name)
    return Smoothing(**{**facts, "layers": tuple(facts["layers"])}), arrays[f"{name}.scale"]


class _Activations(QuantizeActivations):
    """Speaks in this pass's name."""

    name: ClassVar[str] = "smooth-quant"
