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

Parameters that a gradient tunes: the scales and codes of a quantized weight, and a norm's weight.

All are tuned as factors or codes, so that a step means the same everywhere: a scale and a norm's weight as exp(x) times
what they were, a code as a real number that is rounded where it is used (the gradient passes through the rounding:
Bengio et al., arXiv:1308.3432). Steps are Adam's (Kingma and Ba, arXiv:1412.6980).
"""

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.errors import PassError, UsageError
from ingot.passes.base import Pass, PassKind
from ingot.passes.calibration import Divergence, Float32Array, require_calibration
from ingot.passes.numerics.scale_search import Scheme
from ingot.passes.pruned_facts import MASKS_KEY
from ingot.passes.quantization.channel_folds import is_own, scale_stored
from ingot.passes.quantization.quantized_tensors import code_tensor, weight_bits
from ingot.passes.weights import float32_values
from ingot.progress import note, report_progress

_MOMENTUM, _SPREAD, _TINY = 0.9, 0.95, 1e-12


@dataclass
class Adam:
    """The running mean and mean square of a gradient."""

    mean: Float32Array
    square: Float32Array
    steps: int = 0

    @classmethod
    def of(cls, parameter: Float32Array) -> "Adam":
        """For a parameter of that shape."""
        return cls(np.zeros_like(parameter), np.zeros_like(parameter))

    def step(self, parameter: Float32Array, gradient: Float32Array, rate: float) -> None:
        """Change the parameter in place, by about `rate`."""
        self.steps += 1
        self.mean += np.float32(1 - _MOMENTUM) * (gradient - self.mean)
        self.square += np.float32(1 - _SPREAD) * (np.square(gradient) - self.square)
        size = np.sqrt(self.square / np.float32(1 - _SPREAD**self.steps)) + np.float32(_TINY)
        parameter -= np.float32(rate / (1 - _MOMENTUM**self.steps)) * self.mean / size


class Tuned(Protocol):
    """A stored value that is tuned."""

    def values(self) -> Float32Array:
        """What it is by now, in float32."""
        ...

    def step(self, gradient: Float32Array, codes_rate: float, scales_rate: float) -> None:
        """One step against dL/d(values)."""
        ...


@dataclass
class TunedNorm:
    """A norm's weight [channels]."""

    start: Float32Array
    log_factor: Float32Array = field(init=False)
    _adam: Adam = field(init=False)

    def __post_init__(self) -> None:
        self.log_factor = np.zeros_like(self.start)
        self._adam = Adam.of(self.start)

    def values(self) -> Float32Array:
        """The weight times the factor."""
        return self.start * np.exp(self.log_factor)

    def step(self, gradient: Float32Array, codes_rate: float, scales_rate: float) -> None:
        """One step of the factor."""
        self._adam.step(self.log_factor, gradient * self.values(), scales_rate)


@dataclass
class TunedWeight:
    """A quantized weight: its codes [out, in] less the zero point, as real numbers, and its scales [out, blocks]."""

    node: ir.Node
    tune_codes: bool
    keep_zeros: bool
    _levels: Float32Array = field(init=False)
    _scale: Float32Array = field(init=False)
    _low: Float32Array = field(init=False)
    _high: Float32Array = field(init=False)
    _log_factor: Float32Array = field(init=False)
    _free: NDArray[np.bool_] | None = field(init=False)
    _adams: tuple[Adam | None, Adam] = field(init=False)

    def __post_init__(self) -> None:
        codes, scale, *rest = (_array(value) for value in self.node.inputs if value is not None)
        self._block = self.node.attributes.get_int("block_size", 0) or codes.shape[1]
        self._scale = scale.reshape(len(codes), -1).astype(np.float32)
        zero = rest[0].reshape(self._scale.shape).astype(np.float32) if rest else np.zeros_like(self._scale)
        low, high = Scheme(self.bits, 0, not rest).code_range
        self._low, self._high = np.float32(low) - zero, np.float32(high) - zero
        self._zero = zero
        self._levels = codes.astype(np.float32) - self._wide(zero)
        self._free = self._levels != 0 if self.keep_zeros else None
        self._log_factor = np.zeros_like(self._scale)
        self._adams = (Adam.of(self._levels) if self.tune_codes else None, Adam.of(self._scale))

    @property
    def bits(self) -> Any:
        """Bits of the codes."""
        return weight_bits(self.node)

    def values(self) -> Float32Array:
        """(code - zero point) * scale: [out, in]."""
        return self._rounded() * self._wide(self._scales())

    def step(self, gradient: Float32Array, codes_rate: float, scales_rate: float) -> None:
        """One step of the scales and, where they are tuned, of the codes."""
        rounded, scales = self._rounded(), self._scales()
        starts = np.arange(0, gradient.shape[1], self._block)
        by_scale = np.add.reduceat(gradient * rounded, starts, axis=1) * scales
        codes_adam, scales_adam = self._adams
        scales_adam.step(self._log_factor, by_scale, scales_rate)
        if codes_adam is not None:
            by_code = gradient * self._wide(scales)
            codes_adam.step(self._levels, by_code if self._free is None else by_code * self._free, codes_rate)
            np.clip(self._levels, self._wide(self._low), self._wide(self._high), out=self._levels)

    def write(self) -> float:
        """Put what was found into the IR; the share of codes that are others than before."""
        codes, scale = (value for value in self.node.inputs[:2] if value is not None)
        before, stored_scale = _array(codes), _array(scale)
        after = (self._rounded() + self._wide(self._zero)).astype(before.dtype)
        codes.const_value = code_tensor(after, self.bits, codes.name or "")
        scale.const_value = ir.Tensor(self._scales().reshape(stored_scale.shape), name=scale.name)
        return float(np.mean(after != before))

    def _rounded(self) -> Float32Array:
        rounded: Float32Array = np.rint(self._levels)
        return rounded

    def _scales(self) -> Float32Array:
        scales: Float32Array = self._scale * np.exp(self._log_factor)
        return scales

    def _wide(self, by_block: Float32Array) -> Float32Array:
        """[out, blocks] -> [out, in]."""
        return np.repeat(by_block, self._block, axis=1)[:, : self._columns]

    @property
    def _columns(self) -> int:
        codes = self.node.inputs[0]
        assert codes is not None
        assert codes.shape is not None
        return int(codes.shape.numpy()[1])


def _array(value: ir.Value) -> NDArray[Any]:
    """Stored numbers; 4-bit codes as int8 or uint8."""
    assert value.const_value is not None
    array = value.const_value.numpy()
    if value.dtype in (ir.DataType.INT4, ir.DataType.INT8):
        return array.astype(np.int8)
    return array.astype(np.uint8) if value.dtype in (ir.DataType.UINT4, ir.DataType.UINT8) else array


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
    keeps_schemes: ClassVar[bool] = True

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
