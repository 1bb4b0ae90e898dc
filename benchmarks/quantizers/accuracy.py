"""Accuracy cost of each quantizer: mean KL against float32, perplexity and top-1 agreement, weights alone.

Weights are quantized by the passes and multiplied in float32, so that only their rounding is measured; head and
embedding stay unquantized. Calibration and evaluation text must not overlap:

    python -m benchmarks.quantizers.accuracy MODEL --calibration calibration.txt --evaluation held-out.txt

One text can serve both: `--evaluation TEXT --calibration TEXT --split` takes its second half for calibration and its
first for evaluation. Prints a Markdown table; --json FILE keeps the figures with the versions.
"""

import json
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import click
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.passes.calibration import calibrate_with
from ingot.passes.manager import PassManager
from ingot.passes.registry import make_pass
from ingot.pipeline.calibrate import CalibrationData, CalibrationEngine, read_calibration_data
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.compile import tool_versions
from ingot.pipeline.model.importer import ModelSource, import_checkpoint
from ingot.runtime import Tokenizer

FUSIONS = ("fold-constants", "pack-projections", "fuse-gated-activation")
CHAINS = {
    "RTN": ("quantize-weights",),
    "GPTQ, no refinement": ("gptq:plain",),
    "GPTQ": ("gptq",),
    "AWQ + RTN": ("awq", "quantize-weights"),
    "AWQ searched for RTN + GPTQ": ("awq", "gptq"),
    "AWQ + GPTQ": ("awq:gptq", "gptq"),
    "GPTQ + distill": ("gptq", "distill"),
    "rotate + RTN": ("rotate", "quantize-weights"),
    "rotate + GPTQ": ("rotate", "gptq"),
    "rotate + AWQ + GPTQ": ("rotate", "awq:gptq", "gptq"),
    "mixed at this size + RTN": ("mixed-precision", "quantize-weights"),
    "mixed at this size + GPTQ": ("mixed-precision:for-gptq", "gptq"),
}
VARIANTS: dict[str, dict[str, object]] = {
    "": {},
    "plain": {"refine": 0},
    "gptq": {"rounding": "gptq", "steps": 5},
    "for-gptq": {"rounding": "gptq"},
}
FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Figures:
    """One row of the table; KL in nats per token."""

    quantizer: str
    block_size: int
    kl: float
    perplexity: float
    top1_agreement: float
    seconds: float


def quantize(checkpoint: Path, passes: Sequence[str], block_size: int, service: CalibrationEngine) -> ir.Model:
    """The model after the passes; the part of a name after a colon is one of VARIANTS."""
    model = import_checkpoint(Checkpoint.open(checkpoint), check_weights=False)
    chain = [make_pass(name) for name in FUSIONS]
    for entry in passes:
        name, _, variant = entry.partition(":")
        chain.append(make_pass(name, _options(name, block_size) | VARIANTS[variant]))
    start = partial(import_checkpoint, Checkpoint.open(checkpoint), check_weights=False)
    with calibrate_with(replace(service, reference=start)):
        PassManager(chain).run(model)
    return model


def _options(name: str, block_size: int) -> dict[str, object]:
    if name in ("rotate", "distill"):
        return {}
    if name == "mixed-precision":
        return {"same_size_as": {"bits": 4, "block_size": block_size}}
    kept = {} if name == "awq" else {"lm_head": "none", "embedding": "none"}
    return {"block_size": block_size, **kept}


def log_probabilities(logits: Iterable[NDArray[np.float32]]) -> Iterator[FloatArray]:
    """Log softmax of each chunk [tokens, vocab], in float64."""
    for chunk in logits:
        shifted = chunk.astype(np.float64)
        shifted -= shifted.max(axis=1, keepdims=True)
        shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        yield shifted


def compare(evaluation: CalibrationEngine, baseline: ir.Model, candidate: ir.Model) -> tuple[float, float, float]:
    """Mean KL, perplexity and top-1 agreement of the candidate over the evaluation's sequences."""
    ids = evaluation.data.sequences
    kl = nll = agreements = start = 0.0
    pairs = zip(*(log_probabilities(evaluation.logits(m)) for m in (baseline, candidate)), strict=True)
    for base, cand in pairs:
        first = int(start) // ids.shape[1]
        sequences = ids[first : first + len(base) // ids.shape[1]]
        kl += float((np.exp(base) * (base - cand)).sum())
        agreements += float((base.argmax(axis=1) == cand.argmax(axis=1)).sum())
        by_sequence = cand.reshape(*sequences.shape, -1)[:, :-1]
        nll -= float(np.take_along_axis(by_sequence, sequences[:, 1:, None], axis=2).sum())
        start += len(base)
    predicted = ids.size - len(ids)
    return kl / ids.size, float(np.exp(nll / predicted)), agreements / ids.size


def halves(text: Path, folder: Path) -> tuple[Path, Path]:
    """The first and the second half of a text as files."""
    content = text.read_text(encoding="utf-8")
    middle = len(content) // 2
    files = folder / f"first-half-{text.name}", folder / f"second-half-{text.name}"
    for file, part in zip(files, (content[:middle], content[middle:]), strict=True):
        file.write_text(part, encoding="utf-8")
    return files


def first_sequences(text: Path, checkpoint: Path, tokens: int, sequence_tokens: int, vocab: int) -> CalibrationData:
    """The beginning of the text as whole sequences, at most `tokens` tokens."""
    tokenizer = Tokenizer.load(checkpoint)
    content = text.read_text(encoding="utf-8")
    extra = len(tokenizer.encode("a")) - len(tokenizer.encode("a", add_special_tokens=False))
    available = len(tokenizer.encode(content, add_special_tokens=False)) // (sequence_tokens - min(extra, 1))
    data = read_calibration_data(text, checkpoint, available, sequence_tokens, 0, vocab)  # all of them, in order
    return CalibrationData(data.facts, data.sequences[: tokens // sequence_tokens])


def measure(
    checkpoint: Path, service: CalibrationEngine, evaluation: CalibrationEngine, names: Sequence[str]
) -> Iterator[Figures]:
    """float32, then the chains of these names at both block sizes."""
    baseline = quantize(checkpoint, (), 32, service)
    yield Figures("float32", 0, *compare(evaluation, baseline, baseline), 0.0)
    for block_size in (32, 128):
        for name in names:
            start = time.perf_counter()
            candidate = quantize(checkpoint, CHAINS[name], block_size, service)
            seconds = time.perf_counter() - start
            yield Figures(name, block_size, *compare(evaluation, baseline, candidate), seconds)


@click.command(help=__doc__)
@click.argument("checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--calibration", required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--evaluation", required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--split", is_flag=True, help="evaluate on the first half of the text, calibrate on the second")
@click.option("--sequences", default=64, show_default=True, help="calibration sequences")
@click.option("--sequence-tokens", default=256, show_default=True)
@click.option("--tokens", default=30_720, show_default=True, help="evaluation tokens")
@click.option("--only", multiple=True, type=click.Choice(list(CHAINS)), help="chains to measure; default: all")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path))
def main(
    checkpoint: Path,
    calibration: Path,
    evaluation: Path,
    split: bool,
    sequences: int,
    sequence_tokens: int,
    tokens: int,
    only: tuple[str, ...],
    json_file: Path | None,
) -> None:
    """Entry point; see the module's docstring."""
    vocab = ModelSource.open(checkpoint).facts.vocab_size
    with tempfile.TemporaryDirectory() as folder:
        texts = halves(evaluation, Path(folder)) if split else (evaluation, calibration)
        service = CalibrationEngine(read_calibration_data(texts[1], checkpoint, sequences, sequence_tokens, 0, vocab))
        scored = CalibrationEngine(first_sequences(texts[0], checkpoint, tokens, sequence_tokens, vocab))
    rows = []
    click.echo("| quantizer | block | mean KL | perplexity | top-1 | seconds |\n|---|---|---|---|---|---|")
    for row in measure(checkpoint, service, scored, only or list(CHAINS)):
        rows.append(asdict(row))
        figures = f"{row.kl:.5f} | {row.perplexity:.4f} | {row.top1_agreement:.4f} | {row.seconds:.1f}"
        click.echo(f"| {row.quantizer} | {row.block_size or ''} | {figures} |")
    if json_file:
        document = {"versions": tool_versions(), "calibration": asdict(service.facts), "rows": rows}
        json_file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
