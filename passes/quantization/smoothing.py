"""SmoothQuant's migration: how far large inputs of linear layers are moved into their weights, and what that gains.

    s = max|x| ^ alpha / max|w| ^ (1 - alpha)        per input channel, over calibration tokens and over all rows
    x / s, W * s                                     the function stays

(Xiao et al., SmoothQuant, arXiv:2211.10438.) alpha 0 evens out the weights' channels, alpha 1 the inputs'. A search
takes the alpha whose block output is nearest to the exact one on calibration data, with weights and inputs rounded as
they will be: nodes that scale and round the input stand in the graph while a group is searched, and are taken out.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir

from ingot.errors import PassError
from ingot.passes.calibration import BlockRun, CalibrationStage, Float32Array, Float64Array, LinearGroup
from ingot.passes.numerics.rounding import dequantize, round_weight
from ingot.passes.numerics.scale_search import Scheme
from ingot.passes.quantization.activation_quantization import (
    ACTIVATIONS_KEY,
    LARGEST,
    ActivationScheme,
    insert_activation_quantization,
)
from ingot.passes.quantization.channel_folds import Fold, OwnMul, block_of, weights_of
from ingot.passes.quantization.per_tensor_weights import round_per_tensor
from ingot.passes.quantization.quantized_tensors import float_value
from ingot.passes.rewriting import add_initializer
from ingot.passes.weights import drop_if_unused
from ingot.settings import num_threads

LEAST = 1e-5  # what a channel that never fires counts for

WeightScale = Literal["channel", "tensor", "none"]
ActivationScale = Literal["dynamic", "static", "none"]


@dataclass(frozen=True)
class Rounding:
    """How weights and inputs will be rounded behind the smoothing."""

    weights: WeightScale
    activations: ActivationScale
    clip: bool

    def rounded(self, weight: Float32Array) -> Float32Array:
        """A weight as its codes say it; "none", where another pass will round it, counts as per channel."""
        if self.weights == "tensor":
            found = round_per_tensor(weight, self.clip)
        else:
            found = round_weight(weight, Scheme(8, 0, True, self.clip), num_threads())
        return dequantize(found.codes, found.scale, found.zero_point, weight.shape[1])


@dataclass(frozen=True)
class Smoothing:
    """A group's scale. Errors are those of the block's output, relative to its norm; None where none was measured."""

    layers: tuple[str, ...]
    alpha: float
    error_before: float | None
    error_after: float | None


def migration(inputs: Float64Array, weights: Float64Array, alpha: float) -> Float32Array:
    """s [in] from the largest |x| and |w| of each channel, the middle of its extremes at 1."""
    scale = np.maximum(inputs, LEAST) ** alpha / np.maximum(weights, LEAST) ** (1 - alpha)
    centred: Float32Array = (scale / np.sqrt(scale.max() * scale.min())).astype(np.float32)
    return centred


def largest_weights(group: LinearGroup) -> Float64Array:
    """Largest |w| of each input channel [in] over a group's layers."""
    peaks = [np.abs(weight).max(axis=0) for weight in weights_of(group).values()]
    largest: Float64Array = np.max(peaks, axis=0).astype(np.float64)
    return largest


def search(
    graph: ir.Graph,
    stage: CalibrationStage,
    group: LinearGroup,
    fold: Fold | OwnMul,
    rounding: Rounding,
    alphas: Sequence[float],
    tokens: int,
) -> tuple[Smoothing, Float32Array] | None:
    """The best of these alphas for a group that `fold` takes up; None where no scale at all is better."""
    inputs, weights = fold.shared(stage.max_absolute(group.source)), fold.shared(largest_weights(group))
    nodes, outputs = block_of(graph, group)
    if not outputs:
        raise PassError(f"{group.linears[0].name!r} adds nothing to a residual stream; set a fixed alpha")
    exact = [np.array(output) for output in stage.block(nodes, outputs, tokens)({})]
    peaks = stage.max_absolute(group.source)
    with _rounding_inputs(graph, group, rounding) as added:
        trial = _Trial(stage.block([*added, *nodes], outputs, tokens), added, group, rounding, exact, peaks)
        before = best = trial.error(np.ones(len(inputs), np.float32))
        found: tuple[float, Float32Array] | None = None
        for alpha in alphas:
            scale = migration(inputs, weights, alpha)
            error = trial.error(scale)
            if error < best:
                best, found = error, (alpha, scale)
    if found is None:
        return None
    return Smoothing(tuple(node.name or "" for node in group.linears), found[0], before, best), found[1]


@dataclass(frozen=True)
class _Trial:
    """A block whose group reads Mul(x, factors), rounded where inputs will be; `added` begins with that Mul."""

    run: BlockRun
    added: Sequence[ir.Node]
    group: LinearGroup
    rounding: Rounding
    exact: Sequence[Float32Array]
    peaks: Float64Array

    def error(self, scale: Float32Array) -> float:
        """Of the block's output with x / s and W * s rounded, relative to its norm."""
        step = np.float32(1)
        if self.rounding.activations == "static":  # the static scheme in the graph has scale 1
            step = np.float32(max((self.peaks / scale).max(), LEAST) / LARGEST["int"])
        arrays = {node: self.rounding.rounded(w * scale) * step for node, w in weights_of(self.group).items()}
        factors: Float32Array = (1 / (scale * step)).astype(np.float32)
        results = self.run({**arrays, self.added[0]: factors})
        pairs = list(zip(results, self.exact, strict=True))
        norm = sum(_squared(exact) for _, exact in pairs) or 1.0
        return float((sum(_squared(found - exact) for found, exact in pairs) / norm) ** 0.5)


@contextmanager
def _rounding_inputs(graph: ir.Graph, group: LinearGroup, rounding: Rounding) -> Iterator[Sequence[ir.Node]]:
    """Let the group read Mul(x, factors) [T, in], quantized as `rounding` says, for the time of the block."""
    first, source = group.linears[0], group.source
    assert source.shape is not None
    shape = tuple(size if isinstance(size, int) else str(size) for size in source.shape)
    ones = ir.Tensor(np.ones(int(shape[1]), np.float32), name=f"{first.name}.trial.factors")
    factors = add_initializer(graph, ones)
    fed = _node("Cast", f"{first.name}.trial.fed", [factors], (shape[1],), to=ir.DataType.FLOAT)  # calibration feeds it
    scaled = _node("Mul", f"{first.name}.trial.scaled", [source, fed.outputs[0]], shape)
    graph.insert_before(first, [fed, scaled])
    added = [scaled]
    if rounding.activations == "none":
        for node in group.linears:
            node.replace_input_with(0, scaled.outputs[0])
    else:
        scheme = ActivationScheme("int", None if rounding.activations == "dynamic" else 1.0)
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


def _squared(array: Float32Array) -> float:
    return float(np.square(array, dtype=np.float64).sum())
