"""The error of a block's output as a function of the weights that a group of its linear layers would compute with.

The block reaches from the layers to where their results join the residual stream. Where it is the layers alone, the
error comes from X^T X over all calibration tokens instead of a run.
"""

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from ingot.errors import PassError
from ingot.passes.calibration import CalibrationStage, Float32Array, Float64Array, LinearGroup
from ingot.passes.quantization.channel_folds import block_of

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
