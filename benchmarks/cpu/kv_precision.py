"""Cost of each KV cache precision on real models: bytes, perplexity at the full context, generations.

    python -m benchmarks.cpu.kv_precision MODEL=TEXT ... --output kv_precision.json

Each model is built in 32-bit floats for the native engine, with and without quantize-kv-cache and `cpu.attention`, and
measured as `ingot build` measures: windows of the whole context, and 16 prompts that both continue greedily by 512
tokens, or to a shorter context's end.
Results are those of ingot.validation, with 95 % intervals. Prints a Markdown table; --output writes the figures.
"""

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import click

from benchmarks.device import device_facts
from ingot.artifact import open_artifact
from ingot.artifact.programs.cpu_program import Arithmetic
from ingot.builder import build
from ingot.validation.evidence import MeasureOptions, measure
from ingot.validation.options import AccuracyOptions, GenerationOptions

PRECISIONS = ("float16", "bfloat16", "fp8", "int8", "k8v4", "int4")
METRICS = ("perplexity_ratio", "kl_mean", "top1_agreement", "greedy_agreement", "greedy_common_tokens")
_UNMEASURED = ("evaluation=null", "latency=null", "generate=null", "gates={}")
_PASSES = "pack-projections, fuse-gated-activation, clean-up"


def measured(
    model: Path, text: Path, precision: str, tokens: int, folder: Path, attention: Arithmetic = "float32"
) -> dict[str, Any]:
    """The figures of one model and precision, against the same model with a KV cache of 32-bit floats.

    attention    the arithmetic of the candidate's attention; the baseline's is float32
    """
    baseline, candidate = folder / f"{model.name}-float32", folder / f"{model.name}-{precision}-{attention}"
    overrides = [f"checkpoint={model}", "cpu.engine=native", *_UNMEASURED]
    if not baseline.exists():
        build("fp32-cpu", [*overrides, f"passes=[{_PASSES}]"], baseline)
    stored = "" if precision == "float32" else f", {{quantize-kv-cache: {{precision: {precision}}}}}"
    overrides += [f"cpu.attention={attention}", f"passes=[{_PASSES}{stored}]"]
    build("fp32-cpu", overrides, candidate)
    manifest = open_artifact(candidate).manifest
    context = manifest.model.context_tokens
    options = MeasureOptions(
        text=text,
        accuracy=AccuracyOptions(max(tokens, 2 * (context - 1)), context - 1),  # and a BOS token
        generation=GenerationOptions(),
    )
    evidence = measure(candidate, baseline, options)
    assert evidence.accuracy is not None
    assert evidence.generation is not None
    return {
        "model": model.name,
        "precision": precision,
        "attention": attention,
        "context_tokens": context,
        "generated_tokens": evidence.generation.options.output_tokens,
        "bytes_per_token": manifest.kv.block_bytes / manifest.kv.block_tokens,
        "perplexity": evidence.accuracy.candidate_perplexity,
        "baseline_perplexity": evidence.accuracy.baseline_perplexity,
        **{name: asdict(evidence.measured[name].estimate) for name in METRICS},
    }


def make_table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table with a row for each model and precision."""
    lines = [
        "| model, context | KV cache, attention | bytes per token | perplexity | ratio | mean KL, nats "
        "| greedy agreement | equal at first |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratio, kl, agreement, common = (
            row[name] for name in ("perplexity_ratio", "kl_mean", "greedy_agreement", "greedy_common_tokens")
        )
        lines.append(
            f"| {row['model']}, {row['context_tokens']} | {row['precision']}, {row['attention']} "
            f"| {row['bytes_per_token']:.0f} "
            f"| {row['perplexity']:.4f} (float32 {row['baseline_perplexity']:.4f}) "
            f"| {ratio['low']:.5f} to {ratio['high']:.5f} | {kl['value']:.1e} "
            f"| {agreement['value']:.1%} ({agreement['low']:.1%} to {agreement['high']:.1%}) "
            f"| {common['value']:.0f} of {row['generated_tokens']} |"
        )
    return "\n".join(lines)


@click.command(help=__doc__)
@click.argument("models", nargs=-1, required=True, metavar="MODEL=TEXT...")
@click.option("--precision", "precisions", multiple=True, default=PRECISIONS, show_default=True)
@click.option("--attention", type=click.Choice(get_args(Arithmetic)), default="float32", help="Of the candidates.")
@click.option("--tokens", default=15_000, show_default=True, help="Evaluation tokens.")
@click.option("--output", type=click.Path(path_type=Path), help="Write the figures as JSON.")
def main(
    models: tuple[str, ...], precisions: tuple[str, ...], attention: Arithmetic, tokens: int, output: Path | None
) -> None:
    """Measure, print the table, write the JSON."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for pair in models:
            model, _, text = pair.partition("=")
            rows += [
                measured(Path(model), Path(text), precision, tokens, Path(folder), attention)
                for precision in precisions
            ]
    click.echo(make_table(rows))
    if output is not None:
        record = {"device": device_facts(), "tokens": tokens, "results": rows}
        output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
