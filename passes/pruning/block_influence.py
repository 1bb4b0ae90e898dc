"""Block influence of layers (Men et al., ShortGPT, arXiv:2403.03853): 1 - cos(input, output), the mean over tokens."""

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from ingot.passes.calibration import Calibration, CalibrationStage
from ingot.passes.pruning.residual_layers import ResidualLayer


def block_influence(
    model: ir.Model,
    layers: Sequence[ResidualLayer],
    calibration: Calibration,
    tokens: int,
    report: Callable[[int], None],
) -> list[float]:
    """The influence of each layer on about so many calibration tokens; `report` is told how many layers are done."""
    influence: list[float] = []
    for stage in calibration.stages(model):
        here = [layer for layer in layers[len(influence) :] if _begins(stage, layer)]
        if here:
            influence += _of_stage(stage, here, tokens)
            report(len(influence))
        if len(influence) == len(layers):
            break
    return influence


def _of_stage(stage: CalibrationStage, layers: Sequence[ResidualLayer], tokens: int) -> list[float]:
    """Measured, or recalled from a build that was cut off."""
    known = stage.recall()
    if known is None:
        known = {"influence": np.array([_influence(stage, layer, tokens) for layer in layers])}
        stage.remember(known)
    return [float(value) for value in known["influence"]]


def _begins(stage: CalibrationStage, layer: ResidualLayer) -> bool:
    """Whether the stage has linear layers of the layer; the first such stage has all that it reads."""
    return any(node in layer.nodes for group in stage.groups for node in group.linears)


def _influence(stage: CalibrationStage, layer: ResidualLayer, tokens: int) -> float:
    """The layer's input is its output less its branches."""
    after, *branches = stage.block(layer.nodes, [layer.end, *layer.branches], tokens)({})
    end = after.astype(np.float64)
    start = end - np.sum(branches, axis=0, dtype=np.float64)
    lengths = np.linalg.norm(start, axis=1) * np.linalg.norm(end, axis=1)
    cosines = np.einsum("tc,tc->t", start, end) / np.maximum(lengths, 1e-30)
    return float(1 - cosines.mean())
