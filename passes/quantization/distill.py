"""The pass distill: tunes a quantized model by the KL divergence of its outputs from the float model's.

    Matched         Gemm(x, DequantizeLinear(q, scale, zero_point?), b?, transB=1)          RMSNormalization(x, w)
    Replacement     the same with other codes q and scales, of the same bits and blocks     with another w

Scales that float16 holds stay float16 numbers.

Run the pass after the quantizer; gptq is the best. Quantizers look at one layer or block at a time. In the logits their
errors cancel or add up, and this pass follows the gradient of the sum. Scales and norms are tuned as in EfficientQAT's
end-to-end phase (Chen et al., arXiv:2407.11062), codes with a straight-through gradient: see numerics/tuning.py. The
loss is that of knowledge distillation (Hinton et al., arXiv:1503.02531), with the recipe's initial model as the
teacher, on the calibration data. Rates fall to zero along a cosine. A code starts in the middle of the interval that
rounds to it, so that only a gradient of the same sign in most steps changes it (docs/log.md).

The last `held_out` share of the batches is not trained on. If the divergence on them did not fall, the model stays as
it was. The model's metadata "ingot.distill" has JSON {epochs, steps, kl_before, kl_after, codes_changed}; kl_* are
those of the held-out batches. Errors in "ingot.quantization" stay those of the quantizer's rounding.

The pass tunes weights of up to 4 bits that one linear layer reads, and weights of one norm each. Left alone, with a
line in the log: quantized weights that several layers share. Refuses a model with nothing to tune, data of a single
batch, and an op without a gradient.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.errors import PassError
from ingot.options import Range
from ingot.passes.base import SEED, TOKENS, Pass, PassKind
from ingot.passes.calibration import Divergence, require_calibration
from ingot.passes.model_facts import Fact
from ingot.passes.numerics.arrays import Float32Array
from ingot.passes.numerics.scheme import Scheme, scale_dtype_of
from ingot.passes.numerics.tuning import Tuned, TunedNorm, TunedWeight
from ingot.passes.pruned_facts import MASKS_FACTS
from ingot.passes.quantization.channel_scaling import is_own, scale_stored
from ingot.passes.quantization.weight_nodes import code_tensor, weight_bits
from ingot.passes.weights import float32_values
from ingot.progress import note, report_progress

DISTILL_FACTS: Fact[dict[str, Any]] = Fact("ingot.distill", dict)  # see the module's docstring

_log = logging.getLogger("ingot.passes")
_MOST_BITS = 4
_WARM_UP_STEPS = 8
_FULL_STEPS = 100  # a random walk would change codes in more steps at the full rate


@dataclass(frozen=True)
class Distill(Pass):
    """Options:

    epochs         passes over the training batches
    batch_tokens   tokens of a step, in whole sequences
    codes          tune codes, too; else scales and norms alone, which needs far less memory
    codes_rate     size of a step of a code, in codes; above 100 steps it is divided by sqrt(steps / 100)
    scales_rate    size of a step of a scale or a norm's weight, as a share of it
    keep_zeros     keep codes that represent zero; after prune-weights they are always kept
    held_out       share of the batches that the result is judged on, at least one batch
    seed           order of the batches
    """

    name: ClassVar[str] = "distill"
    kind: ClassVar[PassKind] = "quantization"
    summary: ClassVar[str] = "Tunes codes, scales and norms of a quantized model by the KL of its outputs."
    needs_calibration: ClassVar[bool] = True
    keeps_schemes: ClassVar[bool] = True

    epochs: Annotated[int, Range(ge=1, le=10_000)] = 12
    batch_tokens: Annotated[int, TOKENS] = 1024
    codes: bool = True
    codes_rate: Annotated[float, Range(gt=0, le=1)] = 0.02
    scales_rate: Annotated[float, Range(gt=0, le=0.1)] = 0.002
    keep_zeros: bool = False
    held_out: Annotated[float, Range(gt=0, le=0.5)] = 0.1
    seed: Annotated[int, SEED] = 0

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Tune on most batches, judge on the others, and write the result if it is better."""
        calibration = require_calibration(self.name)
        norms, weights = self._norms(model.graph), self._weights(model)
        if not weights:
            raise PassError(f"{self.name}: no weight of up to {_MOST_BITS} bits to tune; run it after a quantizer")
        tuned: dict[ir.Value, Tuned] = {**norms, **weights}
        with calibration.divergence(model, list(tuned), self.batch_tokens) as divergence:
            before, after, steps = self._tune(divergence, tuned)
        note(f"{self.name}: mean KL on the held-out batches {before:.5f} before, {after:.5f} after {steps} steps")
        facts: dict[str, float] = {"epochs": self.epochs, "steps": steps, "kl_before": before, "kl_after": after}
        if not after < before:
            _log.warning("%s: left the model as it was: the KL did not fall (%.6f, %.6f)", self.name, before, after)
            return ir.passes.PassResult(model, modified=False)
        facts["codes_changed"] = float(np.mean([_write(value, weight) for value, weight in weights.items()]))
        for value, norm in norms.items():
            for node in list(value.consumers()):
                scale_stored(model.graph, node, 1, columns=np.exp(norm.log_factor))
        calibration.facts.record(model)
        DISTILL_FACTS.record(model, facts)
        return ir.passes.PassResult(model, modified=True)

    def _tune(self, divergence: Divergence, tuned: Mapping[ir.Value, Tuned]) -> tuple[float, float, int]:
        """Tune; return the held-out KL before and after, and the number of steps."""
        held_out = max(1, round(self.held_out * divergence.batches))
        trained = divergence.batches - held_out
        if trained < 1:
            raise PassError(
                f"{self.name}: the calibration data is a single batch of {self.batch_tokens} tokens; "
                "give more sequences, or set batch_tokens lower"
            )

        def source(value: ir.Value) -> Float32Array | None:
            found = tuned.get(value)
            return None if found is None else found.values()

        def kl() -> float:
            return float(np.mean([divergence.value(at, source) for at in range(trained, divergence.batches)]))

        before, steps, random = kl(), self.epochs * trained, np.random.default_rng(self.seed)
        codes_rate = self.codes_rate * min(1.0, (_FULL_STEPS / steps) ** 0.5)
        for step in range(steps):
            if step % trained == 0:
                order = random.permutation(trained)

            def receive(value: ir.Value, gradient: Float32Array, share: float = _rate_share(step, steps)) -> None:
                tuned[value].step(gradient, codes_rate * share, self.scales_rate * share)

            divergence.gradients(int(order[step % trained]), source, receive)
            report_progress(self.name, step + 1, steps)
        return before, kl(), steps

    def _weights(self, model: ir.Model) -> dict[ir.Value, TunedWeight]:
        """Weights of up to 4 bits that one linear layer reads, by the DequantizeLinear's output."""
        found, keep_zeros = {}, self.keep_zeros or MASKS_FACTS.is_in(model)
        for node in model.graph:
            if node.op_type != "DequantizeLinear" or not _is_weight(node) or weight_bits(node) > _MOST_BITS:
                continue
            value = node.outputs[0]
            if len(value.uses()) == 1:
                found[value] = _tuned_weight(node, tune_codes=self.codes, keep_zeros=keep_zeros)
            else:
                _log.info("%s: %s is left alone: several layers share it", self.name, value.name)
        return found

    def _norms(self, graph: ir.Graph) -> dict[ir.Value, TunedNorm]:
        weights = (node.inputs[1] for node in graph if node.op_type == "RMSNormalization")
        return {value: TunedNorm(float32_values(value)) for value in weights if value is not None and is_own(value)}


def _rate_share(step: int, steps: int) -> float:
    """Share of the full rate at a step: a linear warm-up, then a cosine to zero."""
    return min(1.0, (step + 1) / _WARM_UP_STEPS) * 0.5 * (1 + math.cos(math.pi * step / steps))


def _is_weight(node: ir.Node) -> bool:
    """Whether a DequantizeLinear makes the weight of linear layers."""
    stored = all(value is None or value.is_initializer() for value in node.inputs)
    readers = node.outputs[0].uses()
    return stored and bool(readers) and all(use.node.op_type == "Gemm" and use.idx == 1 for use in readers)


def _tuned_weight(node: ir.Node, *, tune_codes: bool, keep_zeros: bool) -> TunedWeight:
    """Read the codes, scales and zero points of a DequantizeLinear."""
    codes, scale, *rest = (_array(value) for value in node.inputs if value is not None)
    scale = scale.reshape(len(codes), -1).astype(np.float32)
    zero_point = rest[0].reshape(scale.shape).astype(np.float32) if rest else np.zeros_like(scale)
    bits: Any = weight_bits(node)
    return TunedWeight(
        codes,
        scale,
        zero_point,
        Scheme(bits, 0, symmetric=not rest).code_range,
        node.attributes.get_int("block_size", 0) or codes.shape[1],
        tune_codes=tune_codes,
        keep_zeros=keep_zeros,
        scale_dtype=scale_dtype_of(scale),
    )


def _write(dequantized: ir.Value, tuned: TunedWeight) -> float:
    """Write tuned codes and scales into the IR; return the share of codes that changed."""
    node = dequantized.producer()
    assert node is not None
    codes, scale = (value for value in node.inputs[:2] if value is not None)
    before, stored_scale = _array(codes), _array(scale)
    after = tuned.codes.astype(before.dtype)
    codes.const_value = code_tensor(after, weight_bits(node), codes.name or "")
    scale.const_value = ir.Tensor(tuned.scales.reshape(stored_scale.shape), name=scale.name)
    return float(np.mean(after != before))


def _array(value: ir.Value) -> NDArray[Any]:
    """Stored numbers; 4-bit codes as int8 or uint8."""
    assert value.const_value is not None
    array = value.const_value.numpy()
    if value.dtype in (ir.DataType.INT4, ir.DataType.INT8):
        return array.astype(np.int8)
    return array.astype(np.uint8) if value.dtype in (ir.DataType.UINT4, ir.DataType.UINT8) else array
