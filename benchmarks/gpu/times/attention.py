"""Measure attention kernels in other tiles, warps and stages than the lowering chooses.

Not part of the default run, because it needs Triton's compiler on the GPU's machine. The launches are those of the
packed programs, with kernels that differ in these constants alone; all layers are timed in turn.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np

from benchmarks.gpu.device import Bench, SyntheticExecutor, decode_batch, prefill_batch
from benchmarks.gpu.parts import Record, Task
from benchmarks.gpu.proofs.ladder import all_warps_alike
from benchmarks.gpu.proofs.recording import Bound, RecordingDevice
from benchmarks.gpu.times.steps import open_program, program_files
from ingot.artifact.programs.launch_program import Kernel
from ingot.errors import EngineError
from ingot.kernels.kv_precision import INT4
from ingot.pipeline.targets.cuda.cubins import Cubin, compile_kernels
from ingot.runtime.cuda.driver.device import Device, Queue, Stream
from ingot.sizes import ceil_div

_SECONDS_A_PROGRAM = 45.0
_OF_PROMPTS = ("ragged_attention", "prefill_attention")
_TILES, _WARPS, _STAGES, _QUERIES = (16, 32, 64, 128), (2, 4, 8), (2, 3, 4), (8, 16, 32)


def attention(bench: Bench) -> list[Task]:
    """Decode over a full and a short context and the largest prefill, for every KV precision."""
    files = (file for file in program_files(bench.programs) if file.stem.startswith("llama-3.1-8b-int4"))
    return [Task(file.stem, partial(_of_program, bench, file), 120.0, _SECONDS_A_PROGRAM) for file in files]


def _of_program(bench: Bench, file: Path) -> Iterator[Record]:
    for record in variants(bench, file):
        yield {"figure": "attention variant", "program": file.stem, **record}


def variants(bench: Bench, file: Path) -> Iterator[Record]:
    """Of one packed program."""
    recording = RecordingDevice(bench.machine.open())
    executor = open_program(bench, file, cast(Device, recording))
    context, block = executor.model.context_tokens, executor.kv_geometry.block_tokens
    try:
        decode = executor.program("decode-1")
        for length in (context // 16, context):
            executor.send(decode, decode_batch(1, length, block))
            executor.step(decode, "body")(executor.loaded.stream)
            for record in _variants(bench, executor, recording, ("decode_attention",), decode_kernels):
                yield {"context": length, **record}
        prefill = max(executor.loaded.programs, key=lambda one: one.program.rows)
        rows = prefill.program.rows
        executor.send(prefill, prefill_batch(rows, block))
        executor.step(prefill, "body")(executor.loaded.stream)
        for record in _variants(bench, executor, recording, _OF_PROMPTS, ragged_kernels):
            yield {"context": rows, **record}
    finally:
        executor.close()


def decode_kernels(kernel: Kernel) -> Iterator[tuple[str, Kernel]]:
    """Tiles, warps and stages for decode; a tile of keys in 4 bits has 32 tokens at least (require_whole_fragments)."""
    tiles = _TILES[1:] if kernel.constants["KIND"] == INT4.value else _TILES
    for tile, warps, stages in itertools.product(tiles, _WARPS, _STAGES):
        yield f"{tile} {warps} {stages}", with_options(kernel, {"TILE": tile}, warps, stages)


def ragged_kernels(kernel: Kernel) -> Iterator[tuple[str, Kernel]]:
    """Tiles, queries per program, warps and stages for prefill; of prefill_attention those of ragged_attention."""
    if kernel.name == "prefill_attention":
        kernel = all_warps_alike(kernel)
    for tile, queries, warps, stages in itertools.product(_TILES[1:], _QUERIES, _WARPS[1:], _STAGES[:2]):
        yield (
            f"{tile} {queries} {warps} {stages}",
            with_options(kernel, {"TILE": tile, "QUERIES": queries}, warps, stages),
        )


def with_options(
    kernel: Kernel, constants: Mapping[str, int], warps: int | None = None, stages: int | None = None
) -> Kernel:
    """The kernel with other constants."""
    changed: dict[str, object] = {"constants": {**kernel.constants, **constants}}
    changed |= {"num_warps": warps or kernel.num_warps, "num_stages": stages or kernel.num_stages}
    return kernel.model_copy(update=changed)


def _variants(
    bench: Bench,
    executor: SyntheticExecutor,
    recording: RecordingDevice,
    names: tuple[str, ...],
    made: Callable[[Kernel], Iterator[tuple[str, Kernel]]],
) -> Iterator[Record]:
    """Seconds per layer of attention in every variant, and with the program's own constants."""
    launches = [one for one in recording.bound if one.kernel.name in names]
    sizes = [one.grid[0] for one in launches]
    wanted = min(sizes) if "decode_attention" in names else max(sizes)  # the bucket of one row, or the largest
    launches = [one for one in launches if one.grid[0] == wanted]
    usual = {one.kernel.name: one.kernel for one in launches}
    by_variant: dict[str, dict[str, Kernel]] = {"as built": usual}
    for name, kernel in usual.items():
        for variant, changed in made(kernel):
            by_variant.setdefault(variant, {})[name] = changed
    keyed = {f"{name}|{variant}": kernel for variant, one in by_variant.items() for name, kernel in one.items()}
    cubins = compile_kernels(keyed, recording.device.sm)
    for variant, kernels in by_variant.items():
        work = _bound(recording.device, launches, kernels, {name: cubins[f"{name}|{variant}"] for name in kernels})
        if work is None:
            continue
        stream, layers = executor.loaded.stream, executor.kv_geometry.num_layers
        graph = recording.device.capture(stream, work)
        stopwatch = bench.machine.stopwatch(recording.device)
        seconds = bench.timed(stopwatch, stream, partial(recording.device.replay, graph))
        yield {"variant": variant, "kernels": list(names), "seconds": seconds.scaled(1 / layers).record()}


def _bound(
    device: Device, launches: Sequence[Bound], kernels: Mapping[str, Kernel], cubins: Mapping[str, Cubin]
) -> Queue | None:
    """All launches with other kernels; None if the GPU lacks the shared memory for one."""
    try:
        loaded = {
            name: device.load_kernel(np.frombuffer(cubins[name].code, np.uint8).copy(), kernel, cubins[name].facts)
            for name, kernel in kernels.items()
        }
    except EngineError:
        return None
    queues = [
        device.bind(loaded[one.kernel.name], _grid(one, kernels[one.kernel.name]), one.arguments, one.node)
        for one in launches
    ]

    def run(stream: Stream) -> None:
        for queue in queues:
            queue(stream)

    return run


def _grid(launch: Bound, kernel: Kernel) -> tuple[int, int, int]:
    """Grid of a launch whose query tiles are split into other sizes."""
    if kernel.name not in _OF_PROMPTS:
        return launch.grid
    pieces = ceil_div(int(kernel.constants["TILE_QUERIES"]), int(kernel.constants["QUERIES"]))
    return (launch.grid[0], launch.grid[1], pieces)
