"""Count the instructions of kernels in their cubins, and the floors of a step that follow. No GPU needed.

    python -m benchmarks.programs.instructions --as after       # adds to benchmarks/results/instructions.json
    python -m benchmarks.programs.instructions --only matmul --sm 80 --dry    # prints, writes nothing

The kernels are those of Llama-3.1-8B's program, int4 in groups of 128, bfloat16, safe tiles. A row is one kernel of one
SM: thread instructions of its main loop for each unit of work (for a matmul a weight, for attention a key of a KV head,
with all queries of the program), registers, spilled bytes, shared memory, loads in the loop by width, pipeline depth
(stages asked for, and groups of copies in flight). The file keeps rows and floors under the name given by --as, so that
a change is shown next to what was before it.

Floors are milliseconds of all matmuls of a step: `issue` to issue their instructions, `bytes` to read their weights
from memory, `tensor` for the multiplications, padding included. Those of attention are of one prompt. None is a
measured time.

To count another kernel: write a function of an SM that yields `Counted`, and add it to COUNTED.
"""

import argparse
import json
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import triton

from benchmarks.gpu.programs.models import LLAMA_8B, KVForm, ProgramSpec
from benchmarks.gpu.programs.write import prepare
from benchmarks.gpu.proofs.ladder import all_warps_alike
from benchmarks.paths import RESULTS, ROOT
from benchmarks.programs.sass import Loop, Sass, disassemble
from ingot.artifact.programs.launch_program import Kernel, Launch, LaunchProgram
from ingot.pipeline.targets.cuda.cubins import compile_kernels
from ingot.pipeline.targets.cuda.kernel_signatures import SIGNATURES
from ingot.pipeline.targets.cuda.lowering import LoweredLaunches
from ingot.pipeline.targets.cuda.tiles import span_columns
from ingot.sizes import ceil_div

COUNTED_SMS = (80, 90)
KV_FORMS: tuple[KVForm, ...] = ("16-bit", "int8", "int4")
BUCKETS = {1: "decode 1", 8: "decode 8", 64: "decode 64", 512: "prefill 512", 4096: "prefill 4096"}


_OF_PROMPTS = ("ragged_attention", "prefill_attention")
_WIDE = "matmul_int4_wide"
_ALIKE = " with all warps alike"
_ROLE_WARPS = 4
_ROLE_ROWS = 64  # prefill_attention's groups have one wgmma's rows
_POWERS_A_CLOCK = 16


@dataclass(frozen=True)
class Gpu:
    """Data sheet: multiprocessors, clock in Hz, bytes a second, 16-bit operations a second of tensor cores."""

    name: str
    multiprocessors: int
    clock: float
    bytes_per_second: float
    flops: float

    @property
    def issued(self) -> float:
        """Warp instructions a second."""
        return self.multiprocessors * 4 * self.clock


GPUS = {
    80: Gpu("A100 SXM 80 GB", 108, 1.41e9, 2.039e12, 312e12),
    90: Gpu("H100 SXM", 132, 1.755e9, 3.35e12, 989e12),
}


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel and what is in it."""

    kernel: Kernel
    sass: Sass
    shared_bytes: int


@dataclass(frozen=True)
class Counted:
    """A kernel of one SM. `per_unit` are thread instructions of the main loop for each unit of work."""

    kernel: str
    form: str
    sm: int
    unit: str
    per_unit: float
    registers: int
    spilled_bytes: int
    shared_bytes: int
    barriers: int
    loads: Mapping[str, int]
    stages: int
    in_flight: int
    warps: int
    loop: int

    @classmethod
    def of(cls, made: Compiled, form: str, sm: int, unit: str, units: float) -> "Counted":
        """Fill in a row; `units` is the work of one turn of the cubin's main loop, of all warps of a program."""
        kernel, sass = made.kernel, made.sass
        return cls(
            kernel=kernel.name,
            form=form,
            sm=sm,
            unit=unit,
            per_unit=round(len(sass.main) * kernel.num_warps * 32 / units, 2),
            registers=sass.registers,
            spilled_bytes=sass.spilled_bytes,
            shared_bytes=made.shared_bytes,
            barriers=sass.main.barriers,
            loads=sass.main.loads,
            stages=kernel.num_stages,
            in_flight=sass.main.in_flight,
            warps=kernel.num_warps,
            loop=len(sass.main),
        )


@dataclass(frozen=True)
class CountedProgram:
    """A lowered program of one SM, and its kernels whose names begin with a prefix, compiled."""

    sm: int
    lowered: LoweredLaunches
    compiled: Mapping[str, Compiled]

    def launches(self) -> Iterator[tuple[LaunchProgram, Launch, Compiled, int]]:
        """Launches of compiled kernels in BUCKETS, and how often a step of the whole model has them."""
        for program in self.lowered.programs:
            for launch in program.launches if program.rows in BUCKETS else ():
                if isinstance(launch, Launch) and launch.kernel in self.compiled:
                    times = LLAMA_8B.num_layers if "layers." in launch.node else 1
                    yield program, launch, self.compiled[launch.kernel], times


@cache
def counted_program(sm: int, prefixes: tuple[str, ...], kv: KVForm = "16-bit") -> CountedProgram:
    """Lower Llama-3.1-8B for an SM, with one layer, as all are equal; compile kernels whose names have a prefix."""
    spec = ProgramSpec(replace(LLAMA_8B, num_layers=1), "int4", kv)
    with TemporaryDirectory() as folder:
        lowered = prepare(spec, Path(folder), target=f"cuda-sm{sm}").lowered
    wanted = {key: kernel for key, kernel in lowered.shared.kernels.items() if kernel.name.startswith(prefixes)}
    special = {key: kernel for key, kernel in wanted.items() if kernel.name == "prefill_attention"}
    wanted |= {f"{key}{_ALIKE}": all_warps_alike(kernel) for key, kernel in special.items()}  # to compare with
    cubins = compile_kernels(wanted, sm)
    compiled = {
        key: Compiled(kernel, disassemble(cubins[key].code), cubins[key].facts.shared_bytes)
        for key, kernel in wanted.items()
    }
    return CountedProgram(sm, lowered, compiled)


def matmuls(sm: int) -> Iterator[Counted]:
    """Matmuls and the dequantization before one; a unit is a weight."""
    seen = set[str]()
    for program, launch, made, _ in counted_program(sm, ("matmul", "dequantize")).launches():
        if launch.kernel in seen:
            continue
        seen.add(launch.kernel)
        form = f"{BUCKETS[program.rows]}, {launch.node.removeprefix('model.')}, {_tile(made.kernel)}"
        yield _counted(made, form, sm, "weight", weights_a_turn(made))


def weights_a_turn(made: Compiled) -> float:
    """Weights that a program multiplies, or dequantizes, in one turn of the cubin's main loop."""
    constants = made.kernel.constants
    if made.kernel.name == _WIDE:
        return float(int(constants["TILE"]) * span_columns(4))
    if not made.sass.main.multiplications:
        return float(int(constants["TILE"]) * (span_columns(_bits(made.kernel)) if "SPANS" in constants else 1))
    return made.sass.main.multiplications * made.kernel.num_warps / int(constants["TILE_ROWS"])


def issued_a_turn(made: Compiled) -> int:
    """Warp instructions of all warps of a program in one turn of the cubin's main loop.

    Where warps have roles, those of the shortest way through a turn: one of no masks.
    """
    if loops := _loops_of_roles(made):
        return sum(loop.shortest for loop in loops) * _ROLE_WARPS
    return len(made.sass.main) * made.kernel.num_warps


def _loops_of_roles(made: Compiled) -> list[Loop]:
    """The loops of a kernel whose warps compute in two groups or copy; none of other kernels."""
    constants, name = made.kernel.constants, made.kernel.name
    if name == _WIDE:
        turn = int(constants["TILE"]) // 2 * span_columns(4) * int(constants["TILE_ROWS"]) // _ROLE_WARPS
        return loops_of_roles(made.sass, turn, "STS")
    if name == "prefill_attention":
        turn = 2 * _ROLE_ROWS * int(constants["TILE"]) * int(constants["DIM"]) // _ROLE_WARPS
        return loops_of_roles(made.sass, turn, "LDGSTS")
    return []


def _tile(kernel: Kernel) -> str:
    constants = kernel.constants
    rows = f"{constants['TILE_ROWS']} x " if "TILE_ROWS" in constants else ""
    return f"{_bits(kernel)} bits, tile {rows}{constants['TILE']}"


def _bits(kernel: Kernel) -> int:
    """Bits of a stored weight."""
    return int(kernel.constants.get("BITS", 16 if kernel.name == "matmul" else 4))


def floors(sm: int) -> list[dict[str, object]]:
    """Floors of all matmuls of a step, by bucket, in milliseconds."""
    totals = {name: {"issue": 0.0, "bytes": 0.0, "tensor": 0.0} for name in BUCKETS.values()}
    gpu = GPUS[sm]
    for program, launch, made, times in counted_program(sm, ("matmul", "dequantize")).launches():
        total, constants = totals[BUCKETS[program.rows]], made.kernel.constants
        columns, n = int(constants["COLUMNS"]), int(constants["N"])
        blocks = launch.grid[0] * launch.grid[1] * launch.grid[2]
        issued, weight_bytes, flops = 0.0, 0.0, 0.0
        if made.kernel.name == "dequantize_nbits":
            issued = blocks * len(made.sass.instructions) * made.kernel.num_warps
            weight_bytes = _number(launch, "count") * columns * int(constants["BITS"]) / 8
        else:
            tile_rows = int(constants["TILE_ROWS"])
            row_tiles = ceil_div(int(_number(launch, "rows")), tile_rows)
            padded = ceil_div(n, int(constants["TILE"])) * int(constants["TILE"]) * columns * row_tiles
            turns = padded / weights_a_turn(made)
            outside = blocks * made.sass.outside * made.kernel.num_warps
            issued = turns * issued_a_turn(made) + outside
            weight_bytes = n * columns * _bits(made.kernel) / 8 if made.kernel.name != "matmul" else 0.0
            flops = 2.0 * padded * tile_rows
        total["issue"] += times * issued / gpu.issued * 1e3
        total["bytes"] += times * weight_bytes / gpu.bytes_per_second * 1e3
        total["tensor"] += times * flops / gpu.flops * 1e3
    return [
        {"sm": sm, "step": step, **{f"{name}_ms": round(value, 2) for name, value in total.items()}}
        for step, total in totals.items()
    ]


def _number(launch: Launch, name: str) -> float:
    kernel = launch.kernel.rsplit("-", 1)[0]
    argument = launch.arguments[SIGNATURES[kernel].index(name)]
    assert argument.kind == "number"
    return argument.value


def attention(sm: int) -> Iterator[Counted]:
    """Attention of decode steps and of prompts, by precision of the pool."""
    for kv in KV_FORMS:
        for made in counted_program(sm, ("decode_attention", *_OF_PROMPTS), kv).compiled.values():
            constants = made.kernel.constants
            rows = int(constants["BLOCK_GROUP"]) * int(constants.get("QUERIES", 1))
            form = f"{kv} pool, {rows} rows, {constants['TILE']} keys a tile"
            if made.kernel.name == "prefill_attention":
                yield _counted(made, form, sm, "key", int(constants["TILE"]))
                continue
            done = made.sass.main.multiplications * made.kernel.num_warps
            keys = done / (2 * rows * int(constants["BLOCK_DIM"]))
            yield Counted.of(made, form, sm, "key", keys)


def _counted(made: Compiled, form: str, sm: int, unit: str, units: float) -> Counted:
    """A row; where warps have roles, of the loop of one group that computes and of the warps that copy."""
    row, loops = Counted.of(made, form, sm, unit, units), _loops_of_roles(made)
    if not loops:
        return row
    return replace(
        row,
        per_unit=round(issued_a_turn(made) * 32 / units, 2),
        barriers=loops[0].barriers,
        loads=dict(sorted((Counter(loops[0].loads) + Counter(loops[-1].loads)).items())),
        loop=loops[0].shortest,
    )


def loops_of_roles(sass: Sass, turn: int, copy: str) -> list[Loop]:
    """The loops of both groups that compute, with `turn` multiplications, and of the warps that copy."""
    loops = [loop for loop in sass.loops if loop.shortest]
    computing = [loop for loop in loops if loop.multiplications == turn]
    copying = [loop for loop in loops if copy in loop.counts and not loop.multiplications]
    return [*sorted(computing, key=len)[:2], min(copying, key=len)]


def attention_floors(sm: int) -> list[dict[str, object]]:
    """Floors of attention over a prompt in an empty cache, all layers, in milliseconds; masked tiles count as others.

    `powers` is the time of the units that compute powers of 2, 16 a clock and multiprocessor.
    """
    gpu, found = GPUS[sm], list[dict[str, object]]()
    counted = counted_program(sm, _OF_PROMPTS)
    alike = [(program, launch, counted.compiled.get(f"{launch.kernel}{_ALIKE}"), times)
             for program, launch, _, times in counted.launches()]  # fmt: skip
    for program, launch, made, times in (*counted.launches(), *alike):
        if made is None:
            continue
        constants, kernel = made.kernel.constants, made.kernel
        tile, queries = int(constants["TILE"]), int(constants["QUERIES"])
        ends = range(queries, program.rows + 1, queries)
        turns = sum(ceil_div(end, tile) for end in ends) * launch.grid[1] * times
        scores = turns * queries * int(constants["BLOCK_GROUP"]) * tile
        if kernel.name == "prefill_attention":
            issued = issued_a_turn(made)
        else:
            done = made.sass.main.multiplications * kernel.num_warps
            issued = len(made.sass.main) * kernel.num_warps * scores // turns * int(constants["DIM"]) * 2 // done
        powers = scores / (gpu.multiprocessors * _POWERS_A_CLOCK * gpu.clock)
        seconds = {
            "issue": turns * issued / gpu.issued,
            "tensor": 4.0 * scores * int(constants["DIM"]) / gpu.flops,
            "powers": powers,
        }
        milliseconds = {f"{name}_ms": round(value * 1e3, 3) for name, value in seconds.items()}
        found.append({"sm": sm, "kernel": kernel.name, "step": BUCKETS[program.rows], **milliseconds})
    return found


def sampling(sm: int) -> Iterator[Counted]:
    """The kernels that choose tokens; a unit is a logit in one pass over a row."""
    for made in counted_program(sm, ("greedy", "bin_logits", "draw")).compiled.values():
        yield Counted.of(
            made, f"{made.kernel.constants['VOCABULARY']} tokens", sm, "logit", int(made.kernel.constants["BLOCK"])
        )


COUNTED: Mapping[str, Callable[[int], Iterator[Counted]]] = {
    "attention": attention,
    "matmul": matmuls,
    "sampling": sampling,
}


def _printed(row: Counted) -> str:
    loads = " ".join(f"{count}x{kind}" for kind, count in row.loads.items())
    return (
        f"SM {row.sm} {row.kernel} ({row.form}): {row.per_unit} a {row.unit}, {row.registers} registers, "
        f"{row.spilled_bytes} spilled, {row.shared_bytes} shared, {row.barriers} barriers, {row.stages} stages, "
        f"{row.in_flight} in flight, {loads}"
    )


def main() -> None:
    """Count, print, and add to the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--as", dest="name", default="after", help="name of the rows in the file")
    parser.add_argument("--only", choices=sorted(COUNTED), nargs="+", default=sorted(COUNTED))
    parser.add_argument("--sm", type=int, choices=COUNTED_SMS, nargs="+", default=list(COUNTED_SMS))
    parser.add_argument("--dry", action="store_true", help="do not write the file")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS / "instructions.json")
    given = parser.parse_args()
    rows = {kind: [row for sm in given.sm for row in COUNTED[kind](sm)] for kind in given.only}
    for counted in rows.values():
        print("\n".join(map(_printed, counted)))
    found: dict[str, object] = {kind: [asdict(row) for row in counted] for kind, counted in rows.items()}
    if "matmul" in given.only:
        steps = [row for sm in given.sm for row in floors(sm)]
        found["matmul floors"] = steps
        print("\n".join(map(str, steps)))
    if "attention" in given.only:
        steps = [row for sm in given.sm for row in attention_floors(sm)]
        found["attention floors"] = steps
        print("\n".join(map(str, steps)))
    if not given.dry:
        _add(given.output, given.name, found)


def _add(file: Path, name: str, found: Mapping[str, object]) -> None:
    """Replace what was counted again; keep other kernels and other names."""
    content: dict[str, Any] = {"model": LLAMA_8B.name, "counts": {}}
    if file.exists():
        content = json.loads(file.read_text("utf-8"))
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()
    content["triton"] = triton.__version__
    content["gpus"] = {str(sm): asdict(gpu) for sm, gpu in GPUS.items()}
    kept = content["counts"].setdefault(name, {})
    kept |= {key: {"commit": commit, "rows": rows} for key, rows in found.items()}
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
