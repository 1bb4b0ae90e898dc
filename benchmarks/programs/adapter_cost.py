"""Count what LoRA adapters cost on a GPU: launches, instructions and bytes of a step with them, next to one without.

    python -m benchmarks.programs.adapter_cost    # no GPU needed; writes benchmarks/results/adapter-cost.json

The program is that of Llama-3.1-8B, int4, for an H100 (SM 90, bfloat16, safe tiles). Every projection of a layer has an
adapter of rank 16, and the rows of a step are divided among 8 adapters or as many as there are rows. `issue_us` and
`bytes_us` are floors of what adapters add, by the H100's data sheet: to issue the instructions, and to read the
matrices from memory once. Other bytes, rows and partial sums, are in the L2 cache; they count as often as programs read
or write them. Programs without a unit end at once and are not counted. None is a time that was measured.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import triton

from benchmarks.gpu.programs.models import LLAMA_8B, ProgramSpec
from benchmarks.gpu.programs.write import prepare
from benchmarks.paths import RESULTS
from benchmarks.programs.batch_invariance import BUCKETS, BYTES_PER_SECOND, ISSUED, SM
from benchmarks.programs.sass import Sass, disassemble
from ingot.artifact.programs.launch_program import Kernel, Launch, LaunchProgram
from ingot.pipeline.targets.cuda.cubins import compile_kernels
from ingot.pipeline.targets.cuda.kernel_signatures import signature
from ingot.sizes import ceil_div

ADAPTERS, RANK = 8, 16
_HALF, _FLOAT = 2, 4  # bytes


@dataclass(frozen=True)
class Added:
    """The cost of launches of adapters in a step: warp instructions, bytes of matrices and of everything else."""

    instructions: float = 0.0
    matrices: float = 0.0
    others: float = 0.0

    def __add__(self, other: "Added") -> "Added":
        return Added(self.instructions + other.instructions, self.matrices + other.matrices, self.others + other.others)


def added(program: LaunchProgram, launch: Launch, kernel: Kernel, counted: Sass, ranks: int) -> Added:
    """Return what one launch adds. `ranks` of its layer: of all its projections."""
    numbers = {
        name: int(one.value)
        for name, one in zip(signature(kernel.name).arguments, launch.arguments, strict=True)
        if one.kind == "number"
    }
    constants = {key: int(one) for key, one in kernel.constants.items() if not isinstance(one, str)}
    adapters, rows = min(ADAPTERS, program.sequences, program.rows), program.rows
    units = adapters * ceil_div(ceil_div(rows, adapters), constants["TILE_ROWS"])
    blocks = min(launch.grid[0], units) * launch.grid[1]
    if kernel.name == "low_rank_shrink":
        steps = (
            ceil_div(numbers["columns"], constants["TILE_COLUMNS"]) * units * ceil_div(ranks, constants["TILE_RANKS"])
        )
        matrices = adapters * ranks * numbers["columns"] * _HALF
        others = rows * (numbers["columns"] * _HALF + constants["SPLITS"] * ranks * _FLOAT)
    else:
        tiles = ceil_div(numbers["outputs"], constants["TILE"])
        times = rows if constants["BY_ROW"] else units
        steps = times * tiles * ceil_div(RANK, constants["TILE_RANKS"])
        matrices = adapters * RANK * numbers["outputs"] * _HALF
        width = 2 * (_FLOAT if "*fp32" in kernel.types[6:7] else _HALF)  # read and written
        others = rows * numbers["outputs"] * width + tiles * rows * constants["SPLITS"] * RANK * _FLOAT
    instructions = steps * len(counted.main) + blocks * len(counted.instructions)
    return Added(kernel.num_warps * instructions, matrices, others)


def rows_of_table() -> Iterator[dict[str, object]]:
    """One row per bucket."""
    with TemporaryDirectory() as folder:
        lowered = prepare(ProgramSpec(LLAMA_8B, "int4", adapters=True), Path(folder)).lowered
    assert lowered.adapters is not None
    kernels = {key: one for key, one in lowered.shared.kernels.items() if one.name.startswith("low_rank")}
    counted = {key: disassemble(cubin.code) for key, cubin in compile_kernels(kernels, SM).items()}
    projections = lowered.adapters.projections
    for usual, program in zip(lowered.programs, lowered.adapters.programs, strict=True):
        if program.rows not in BUCKETS:
            continue
        total = Added()
        for step in program.launches:
            if isinstance(step, Launch) and step.kernel in kernels:
                ranks = RANK * sum(one.node == step.node for one in projections)
                total += added(program, step, kernels[step.kernel], counted[step.kernel], ranks)
        yield {
            "step": BUCKETS[program.rows],
            "adapters": min(ADAPTERS, program.sequences, program.rows),
            "launches_without": len(usual.launches),
            "launches_with": len(program.launches),
            "million_instructions": round(total.instructions / 1e6, 1),
            "matrices_megabytes": round(total.matrices / 1e6, 1),
            "other_megabytes": round(total.others / 1e6, 1),
            "issue_us": round(total.instructions / ISSUED * 1e6),
            "bytes_us": round(total.matrices / BYTES_PER_SECOND * 1e6),
        }


def main() -> None:
    """Count, print the rows, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=RESULTS / "adapter-cost.json")
    output = parser.parse_args().output
    rows = [*rows_of_table()]
    for row in rows:
        print(" ".join(str(value) for value in row.values()))
    facts = {"sm": SM, "model": LLAMA_8B.name, "rank": RANK, "triton": triton.__version__}
    output.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
