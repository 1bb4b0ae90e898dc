"""The pass distill: tunes a quantized model by the KL divergence of its outputs from the float model's.

    Matched         Gemm(x, DequantizeLinear(q, scale, zero_point?), b?, transB=1)          RMSNormalization(x, w)
    Replacement     the same with other codes q and scales, of the same bits and blocks     with another w

Run it behind the quantizer; gptq is the best. Quantizers look at one layer or block at a time. What counts is the sum
of their errors in the logits, where they cancel or add up; this pass follows its gradient. Scales and norms are
tuned as in EfficientQAT's end-to-end phase (Chen et al., arXiv:2407.11062), codes with a straight-through gradient; the
loss is that of knowledge distillation (Hinton et al., arXiv:1503.02531), the teacher the model that the recipe began
with, on the calibration data. Rates fall to zero along a cosine. A code begins in the middle of what rounds to it, so
that only a gradient that goes the same way in most steps changes it (docs/log.md).

The last `held_out` share of the batches is not learned from. The divergence on them before and after decides: where it
did not fall, the model stays as it was. The model's metadata "ingot.distill" has JSON {epochs, steps, kl_before,
kl_after, codes_changed}; kl_* are those of the batches held out. Errors in "ingot.quantization" stay those of the
quantizer's own rounding.

Tuned are weights of up to 4 bits that one linear layer reads, and norms' weights of their own. Left alone, with a line
in the log: quantized weights that several layers share. Refuses a model with nothing to tune, data of a single batch,
and an op that no gradient is known of.
"""

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from ingot.errors import PassError, UsageError
from ingot.passes.base import Pass, PassKind
from ingot.passes.calibration import Divergence, Float32Array, require_calibration
from ingot.passes.progress import report_progress
from ingot.passes.pruning.pruned_facts import MASKS_KEY
from ingot.passes.quantization.channel_folds import is_own, scale_stored
from ingot.passes.quantization.quantized_tensors import weight_bits
from ingot.passes.quantization.tuned_weights import Tuned, TunedNorm, TunedWeight
from ingot.passes.weight_values import float32_values
from ingot.progress import note

DISTILL_KEY = "ingot.distill"  # model.metadata_props: JSON, see the module's docstring

_log = logging.getLogger("ingot.passes")
_MOST_BITS = 4
_WARM_UP_STEPS = 8
_FULL_STEPS = 100  # beyond, chance alone would take codes further and further


@dataclass(frozen=True)
class Distill(Pass):
    """Options:

    epochs         times that every batch is learned from
    batch_tokens   tokens of a step, in whole sequences
    codes          tune codes, too; else scales and norms alone, which needs far less memory
    codes_rate     size of a step of a code, in codes, up to 100 steps; smaller by the root of what is beyond
    scales_rate    size of a step of a scale or a norm's weight, as a share of it
    keep_zeros     codes that stand for zero stay; behind prune-weights they always do
    held_out       share of the batches that the result is judged on, at least one batch
    seed           order of the batches
    """

    name: ClassVar[str] = "distill"
    kind: ClassVar[PassKind] = "quantization"
    summary: ClassVar[str] = "Tunes codes, scales and norms of a quantized model by the KL of its outputs."
    needs_calibration: ClassVar[bool] = True

    epochs: int = 12
    batch_tokens: int = 1024
    codes: bool = True
    codes_rate: float = 0.02
    scales_rate: float = 0.002
    keep_zeros: bool = False
    held_out: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in ("epochs", "batch_tokens"):
            if getattr(self, option) < 1:
                raise UsageError(f"{self.name}: {option} is {getattr(self, option)}; allowed: 1 or more")
        for option, most in (("codes_rate", 1.0), ("scales_rate", 0.1), ("held_out", 0.5)):
            if not 0 < getattr(self, option) <= most:
                raise UsageError(f"{self.name}: {option} is {getattr(self, option)}; allowed: above 0, up to {most:g}")

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Tune on most batches, judge on the others, and write what was found if it is better."""
        calibration = require_calibration(self.name)
        norms, weights = self._norms(model.graph), self._weights(model)
        if not weights:
            raise PassError(f"{self.name}: no weight of up to {_MOST_BITS} bits to tune; run it behind a quantizer")
        tuned: dict[ir.Value, Tuned] = {**norms, **weights}
        with calibration.divergence(model, list(tuned), self.batch_tokens) as divergence:
            before, after, steps = self._tune(divergence, tuned)
        note(f"{self.name}: mean KL on the batches held out {before:.5f} before, {after:.5f} after {steps} steps")
        facts: dict[str, float] = {"epochs": self.epochs, "steps": steps, "kl_before": before, "kl_after": after}
        if not after < before:
            _log.warning("%s: left the model as it was: the KL did not fall (%.6f, %.6f)", self.name, before, after)
            return ir.passes.PassResult(model, modified=False)
        facts["codes_changed"] = float(np.mean([weight.write() for weight in weights.values()]))
        for value, norm in norms.items():
            for node in list(value.consumers()):
                scale_stored(model.graph, node, 1, (None, np.exp(norm.log_factor)))
        calibration.facts.record(model)
        model.metadata_props[DISTILL_KEY] = json.dumps(facts)
        return ir.passes.PassResult(model, modified=True)

    def _tune(self, divergence: Divergence, tuned: Mapping[ir.Value, Tuned]) -> tuple[float, float, int]:
        """KL held out before and after, and the number of steps."""
        judged = max(1, round(self.held_out * divergence.batches))
        learned = divergence.batches - judged
        if learned < 1:
            raise PassError(
                f"{self.name}: the calibration data is a single batch of {self.batch_tokens} tokens; "
                "give more sequences, or set batch_tokens lower"
            )

        def source(value: ir.Value) -> Float32Array | None:
            found = tuned.get(value)
            return None if found is None else found.values()

        def kl() -> float:
            return float(np.mean([divergence.value(at, source) for at in range(learned, divergence.batches)]))

        before, steps, random = kl(), self.epochs * learned, np.random.default_rng(self.seed)
        codes_rate = self.codes_rate * min(1.0, (_FULL_STEPS / steps) ** 0.5)
        for step in range(steps):
            if step % learned == 0:
                order = random.permutation(learned)
            share = min(1.0, (step + 1) / _WARM_UP_STEPS) * 0.5 * (1 + math.cos(math.pi * step / steps))

            def receive(value: ir.Value, gradient: Float32Array, share: float = share) -> None:
                tuned[value].step(gradient, codes_rate * share, self.scales_rate * share)

            divergence.gradients(int(order[step % learned]), source, receive)
            report_progress(self.name, step + 1, steps)
        return before, kl(), steps

    def _weights(self, model: ir.Model) -> dict[ir.Value, TunedWeight]:
        """What a DequantizeLinear of up to 4 bits makes for one linear layer."""
        found, keep_zeros = {}, self.keep_zeros or MASKS_KEY in model.metadata_props
        for node in model.graph:
            if node.op_type != "DequantizeLinear" or not _is_weight(node) or weight_bits(node) > _MOST_BITS:
                continue
            value = node.outputs[0]
            if len(value.uses()) == 1:
                found[value] = TunedWeight(node, self.codes, keep_zeros)
            else:
                _log.info("%s: %s is left alone: several layers share it", self.name, value.name)
        return found

    def _norms(self, graph: ir.Graph) -> dict[ir.Value, TunedNorm]:
        weights = (node.inputs[1] for node in graph if node.op_type == "RMSNormalization")
        return {value: TunedNorm(float32_values(value)) for value in weights if value is not None and is_own(value)}


def _is_weight(node: ir.Node) -> bool:
    """Whether a DequantizeLinear holds the weight of linear layers."""
    stored = all(value is None or value.is_initializer() for value in node.inputs)
    readers = node.outputs[0].uses()
    return stored and bool(readers) and all(use.node.op_type == "Gemm" and use.idx == 1 for use in readers)
