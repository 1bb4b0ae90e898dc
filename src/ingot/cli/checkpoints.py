"""`ingot export`: quantized weights of a recipe or an artifact as a checkpoint that other tools load.

`ingot transcode`: a checkpoint in another tool's format, with the proof that its weights are the same.

`ingot import`: another tool's checkpoint looked through, written in one canonical form, and ready to build.

`ingot lint-checkpoint`: everything that is wrong with a checkpoint, quantized or not.
"""

import json
from pathlib import Path

import click

from ingot.artifact import MANIFEST, open_artifact
from ingot.cli.console import print_json, print_note, progress_bars, stdout
from ingot.errors import UsageError
from ingot.pipeline.interchange.export import FORMATS, export_artifact, export_checkpoint
from ingot.pipeline.interchange.import_ import RECIPE, Imported, import_foreign
from ingot.pipeline.interchange.lint import Finding, lint_checkpoint
from ingot.pipeline.interchange.transcode import TARGETS, Transcoded, transcode
from ingot.pipeline.interchange.writers.plain import FLOATS
from ingot.pipeline.recipe.load import load_recipe
from ingot.sizes import format_bytes


@click.command("export")
@click.argument("source", metavar="ARTIFACT|RECIPE")
@click.option("--to", "format_name", required=True, metavar="FORMAT", help=f"One of {', '.join(FORMATS)}.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="New folder to write.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set one value of the recipe.")
@click.option("--round-scales", is_flag=True, help="Round scales to float16, which gptq, awq and gguf store.")
@click.option("--widen", is_flag=True, help="Same values in another form: tables in floats, smaller groups, more bits.")
@click.option("--no-resume", is_flag=True, help="Calibrate from the start, even where an earlier run was cut off.")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON.")
def export_command(
    source: str,
    format_name: str,
    output: Path,
    overrides: tuple[str, ...],
    round_scales: bool,
    widen: bool,
    no_resume: bool,
    as_json: bool,
) -> None:
    """Write ARTIFACT's weights, or those that RECIPE makes of its checkpoint, in another tool's format.

    An artifact needs neither its checkpoint nor its calibration text again. The tokenizer is written beside the
    weights.

    \b
    Examples:
      ingot export artifacts/mine --to compressed-tensors --widen -o mine-w4
      ingot export int4-cpu --to compressed-tensors -o mine-w4 --set checkpoint=./my-model
          --set passes.quantize-weights.embedding=none --set passes.quantize-weights.lm_head=none
      ingot export fp32-cpu --to safetensors -o floats --set checkpoint=model-q4_0.gguf
      ingot export int4-cpu --to onnx -o mine-onnx --set checkpoint=./my-model
    """
    notes: list[str] = []
    with progress_bars():
        options = {"round_scales": round_scales, "widen": widen}
        if (Path(source) / MANIFEST).is_file():
            _refuse_overrides(source, overrides)
            artifact = open_artifact(source)
            folder = export_artifact(artifact, output, format_name, **options, note=notes.append)
        else:
            recipe = load_recipe(source, overrides)
            folder = export_checkpoint(recipe, output, format_name, **options, resume=not no_resume, note=notes.append)
    size = sum(file.stat().st_size for file in folder.iterdir())
    if as_json:
        print_json({"path": str(folder), "format": format_name, "bytes": size, "notes": notes})
        return
    for words in notes:
        print_note(words)
    stdout().print(f"wrote {folder} ({format_name}, {format_bytes(size)})", markup=False)


def _refuse_overrides(artifact: str, overrides: tuple[str, ...]) -> None:
    if overrides:
        raise UsageError(
            f"{artifact} is an artifact, whose weights are what they are: --set {overrides[0]} can only change what a "
            "recipe makes; name the recipe instead"
        )


@click.command("transcode")
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--to", "target", required=True, metavar="FORMAT", help=f"One of {', '.join(TARGETS)}.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="New folder to write.")
@click.option("--proof", type=click.Path(path_type=Path), help="File to write the proof to, as JSON.")
@click.option("--lossy", is_flag=True, help="Round scales, minima and floats that the format stores in 16 bits.")
@click.option("--floats", is_flag=True, help="compressed-tensors: layers that it cannot hold become float32.")
@click.option("--dtype", metavar="TYPE", help=f"Of weights written as floats: {', '.join(FLOATS)}.")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON.")
def transcode_command(
    source: Path,
    target: str,
    output: Path,
    proof: Path | None,
    lossy: bool,
    floats: bool,
    dtype: str | None,
    as_json: bool,
) -> None:
    """Write the checkpoint SOURCE, a folder or a .gguf file, in another format without changing a weight.

    Codes, scales and zero points are carried over; nothing is quantized again. The result is read back and every
    dequantized weight is compared with the source's before the folder appears. A scheme that the format cannot hold is
    refused, with the formats that can.

    \b
    Examples:
      ingot transcode ./model-gptq --to compressed-tensors -o model-ct --proof proof.json
      ingot transcode model-q4_0.gguf --to awq -o model-awq
    """
    with progress_bars():
        outcome = transcode(source, output, target, lossy=lossy, floats=floats, dtype=dtype)
    if proof is not None:
        proof.write_text(json.dumps({"source": str(source), **outcome.as_json()}, indent=2) + "\n", encoding="utf-8")
    if as_json:
        print_json({"source": str(source), **outcome.as_json()})
    else:
        print_transcoded(outcome)


def print_transcoded(outcome: Transcoded) -> None:
    """What was written, in what form, and the proof."""
    console, proof = stdout(), outcome.proof
    for note in outcome.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    for part in outcome.left_out:
        console.print(f"left out: {part}", markup=False, soft_wrap=True)
    size = sum(file.stat().st_size for file in outcome.folder.iterdir())
    console.print(f"wrote {outcome.folder} ({outcome.target}, {format_bytes(size)})", markup=False, soft_wrap=True)
    where = f" in {proof.largest_in}, {proof.changed_tensors} tensors changed" if proof.changed_tensors else ""
    console.print(
        f"proof: {proof.tensors} tensors, {proof.elements:,} elements, largest difference "
        f"{proof.largest_difference:g}{where}",
        markup=False,
        soft_wrap=True,
    )
    console.print(f"weights of the source   sha256:{proof.source_digest}", markup=False, soft_wrap=True)
    console.print(f"weights as written      sha256:{proof.written_digest}", markup=False, soft_wrap=True)


@click.command("import")
@click.argument("source", type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="New folder to write.")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON.")
def import_command(source: Path, output: Path, as_json: bool) -> None:
    """Take over the checkpoint SOURCE, a folder or a .gguf file, as a start for recipes.

    Everything that is wrong with it is told and refused. The folder holds the same weights, proven: plain safetensors,
    or compressed-tensors with the same codes, and a recipe.yaml that builds it. Recipes also read SOURCE as it is.

    \b
    Example:
      ingot import model-q4_k_m.gguf -o model
      ingot build model/recipe.yaml --set evaluation.text=heldout.txt -o artifacts/model
    """
    with progress_bars():
        outcome = import_foreign(source, output)
    if as_json:
        print_json(_as_json(source, outcome))
    else:
        _print_imported(outcome)


def _as_json(source: Path, outcome: Imported) -> dict[str, object]:
    return {
        "source": str(source),
        **outcome.transcoded.as_json(),
        "warnings": [vars(finding) for finding in outcome.warnings],
        "kept": outcome.kept,
        "floats": {reason: list(names) for reason, names in outcome.floats.items()},
        "recipe": str(outcome.transcoded.folder / RECIPE),
    }


def _print_imported(outcome: Imported) -> None:
    console = stdout()
    for finding in outcome.warnings:
        console.print(f"{finding.severity}: {finding.where}: {finding.message}", markup=False, soft_wrap=True)
    print_transcoded(outcome.transcoded)
    console.print(f"an artifact keeps the codes of {outcome.kept} weights", markup=False)
    for reason, names in outcome.floats.items():
        console.print(f"32-bit floats for {len(names)}, {names[0]} the first: {reason}", markup=False, soft_wrap=True)
    console.print(f"\n{outcome.transcoded.folder / RECIPE}:\n{outcome.recipe}", markup=False, soft_wrap=True)


@click.command("lint-checkpoint")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def lint_checkpoint_command(checkpoint: Path, as_json: bool) -> int:
    """Check CHECKPOINT, a folder or a .gguf file: shapes, finite values, zero points, exclude lists, KV scales.

    Exit codes: 0 no error (there may be warnings), 1 an error.

    \b
    Example:
      ingot lint-checkpoint ./model-gptq
    """
    with progress_bars():
        findings = lint_checkpoint(checkpoint)
    if as_json:
        print_json([vars(finding) for finding in findings])
    else:
        _print_findings(checkpoint, findings)
    return 1 if any(finding.severity == "error" for finding in findings) else 0


def _print_findings(checkpoint: Path, findings: list[Finding]) -> None:
    for finding in findings:
        stdout().print(f"{finding.severity}: {finding.where}: {finding.message}", markup=False, soft_wrap=True)
    errors = sum(finding.severity == "error" for finding in findings)
    stdout().print(f"{checkpoint}: {errors} errors, {len(findings) - errors} warnings", markup=False)
