"""Accuracy cost of 8-bit activations: mean KL against float32, perplexity and top-1 agreement, by scheme.

Weights and activations are rounded by the passes and multiplied in float32, so that only their rounding is measured;
head and embedding stay unquantized. The first half of TEXT is for evaluation, the second for calibration:

    python -m benchmarks.quantizers.activation_schemes MODEL TEXT

--calibration names another text. Prints a Markdown table; --json FILE keeps the figures with the versions.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import onnx_ir as ir

from benchmarks.quantizers.accuracy import FUSIONS, compare, first_sequences, halves
from ingot.passes.calibration import calibrate_with
from ingot.passes.manager import PassManager
from ingot.passes.registry import make_pass
from ingot.pipeline.calibrate import CalibrationEngine, read_calibration_data
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.compile import tool_versions
from ingot.pipeline.model.importer import ModelSource, import_checkpoint

SEQUENCES, SEQUENCE_TOKENS = 64, 256
Options = Mapping[str, Any]

_FLOATS = {"lm_head": "none", "embedding": "none"}
_GPTQ = {"bits": 8, "block_size": "channel", "symmetric": True, **_FLOATS}


def _smooth(**options: Any) -> tuple[str, Options]:
    return "smooth-quant", _FLOATS | options


SCHEMES: dict[str, tuple[tuple[str, Options], ...]] = {
    "int8 weights, float32 activations": (_smooth(alpha="none", activations="none"),),
    "int8 dynamic": (_smooth(alpha="none"),),
    "int8 dynamic, alpha 0.5": (_smooth(),),
    "int8 dynamic, alpha auto": (_smooth(alpha="auto"),),
    "int8 dynamic, alpha auto, GPTQ": (_smooth(alpha="auto", weights="none"), ("gptq", _GPTQ)),
    "int8 dynamic, 1 % outliers": (_smooth(alpha="none", outliers=0.01),),
    "int8 dynamic, outliers above 6": (_smooth(alpha="none", outlier_threshold=6.0),),
    "int8 dynamic, weights per tensor": (_smooth(alpha="none", weights="tensor"),),
    "int8 dynamic, weights per tensor, alpha auto": (_smooth(alpha="auto", weights="tensor"),),
    "int8 static": (_smooth(alpha="none", activations="static"),),
    "int8 static, range mse": (_smooth(alpha="none", activations="static", range="mse"),),
    "int8 static, percentile 99.99": (_smooth(alpha="none", activations="static", range="percentile"),),
    "int8 static, alpha 0.5": (_smooth(activations="static"),),
    "int8 static, alpha auto": (_smooth(alpha="auto", activations="static"),),
    "int8 static, alpha auto, range mse": (_smooth(alpha="auto", activations="static", range="mse"),),
    "int8 static, 1 % outliers": (_smooth(alpha="none", activations="static", outliers=0.01),),
    "float8 weights, float32 activations": (("fp8", {}),),
    "float8 weights, scale searched": (("fp8", {"clip": True}),),
    "float8 weights per tensor": (("fp8", {"weights": "tensor"}),),
    "float8 dynamic": (("fp8", {"activations": "dynamic"}),),
    "float8 static": (("fp8", {"activations": "static"}),),
    "float8 static, weights per tensor": (("fp8", {"activations": "static", "weights": "tensor"}),),
}


@dataclass(frozen=True)
class Figures:
    """One row of the table; KL in nats per token."""

    scheme: str
    kl: float
    perplexity: float
    top1_agreement: float


def quantize(checkpoint: Path, passes: Sequence[tuple[str, Options]], service: CalibrationEngine) -> ir.Model:
    """The checkpoint's IR, fused, after the passes."""
    model = import_checkpoint(Checkpoint.open(checkpoint), check_weights=False)
    chain = [*map(make_pass, FUSIONS), *(make_pass(name, options) for name, options in passes)]
    with calibrate_with(service):
        PassManager(chain).run(model)
    return model


def measure(
    checkpoint: Path, service: CalibrationEngine, evaluation: CalibrationEngine, names: Sequence[str]
) -> Iterator[Figures]:
    """float32, then the schemes of these names."""
    baseline = quantize(checkpoint, (), service)
    yield Figures("float32", *compare(evaluation, baseline, baseline))
    for name in names:
        yield Figures(name, *compare(evaluation, baseline, quantize(checkpoint, SCHEMES[name], service)))


@click.command(help=__doc__)
@click.argument("checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("text", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--calibration", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--tokens", default=30_720, show_default=True, help="evaluation tokens")
@click.option("--only", multiple=True, type=click.Choice(list(SCHEMES)), help="schemes to measure; default: all")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path))
def main(
    checkpoint: Path, text: Path, calibration: Path | None, tokens: int, only: tuple[str, ...], json_file: Path | None
) -> None:
    """Entry point; see the module's docstring."""
    vocab = ModelSource.open(checkpoint).facts.vocab_size
    with tempfile.TemporaryDirectory() as folder:
        texts = (text, calibration) if calibration else halves(text, Path(folder))
        drawn = read_calibration_data(texts[1], checkpoint, SEQUENCES, SEQUENCE_TOKENS, 0, vocab)
        scored = CalibrationEngine(first_sequences(texts[0], checkpoint, tokens, SEQUENCE_TOKENS, vocab))
    service = CalibrationEngine(drawn)
    rows = []
    click.echo("| scheme | mean KL | perplexity | top-1 |\n|---|---|---|---|")
    for row in measure(checkpoint, service, scored, only or list(SCHEMES)):
        rows.append(asdict(row))
        click.echo(f"| {row.scheme} | {row.kl:.6f} | {row.perplexity:.4f} | {row.top1_agreement:.4f} |")
    if json_file:
        document = {"versions": tool_versions(), "calibration": asdict(service.facts), "rows": rows}
        json_file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
