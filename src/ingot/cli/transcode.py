"""`ingot transcode`: a checkpoint in another tool's format, with the proof that its weights are the same."""

import json
from pathlib import Path

import click

from ingot.cli.console import human_bytes, print_json, progress_bars, stdout
from ingot.pipeline.formats.plain_floats import FLOATS
from ingot.pipeline.transcode import TARGETS, Transcoded, transcode


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
    with progress_bars() as progress:
        outcome = transcode(source, output, target, lossy=lossy, floats=floats, dtype=dtype, progress=progress)
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
    console.print(f"wrote {outcome.folder} ({outcome.target}, {human_bytes(size)})", markup=False, soft_wrap=True)
    where = f" in {proof.largest_in}, {proof.changed_tensors} tensors changed" if proof.changed_tensors else ""
    console.print(
        f"proof: {proof.tensors} tensors, {proof.elements:,} elements, largest difference "
        f"{proof.largest_difference:g}{where}",
        markup=False,
        soft_wrap=True,
    )
    console.print(f"weights of the source   sha256:{proof.source_digest}", markup=False, soft_wrap=True)
    console.print(f"weights as written      sha256:{proof.written_digest}", markup=False, soft_wrap=True)
