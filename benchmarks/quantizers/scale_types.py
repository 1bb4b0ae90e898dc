"""Accuracy cost of float16 scales: errors of the weights and mean KL against float32, with three kinds of scales.

    float32                  scales as the quantizer found them
    float16                  codes chosen with scales that float16 holds: `scale_dtype: float16`
    float16, afterwards      the first, with its scales rounded and its codes kept

Weights are multiplied in float32, so that only their rounding is measured. The first half of TEXT is for evaluation,
the second for calibration. Bits per weight are those of the native CPU engine's tiles, scales and zero points included.

    python -m benchmarks.quantizers.scale_types MODEL TEXT

--calibration names another text for it.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx_ir as ir

from benchmarks.quantizers.accuracy import compare, first_sequences, halves
from benchmarks.quantizers.activation_schemes import SEQUENCE_TOKENS, SEQUENCES, quantize
from ingot.artifact.programs.operation_row import Matrix
from ingot.passes.numerics.scheme import to_float16
from ingot.passes.weights import float32_values, weight_sites
from ingot.pipeline.calibrate import CalibrationEngine, read_calibration_data
from ingot.pipeline.model.importer import ModelSource
from ingot.pipeline.targets.cpu.matrices import StoredMatrix

QUANTIZERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "4 bits, blocks of 128": ("quantize-weights", {"bits": 4, "block_size": 128}),
    "4 bits, blocks of 32": ("quantize-weights", {"bits": 4, "block_size": 32}),
    "8 bits, blocks of 32": ("quantize-weights", {"bits": 8, "block_size": 32}),
    "GPTQ, 4 bits, blocks of 32": ("gptq", {"bits": 4, "block_size": 32}),
    "smooth-quant": ("smooth-quant", {}),
}


def round_scales(model: ir.Model) -> None:
    """Round the scales of every quantized weight to float16."""
    for site in weight_sites(model):
        dequantize = site.operand.producer()
        scale = dequantize.inputs[1] if dequantize is not None and site.is_quantized else None
        if scale is not None and scale.const_value is not None:
            scale.const_value = ir.tensor(to_float16(np.asarray(scale.const_value.numpy())), name=scale.name)


def weight_error(exact: ir.Model, model: ir.Model) -> float:
    """||W - W'|| / ||W|| over all weights."""
    values = {site.node.name: float32_values(site.operand) for site in weight_sites(exact)}
    error = norm = 0.0
    for site in weight_sites(model):
        weight = values[site.node.name]
        error += float(np.square(weight - float32_values(site.operand), dtype=np.float64).sum())
        norm += float(np.square(weight, dtype=np.float64).sum())
    return float((error / norm) ** 0.5)


def matrices(model: ir.Model) -> list[Matrix]:
    """Matrices of the native CPU engine, one for each stored weight."""
    operands = {site.weight: site.operand for site in weight_sites(model)}
    return [StoredMatrix.of(operand).matrix for operand in operands.values()]


def row(name: str, scales: str, exact: ir.Model, model: ir.Model, evaluation: CalibrationEngine) -> str:
    """A row of the table."""
    stored = matrices(model)
    wide = sum(matrix.scale_bytes == 4 for matrix in stored)
    bits = 8 * sum(m.num_bytes for m in stored) / sum(m.n * m.k for m in stored)
    error = "" if name == "smooth-quant" else f"{weight_error(exact, model):.6f}"  # its channels are scaled
    kl, perplexity, _ = compare(evaluation, exact, model)
    return f"| {name} | {scales} | {wide} | {bits:.3f} | {error} | {kl:.6f} | {perplexity:.4f} |"


@click.command(help=__doc__)
@click.argument("checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("text", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--calibration", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--tokens", default=30_720, show_default=True, help="evaluation tokens")
def main(checkpoint: Path, text: Path, calibration: Path | None, tokens: int) -> None:
    """Entry point; see the module's docstring."""
    vocab = ModelSource.open(checkpoint).facts.vocab_size
    with tempfile.TemporaryDirectory() as folder:
        evaluated, calibrated = (text, calibration) if calibration else halves(text, Path(folder))
        drawn = read_calibration_data(calibrated, checkpoint, SEQUENCES, SEQUENCE_TOKENS, 0, vocab)
        evaluation = CalibrationEngine(first_sequences(evaluated, checkpoint, tokens, SEQUENCE_TOKENS, vocab))
    service = CalibrationEngine(drawn)
    exact = quantize(checkpoint, (), service)
    click.echo("| quantizer | scales | weights with float32 scales | bits | weight error | mean KL | perplexity |")
    click.echo("|---|---|---|---|---|---|---|")
    for name, (pass_name, options) in QUANTIZERS.items():
        for dtype in ("float32", "float16"):
            model = quantize(checkpoint, [(pass_name, {**options, "scale_dtype": dtype})], service)
            click.echo(row(name, dtype, exact, model, evaluation))
            if dtype == "float32":
                round_scales(model)
                click.echo(row(name, "float16, afterwards", exact, model, evaluation))


if __name__ == "__main__":
    main()
