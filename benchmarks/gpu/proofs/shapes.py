"""Every packed kernel in its real shape and tile, on random operands, against torch in float32.

    program ─► its launches, one per kernel, grid and numbers ─► random operands ─► kernel ─► compare with references.py

Each launch is a task of its own, and its operands do not depend on other launches: one that fails or loses the context
leaves the others as they are. What a launch writes is filled with NaN first. For a kernel that is wrong, the part
"ladder" tries its packed variants (ladder.py).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
from tests.kernels.torch_types import TORCH_TYPES

from benchmarks.gpu.device import Bench, SyntheticExecutor
from benchmarks.gpu.parts import Record, Task
from benchmarks.gpu.programs.packing import read_program
from benchmarks.gpu.proofs.expert_references import EXPERTS, fill_experts
from benchmarks.gpu.proofs.latent_references import LATENTS, fill_latent_scales
from benchmarks.gpu.proofs.operands import Operands, block_error
from benchmarks.gpu.proofs.recording import Bound, RecordingDevice
from benchmarks.gpu.proofs.recurrence_references import RECURRENCES, fill_recurrence
from benchmarks.gpu.proofs.references import REFERENCES, binned
from benchmarks.gpu.times.launches import pairs_in
from benchmarks.gpu.times.steps import open_program, program_files, step_batch
from ingot.artifact.programs.launch_program import BufferArgument, Kernel, Launch, LaunchProgram, WeightArgument
from ingot.errors import UsageError
from ingot.kernels.kv_precision import FLOAT
from ingot.pipeline.targets.cuda.kernel_signatures import SIGNATURES
from ingot.runtime.cuda.driver.device import Device, LoadedKernel
from ingot.runtime.cuda.programs import BoundProgram

# Of any 16 x 16 block, relative to it: rounding of the activations' type, and of sums of rounded factors.
LIMITS: Mapping[str, float] = {"fp32": 2e-3, "fp16": 6e-3, "bf16": 3e-2}
_SECONDS_A_LAUNCH = 30.0
Variant = tuple[LoadedKernel, tuple[int, int, int]]  # and its grid
_OUTPUTS = ("out", "sum_out", "q_out", "tokens", "sums", "weights", "counts", "masses")
_FP8_EXPONENT = 0xBF  # clears the highest bit of the exponent: numbers of e4m3fn below 2, and no NaN


@dataclass(frozen=True)
class Place:
    """A launch of a packed program: its bucket, and its number among body, head and sampling kernels."""

    file: Path
    bucket: str
    number: int
    launch: Launch
    kernel: Kernel

    @property
    def name(self) -> str:
        """matmul_nbits layers.0.qkv of llama-3.1-8b-int4-kv-16-bit decode-1 launch 3"""
        return f"{self.kernel.name} {self.launch.node} of {self.file.stem} {self.bucket} launch {self.number}"


def shapes(bench: Bench) -> list[Task]:
    """One task per distinct launch of all programs."""
    opened = OpenedLaunches(bench)
    return [Task(place.name, partial(_checked, opened, place), _SECONDS_A_LAUNCH) for place in places(bench.programs)]


def places(folder: Path) -> list[Place]:
    """The distinct launches of all packed programs: kernel, grid and numbers."""
    found: dict[object, Place] = {}
    for file in program_files(folder, invariant=True):
        program = read_program(file)
        for bucket in program.programs:
            samplers = (step for steps in bucket.samplers.values() for step in steps)
            for number, step in enumerate((*bucket.launches, *samplers)):
                if isinstance(step, Launch):
                    kernel = program.kernels[step.kernel]
                    key = (kernel.model_dump_json(), step.grid, _numbers(step))
                    found.setdefault(key, Place(file, bucket.name, number, step, kernel))
    return list(found.values())


def _numbers(launch: Launch) -> tuple[float, ...]:
    return tuple(argument.value for argument in launch.arguments if argument.kind == "number")


def _checked(opened: "OpenedLaunches", place: Place) -> Iterator[Record]:
    bound, program = opened.bound(place)
    for record in opened.compare(bound, place, program):
        yield {"figure": "shape", **record}


@dataclass
class OpenedLaunches:
    """The program whose launches are compared, opened when it is first needed."""

    bench: Bench
    file: Path | None = None
    executor: SyntheticExecutor | None = None
    recording: RecordingDevice | None = None

    def bound(self, place: Place) -> tuple[Bound, BoundProgram]:
        """The launch as the runtime binds it, its bucket's inputs sent."""
        executor = self._executor(place.file)
        assert self.recording is not None
        program = executor.program(place.bucket)
        samplers = [step for steps in program.samplers.values() for step in steps]
        _, queue = [*program.calls, *samplers][place.number]
        executor.send(program, step_batch(executor, program)[0])
        executor.loaded.device.synchronize("sending a step's inputs")
        return self.recording.by_queue[queue], program

    def _executor(self, file: Path) -> SyntheticExecutor:
        if self.executor is None or self.file != file:
            if self.executor is not None:
                self.executor.close()
                self.executor = None
            self.bench.machine.release()  # random operands of the last program, which torch keeps
            self.recording = RecordingDevice(self.bench.machine.open())
            self.executor, self.file = open_program(self.bench, file, cast(Device, self.recording)), file
        return self.executor

    @property
    def device(self) -> Device:
        """The open program's device."""
        assert self.executor is not None
        return self.executor.loaded.device

    def compare(
        self, bound: Bound, place: Place, program: BoundProgram, other: Variant | None = None
    ) -> Iterator[Record]:
        """Fill the operands, launch the kernel or a variant of it, and compare every output."""
        assert self.executor is not None
        device, stream = self.executor.loaded.device, self.executor.loaded.stream
        alias = partial(self.bench.machine.alias, device)
        of = Operands(bound, alias, program.program.sequences)
        if bound.kernel.name not in REFERENCES:
            raise UsageError(f"the kernel {bound.kernel.name} has no reference in benchmarks/gpu/proofs/references.py")
        _fill(of, place.launch, program.program, self.executor)
        outputs = REFERENCES[bound.kernel.name](of)
        for output in outputs:
            if output.memory is not None:
                output.memory.fill_(torch.nan if output.memory.is_floating_point() else -7)
        self.bench.machine.synchronize()
        loaded, grid = other or (bound.loaded, bound.grid)
        device.bind(loaded, grid, bound.arguments, bound.node)(stream)
        device.synchronize(f"{bound.kernel.name} of {bound.node}")
        for output in outputs:
            error = block_error(output.found(), output.expected)
            limit = LIMITS[_type_of(bound.kernel)] if output.limit is None else output.limit
            facts = {"kernel": bound.kernel.name, "node": bound.node, "grid": list(grid)}
            shape = list(output.expected.shape)
            measured = {"shape": shape, "error": error, "limit": limit, "within": error <= limit}
            yield {**facts, "argument": output.name, **measured}


def _type_of(kernel: Kernel) -> str:
    """The lowest precision among the kernel's arguments."""
    kinds = {kind.removeprefix("*") for kind in kernel.types} | {str(kernel.constants.get("DTYPE"))}
    return next((kind for kind in ("bf16", "fp16") if kind in kinds), "fp32")


def _fill(of: Operands, launch: Launch, program: LaunchProgram, executor: SyntheticExecutor) -> None:
    """Random numbers in everything that the launch reads and that neither weights nor a step's inputs fill."""
    torch.manual_seed(0)
    names = SIGNATURES[of.bound.kernel.name].arguments
    for name, argument in zip(names, launch.arguments, strict=True):
        if not isinstance(argument, BufferArgument):
            continue
        if argument.name in program.places and name not in _OUTPUTS:
            size = program.places[argument.name].bytes // TORCH_TYPES[argument.type].itemsize - argument.offset
            _random(of.view(name, (size,)))
        elif argument.name == "kv_pool":
            _fill_pool(of, executor)
    if of.bound.kernel.name == "join_fixed_splits":
        _fill_partials(of)
    elif of.bound.kernel.name in ("greedy", "bin_logits", "draw"):
        _fill_sampling(of)
    elif of.bound.kernel.name in EXPERTS:
        fill_experts(of, *_pairs_and_experts(of, launch, program, executor))
    elif of.bound.kernel.name in RECURRENCES:
        fill_recurrence(of)
    elif of.constants.get("CARRIES"):
        rows = of.bound.grid[0]
        of.view("carried", (rows,)).random_(-1, program.logits_rows)
        of.view("tokens", (program.logits_rows,)).random_(-1, int(of.view("indices", (rows,)).max()) + 1)


def _pairs_and_experts(
    of: Operands, launch: Launch, program: LaunchProgram, executor: SyntheticExecutor
) -> tuple[int, int]:
    """Pairs that the launch's buffers hold, and experts of its weights."""
    given = dict(zip(SIGNATURES[of.bound.kernel.name].arguments, launch.arguments, strict=True))
    held, weight = (
        given.get("pairs", given["ids" if "ids" in given else "pairs"]),
        given.get("codes", given.get("weight")),
    )
    experts = executor.weights[weight.name]["shape"][0] if isinstance(weight, WeightArgument) else 1
    return pairs_in(program, held), int(experts)


def _random(memory: torch.Tensor) -> None:
    if memory.is_floating_point() and memory.dtype.itemsize > 1:
        memory.normal_()
    elif not memory.is_floating_point():
        memory.random_(0, 8)


def _fill_pool(of: Operands, executor: SyntheticExecutor) -> None:
    """Vectors of random numbers in every block, and scales around 1 / 50."""
    kind, kv, pool = of.size("KIND"), executor.kv_geometry, executor.loaded.pool
    whole = of.alias(pool.address, pool.num_blocks * kv.block_bytes)
    if kind == FLOAT.value:
        whole.view(of.view("pool", (1,)).dtype).normal_()
        return
    whole.random_(0, 256)
    whole.bitwise_and_(_FP8_EXPONENT)
    if of.bound.kernel.name in LATENTS:
        fill_latent_scales(of, pool.num_blocks)
        return
    heads = kv.uniform("a GPU's attention kernel").num_kv_heads
    tokens = of.size("BLOCK_TOKENS")
    strides = (of.whole("scale_block_stride"), of.whole("scale_value_offset"), tokens, 1)
    of.view("scales", (pool.num_blocks, 2, heads, tokens), strides).uniform_(0.01, 0.03)


def _fill_partials(of: Operands) -> None:
    """Partial softmaxes: positive sums, and largest scores that are whole numbers."""
    rows, heads, _ = of.bound.grid
    count = of.size("SPLITS")
    of.view("sums", (rows, heads, count, of.size("DIM"))).normal_()
    weights = of.view("weights", (rows, heads, count, 2))
    weights[..., 0].random_(-3, 4)
    weights[..., 1].uniform_(1, 9)


def _fill_sampling(of: Operands) -> None:
    """Random logits, and what the launches before this one store of them."""
    rows, name = of.bound.grid[0], of.bound.kernel.name
    logits = of.rows("logits", rows, of.size("VOCABULARY"), "stride").normal_(std=3)
    if name == "greedy":
        return
    largest, tokens = logits.max(-1)
    of.view("tokens", (rows,)).copy_(tokens)
    of.view("facts", (rows, 2)).copy_(torch.stack([largest, logits.mean(-1)], -1))
    of.view("temperatures", (rows,)).uniform_(0.5, 1.5)
    if name == "draw":
        of.view("top_ks", (rows,)).random_(0, 50)
        of.view("top_ps", (rows,)).uniform_(0.3, 1)
        of.view("uniforms", (rows,)).uniform_(0, 1)
        counts, masses = binned(of)
        of.view("counts", counts.shape).copy_(counts)
        of.view("masses", masses.shape).copy_(masses)
