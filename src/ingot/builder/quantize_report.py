"""The quality of an artifact's quantization: figures sealed by its build, read from its program, or measured again.

    artifact                  bits, bytes, scales, codes; errors and KL if the build sealed them
    ... and checkpoint        errors and outliers of the weights
    ... and text              KL of each weight quantized alone

Errors and KL compare the program with the checkpoint's weights, so they require weights that were only rounded. If a
pass scaled, rotated or pruned them, only the sealed figures are available.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.artifact import Artifact
from ingot.builder.baseline import with_checkpoint
from ingot.builder.layer_kl import KlOptions, layer_kl
from ingot.errors import UsageError, one_of
from ingot.passes.manager import PassManager
from ingot.passes.numerics.weight_statistics import outliers
from ingot.passes.weights import float32_values, weight_sites
from ingot.pipeline.compile import open_source
from ingot.pipeline.interchange.program_statistics import ProgramWeight, program_statistics
from ingot.pipeline.recipe.schema import Recipe
from ingot.runtime import Tokenizer
from ingot.validation.evidence import sealed_quantization
from ingot.validation.quantization import Quantization, WeightFigures

_WINDOW_TOKENS = 512

FloatArray = NDArray[np.float32]


@dataclass(frozen=True)
class KLText:
    """A text to measure KL on, and roughly how many of its tokens; None: as many as a bounded amount of work allows."""

    text: Path
    tokens: int | None = None
    threads: int | None = None


def quantize_report(
    artifact: Artifact, checkpoint: Path | None = None, text: KLText | None = None
) -> tuple[Quantization, list[str]]:
    """Return the figures of all quantized weights, and remarks on missing figures.

    Raises UsageError for a text without a checkpoint, CheckpointError or DataError if one of them cannot be used.
    """
    if text is not None and checkpoint is None:
        raise UsageError("--text requires the checkpoint's weights; add --checkpoint FOLDER")
    sealed = sealed_quantization(artifact)
    known = {weight.tensor: weight for weight in sealed.weights}
    program = list(program_statistics(artifact))
    weights = tuple(_merged(weight, known.get(weight.tensor)) for weight in program)
    found = replace(sealed, weights=weights, kl_absent="" if sealed.kl else sealed.kl_absent or "the build sealed none")
    if checkpoint is None:
        return found, []
    recipe = with_checkpoint(artifact, checkpoint)
    changing = [made.name for made in recipe.make_passes() if made.changes_weights]
    if changing:
        return found, [
            f"{one_of(changing)} changed the weights before they were rounded, so they cannot be compared with the "
            "checkpoint's; the figures are those that the build measured"
        ]
    model, reads = _unquantized(recipe), {weight.name: weight.read for weight in program}
    found = _with_errors(found, model, reads)
    return (_with_kl(found, model, reads, artifact, recipe, text), []) if text else (found, [])


def _merged(weight: ProgramWeight, sealed: WeightFigures | None) -> WeightFigures:
    """Combine the figures read from the program with those that only the build could measure."""
    shown = {name: value for name, value in vars(weight).items() if name != "read"}
    if sealed is None:
        return WeightFigures(**shown)
    return replace(sealed, **{**shown, "name": sealed.name, "block_size": sealed.block_size})


def _unquantized(recipe: Recipe) -> ir.Model:
    """Run the recipe's exact passes on the checkpoint, so that layers are packed and named as in the artifact."""
    model = open_source(recipe).copy()
    PassManager([made for made in recipe.make_passes() if not made.is_lossy]).run(model)
    return model


def _with_errors(found: Quantization, model: ir.Model, reads: Mapping[str, Callable[[], FloatArray]]) -> Quantization:
    operands = {site.node.name: site.operand for site in weight_sites(model) if not site.is_quantized}
    weights = [
        _with_error(weight, float32_values(operands[weight.name]), reads[weight.name]())
        if weight.name in operands and weight.name in reads
        else weight
        for weight in found.weights
    ]
    return replace(found, weights=tuple(weights))


def _with_error(weight: WeightFigures, original: FloatArray, rounded: FloatArray) -> WeightFigures:
    norm = float(np.linalg.norm(original.astype(np.float64)))
    error = float(np.linalg.norm(original.astype(np.float64) - rounded)) / norm if norm else 0.0
    spread = outliers(original)
    return replace(
        weight,
        relative_error=error,
        outlier_share=spread["outlier_share"],
        peak_over_rms=spread["peak_over_rms"],
    )


def _with_kl(
    found: Quantization,
    model: ir.Model,
    reads: Mapping[str, Callable[[], FloatArray]],
    artifact: Artifact,
    recipe: Recipe,
    text: KLText,
) -> Quantization:
    plain = {site.node.name for site in weight_sites(model) if not site.is_quantized}
    weights = {weight.name: reads[weight.name] for weight in found.weights if weight.name in plain}
    window = recipe.evaluation.window_tokens if recipe.evaluation else _WINDOW_TOKENS
    size = text.text.stat().st_size if text.text.is_file() else 0  # no text has more tokens than bytes
    options = KlOptions(text.text, window, size, text.tokens, text.threads)
    tokenizer = partial(Tokenizer.load, artifact.path / "tokenizer", artifact.files_below("tokenizer"))
    measured = layer_kl(model, weights, tokenizer, options)
    if isinstance(measured, str):
        return replace(found, kl=None, kl_absent=measured)
    rows = tuple(replace(weight, kl=measured.kl.get(weight.name)) for weight in found.weights)
    return replace(found, weights=rows, kl=measured.measurement, kl_absent="")
