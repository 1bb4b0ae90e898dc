"""Count what batch-invariant programs cost: instructions and bytes of a step, next to the usual program's.

    python -m benchmarks.programs.batch_invariance    # no GPU needed; writes benchmarks/results/batch-invariance.json

The programs are those of Llama-3.1-8B for an H100 (SM 90, bfloat16, safe tiles). A kernel's loop is counted in its
cubin as often as it runs, what is outside loops once per program. `issue_ms` is the time in which an H100 can issue
these instructions, `bytes_ms` the time in which it can move the bytes; tensor cores are counted apart. All three are
floors, none is a time that was measured.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import triton

from benchmarks.gpu.programs.models import LLAMA_8B, ProgramSpec, WeightForm
from benchmarks.gpu.programs.write import prepare
from benchmarks.paths import RESULTS
from benchmarks.programs.instructions import Compiled, issued_a_turn, weights_a_turn
from benchmarks.programs.sass import Sass, disassemble
from ingot.artifact.programs.launch_program import Kernel, Launch, LaunchProgram
from ingot.pipeline.targets.cuda.cubins import compile_kernels
from ingot.pipeline.targets.cuda.kernel_signatures import SIGNATURES
from ingot.sizes import ceil_div

SM, SMS, CLOCK, BYTES_PER_SECOND, FLOPS = 90, 132, 1.755e9, 3.35e12, 989e12  # H100 SXM: data sheet
ISSUED = SMS * 4 * CLOCK  # warp instructions a second
CONTEXT = 1024  # tokens of each sequence of a decode step
FORMS: tuple[WeightForm, ...] = ("int4", "16-bit")
BUCKETS = {1: "decode 1", 8: "decode 8", 64: "decode 64", 4096: "prefill 4096"}


@dataclass(frozen=True)
class Cost:
    """Warp instructions, bytes of memory, and operations of tensor cores, padding included."""

    instructions: float = 0.0
    bytes: float = 0.0
    flops: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.instructions + other.instructions, self.bytes + other.bytes, self.flops + other.flops)


def cost(program: LaunchProgram, launch: Launch, kernel: Kernel, counted: Sass) -> Cost:
    """The cost of one launch: of a decode step over CONTEXT tokens, or of a prompt of all rows."""
    constants: Mapping[str, int] = {key: int(one) for key, one in kernel.constants.items() if not isinstance(one, str)}
    blocks = launch.grid[0] * launch.grid[1] * launch.grid[2] * kernel.num_warps
    if kernel.name.startswith("matmul"):
        return _matmul(launch, kernel, counted, constants, blocks)
    if kernel.name.endswith("attention"):
        turns, rows = _turns(program, kernel.name, constants)
        keys = constants["TILE"] * constants["BLOCK_DIM"]
        tokens = CONTEXT * program.rows if is_decode(program) else program.rows  # keys of a prompt stay in the cache
        heads = constants.get("KV_HEADS") or launch.grid[1]
        return Cost(
            turns * heads * issued_a_turn(Compiled(kernel, counted, 0)),
            4.0 * tokens * heads * constants["DIM"],
            4.0 * turns * heads * rows * keys,
        )
    return Cost(float(blocks * len(counted.instructions)), 0.0, 0.0)


def _matmul(launch: Launch, kernel: Kernel, counted: Sass, constants: Mapping[str, int], blocks: int) -> Cost:
    n, columns, splits = constants["N"], constants["COLUMNS"], constants["SPLITS"]
    is_packed = kernel.name != "matmul"
    programs = launch.grid[1] if not is_packed else launch.grid[2]  # that share the columns of a tile
    tiles = blocks // kernel.num_warps // programs
    weight = n * columns * (constants.get("BITS", 4) / 8 if is_packed else 2)
    place = list(SIGNATURES[kernel.name].arguments).index("rows")
    given = launch.arguments[place]
    assert given.kind == "number"
    rows = given.value
    parts = 8.0 * programs * rows * n if splits > 1 else 4.0 * rows * n  # written and read
    multiplied = tiles * constants["TILE_ROWS"] * constants["TILE"] * columns
    made = Compiled(kernel, counted, 0)
    turns = multiplied / constants["TILE_ROWS"] / weights_a_turn(made)
    return Cost(turns * issued_a_turn(made), weight + parts, 2.0 * multiplied)


def _turns(program: LaunchProgram, name: str, constants: Mapping[str, int]) -> tuple[float, int]:
    """Turns of an attention kernel's loop for one KV head, and the rows of its tile."""
    if name == "decode_attention":
        return program.rows * ceil_div(CONTEXT, constants["TILE"]), constants["BLOCK_GROUP"]
    queries = constants["QUERIES"]
    if is_decode(program):
        return program.rows * ceil_div(CONTEXT, constants["TILE"]), queries * constants["BLOCK_GROUP"]
    ends = range(queries, program.rows + 1, queries)
    return sum(ceil_div(end, constants["TILE"]) for end in ends), queries * constants["BLOCK_GROUP"]


def is_decode(program: LaunchProgram) -> bool:
    """Whether the bucket has a sequence for every row."""
    return program.rows == program.sequences


def rows_of(weights: WeightForm, *, batch_invariant: bool) -> list[dict[str, object]]:
    """One row of the table per bucket."""
    with TemporaryDirectory() as folder:
        prepared = prepare(ProgramSpec(LLAMA_8B, weights, batch_invariant=batch_invariant), Path(folder))
    kernels = prepared.lowered.shared.kernels
    counted = {key: disassemble(cubin.code) for key, cubin in compile_kernels(kernels, SM).items()}
    found: list[dict[str, object]] = []
    for program in prepared.lowered.programs:
        if program.rows not in BUCKETS:
            continue
        launches = [one for one in program.launches if isinstance(one, Launch)]
        total = Cost()
        for one in launches:
            total += cost(program, one, kernels[one.kernel], counted[one.kernel])
        found.append(
            {
                "weights": weights,
                "step": BUCKETS[program.rows],
                "batch_invariant": batch_invariant,
                "launches": len(launches),
                "billion_instructions": round(total.instructions / 1e9, 3),
                "gigabytes": round(total.bytes / 1e9, 3),
                "issue_ms": round(total.instructions / ISSUED * 1e3, 2),
                "bytes_ms": round(total.bytes / BYTES_PER_SECOND * 1e3, 2),
                "tensor_core_ms": round(total.flops / FLOPS * 1e3, 2),
                "arena_mib": program.arena_bytes >> 20,
            }
        )
    return found


def main() -> None:
    """Count both programs of both forms of weights, print the rows, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=RESULTS / "batch-invariance.json")
    output = parser.parse_args().output
    rows = [row for weights in FORMS for flag in (False, True) for row in rows_of(weights, batch_invariant=flag)]
    for row in rows:
        print(" ".join(str(value) for value in row.values()))
    facts = {"sm": SM, "model": LLAMA_8B.name, "context": CONTEXT, "triton": triton.__version__}
    output.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
