"""Compile the kernels of latent attention in DeepSeek-V3's shape, and count what is in them. No GPU needed.

    python -m benchmarks.programs.latent_cubins          # prints JSON; about two minutes

Rows: kernel, pool, SM, warps, registers, spilled bytes, shared memory; of attention the thread instructions of the main
loop for each key and head. Floors are nanoseconds for a key that all heads of one query attend to, on an A100 and an
H100: to read it from memory, to multiply by it, to issue the instructions. None is a measured time.
"""

import argparse
import json
from collections.abc import Iterator

from benchmarks.programs.instructions import GPUS
from benchmarks.programs.kernel_cubins import HALF, POOLS, compiled
from ingot.artifact.programs.launch_program import Constant, Kernel
from ingot.pipeline.targets.cuda.attention_operands import Chunks
from ingot.pipeline.targets.cuda.kernel_signatures import make_kernel
from ingot.pipeline.targets.cuda.lower.latents import LatentTile
from ingot.pipeline.targets.table import FLOAT8_FROM, SMS

HEADS, PLAIN, ROPE, RANK, CONTEXT = 128, 128, 64, 512, 131072
STRIDES = ("q_offset", "q_stride", "absorbed_stride", "out_stride", "block_stride", "scale_block_stride", "x_stride")
KEY_BYTES = {"16-bit": 2 * (ROPE + RANK), "fp8": ROPE + RANK + 2, "int8": ROPE + RANK + 2}


def requests(sm: int) -> Iterator[tuple[str, Kernel]]:
    """The kernels over each pool, by the pool's name."""
    tile, prompts = (LatentTile.of(RANK, sm=sm, is_float32=False, is_ragged=one) for one in (False, True))
    aligned = frozenset(STRIDES)
    for kind, pool in enumerate(KEY_BYTES):
        if pool == "fp8" and sm < FLOAT8_FROM:
            continue
        sizes: dict[str, Constant] = {"RANK": RANK, "BLOCK_RANK": RANK, "ROPE": ROPE, "BLOCK_ROPE": ROPE, "KIND": kind}
        types, stored = {**HALF, "KV": POOLS[pool]}, {**sizes, "BLOCK_TOKENS": 16}
        yield pool, make_kernel("latent_kv_write", types, {**stored, "PARTS": 1}, aligned)
        read = {**stored, "HEADS": HEADS, "HEAD_DIM": PLAIN + ROPE, "TILE": tile.keys, "DTYPE": "fp16"}
        chunks: dict[str, Constant] = {**Chunks.of_latents(CONTEXT, 1, HEADS, HEADS // tile.rows).constants}
        options = (aligned, tile.num_warps, tile.num_stages)
        decode = {**read, **chunks, "BLOCK_HEADS": tile.rows}
        yield pool, make_kernel("latent_decode_attention", types, decode, *options)
        ragged: dict[str, Constant] = {**read, "BLOCK_HEADS": prompts.rows, "TILE": prompts.keys, "QUERIES": 1}
        yield (
            pool,
            make_kernel("latent_ragged_attention", types, ragged, aligned, prompts.num_warps, prompts.num_stages),
        )


def measured(pool: str, kernel: Kernel, sm: int) -> dict[str, object]:
    """A row of the table."""
    facts, sass, _ = compiled(kernel, sm)
    made: dict[str, object] = {"kernel": kernel.name, "pool": pool, **facts}
    if "TILE" not in kernel.constants:
        return made
    rows, keys = int(kernel.constants["BLOCK_HEADS"]), int(kernel.constants["TILE"])
    return {**made, "rows": rows, "per_key_and_head": round(len(sass.main) * kernel.num_warps * 32 / rows / keys, 2)}


def floors(row: dict[str, object]) -> dict[str, float]:
    """Nanoseconds for one key and all heads of a query, on the SM's large GPU."""
    gpu = GPUS[int(str(row["sm"]))]
    instructions = float(str(row["per_key_and_head"])) * HEADS / 32
    return {
        "bytes": round(1e9 * KEY_BYTES[str(row["pool"])] / gpu.bytes_per_second, 2),
        "tensor": round(1e9 * 2 * HEADS * (ROPE + 2 * RANK) / gpu.flops, 2),
        "issue": round(1e9 * instructions / gpu.issued, 2),
    }


def main() -> None:
    """Every kernel for every SM."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows = [measured(pool, kernel, sm) for sm in SMS for pool, kernel in requests(sm)]
    for row in rows:
        if row["sm"] in GPUS and "per_key_and_head" in row:
            row["floors_ns"] = floors(row)
        print(json.dumps(row))


if __name__ == "__main__":
    main()
