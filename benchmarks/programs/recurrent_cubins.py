"""Compile the kernels of recurrent layers in the shapes of Qwen3-Next-80B (delta rule) and Granite-4.0-H-Small (scan).

    python -m benchmarks.programs.recurrent_cubins              # -> benchmarks/results/recurrent-cubins.json

Rows: kernel, form, SM, registers per thread, spilled bytes, shared memory per block, instructions of the whole kernel
and of its main loop (a token of `recurrence`, a chunk of `chunked_recurrence`). No GPU needed.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import click
import triton

from benchmarks.paths import RESULTS
from benchmarks.programs.kernel_cubins import compiled
from ingot.artifact.programs.launch_program import Constant, Kernel
from ingot.pipeline.targets.cuda.kernel_signatures import SIGNATURES, make_kernel
from ingot.pipeline.targets.cuda.lower import recurrent as lowering
from ingot.pipeline.targets.cuda.program_builder import TILE_QUERIES
from ingot.pipeline.targets.table import SMS
from ingot.sizes import next_power_of_two

OUTPUT = RESULTS / "recurrent-cubins.json"
HALF = {"T": "bf16", "X": "bf16", "OUT": "bf16"}
SEQUENCES = 64
# heads, key heads (groups), rows and columns of a state
DELTA_RULE, SCAN = (32, 16, 128, 128), (128, 1, 128, 64)


def requests() -> Iterator[tuple[str, Kernel]]:
    """Every kernel, in the forms of decode steps and of prompts."""
    for name, sizes in (("delta rule", DELTA_RULE), ("scan", SCAN)):
        yield from _recurrence_requests(name, *sizes)
    taps: dict[str, Constant] = {"CHANNELS": 8192, "TAPS": 4, "BLOCK_TAPS": 4, "HAS_BIAS": False, "HAS_SILU": True}
    for form, parts in (("decode", 4), ("ragged", 1)):
        ragged = form == "ragged"
        own: dict[str, Constant] = {"RAGGED": ragged, "TILE": TILE_QUERIES if ragged else 1, "PARTS": parts}
        types = {**HALF, "X": "fp32" if parts > 1 else "bf16"}
        block = lowering.CONVOLUTION_BLOCKS["ragged" if ragged else "decode"]
        yield form, _made("short_convolution", types, {**taps, **own, "BLOCK": block}, 4)
    rate: dict[str, Constant] = {"COLUMNS": 32, "BLOCK": 32, "PARTS": 4, "CURVE": 1}
    yield "softplus", _made("recurrence_rates", {"X": "fp32"}, {**rate, "HAS_BIAS": False, "HAS_FACTORS": True}, 1)


def _recurrence_requests(name: str, heads: int, key_heads: int, keys: int, values: int) -> Iterator[tuple[str, Kernel]]:
    is_scan = name == "scan"
    block = next_power_of_two(keys)
    of_keys: dict[str, Constant] = {"HEADS": heads, "KEY_HEADS": key_heads, "KEYS": keys, "BLOCK_KEYS": block}
    of_keys["IS_SCAN"] = is_scan
    whole: dict[str, Constant] = {**of_keys, "VALUES": values}
    for ragged in (False, True):
        most = lowering.FEW_TOKENS * ragged
        own: dict[str, Constant] = {"TILE": lowering.state_columns(block), "RAGGED": ragged, "MOST": most}
        form = f"{name}, {'ragged' if ragged else 'decode'}"
        yield form, _made("recurrence", HALF, {**whole, **own, "NORMALIZES": not is_scan}, 1)
    chunk: dict[str, Constant] = {"CHUNK": lowering.CHUNK, "LEAST": lowering.FEW_TOKENS + 1, "EXACT": False}
    sizes: dict[str, Constant] = {"SEQUENCES": SEQUENCES, "BLOCK_SEQUENCES": SEQUENCES, "NORMALIZES": not is_scan}
    yield name, _made("recurrence_chunks", HALF, {**of_keys, **chunk, **sizes}, lowering.CHUNKS_WARPS)
    tiled: dict[str, Constant] = {**whole, **chunk, "TILE": lowering.CHUNKED_TILE}
    yield name, _made("chunked_recurrence", HALF, tiled, lowering.CHUNKED_WARPS, lowering.CHUNKED_STAGES)


def _made(
    name: str, types: Mapping[str, str], constants: Mapping[str, Constant], warps: int, stages: int = 3
) -> Kernel:
    """A kernel whose strides are multiples of 16."""
    strides = frozenset(argument for argument in SIGNATURES[name].arguments if argument.endswith("_stride"))
    return make_kernel(name, types, constants, strides, warps, stages)


def measured(form: str, kernel: Kernel, sm: int) -> dict[str, object]:
    """A row of the table."""
    facts, sass, _ = compiled(kernel, sm)
    loop = len(sass.main) if sass.loops else 0
    return {"kernel": kernel.name, "form": form, **facts, "instructions": len(sass.instructions), "loop": loop}


@click.command(help=__doc__)
@click.option("--output", type=click.Path(path_type=Path), default=OUTPUT)
@click.option("--sm", "sms", type=int, multiple=True, default=SMS, help="Only these.")
def main(output: Path, sms: tuple[int, ...]) -> None:
    """Compile every form for every SM; print a line for each and write all."""
    rows = []
    for sm in sms:
        for form, kernel in requests():
            rows.append(measured(form, kernel, sm))
            click.echo(" ".join(str(value) for value in rows[-1].values()))
    text = json.dumps({"triton": triton.__version__, "results": rows}, indent=1)
    output.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
