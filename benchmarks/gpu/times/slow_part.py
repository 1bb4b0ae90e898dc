"""A KV pool whose slow part is host memory, read in place over the link; and the GPU's stage of a model on two devices.

way "read"    bytes per second that the device reads from the slow part, and its share of the link
way "curve"   a decode step of one sequence over context, whose blocks beyond the fast part are slow: seconds, the bytes
              that it reads over the link, and what a step from the fast part and the link's speed predict
way "stage"   the launches of the last layers and the head, as `place: {gpu_layers: N}` runs them: seconds, and what
              their share of the weights' bytes at the whole step's speed predicts. The host's stage is left out
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from benchmarks.gpu.device import Bench, SyntheticExecutor, decode_batch, weight_bytes
from benchmarks.gpu.parts import Record, Task
from benchmarks.gpu.programs.packing import unpack
from benchmarks.gpu.times.steps import program_files
from ingot.artifact.programs.launch_program import Launch, WeightArgument
from ingot.runtime.cuda.driver.device import Stream
from ingot.runtime.cuda.programs import BoundStep
from ingot.runtime.options import EngineOptions
from ingot.sizes import ceil_div

_SECONDS = 30.0
_FAST_TOKENS, _SLOW_SHARE = 4096, 7  # the slow part has so many times the blocks of the fast one
_CONTEXTS = (0.25, 1.0, 1.125, 1.25, 1.5, 2.0, 4.0, 8.0)
"""Lengths in tokens, as multiples of the fast part's."""
_LAYER_SHARES = (0, 1, 2, 3, 4)  # quarters of the layers on the GPU
_LAYERS = "layers"


def slow_part(bench: Bench) -> list[Task]:
    """The model of 8 billion weights with keys of 16 bits."""
    wanted = ("llama-3.1-8b-int4-kv-16-bit", "tiny-int4-kv-16-bit")
    files = (file for file in program_files(bench.programs) if file.stem in wanted)
    return [Task(file.stem, partial(_of_program, bench, file), least=_SECONDS) for file in files]


def _of_program(bench: Bench, file: Path) -> Iterator[Record]:
    artifact = unpack(file, bench.scratch / f"{file.stem}-slow-part")
    block, most = artifact.manifest.kv.block_tokens, artifact.manifest.model.context_tokens
    fast = max(1, min(_FAST_TOKENS, most // (1 + _SLOW_SHARE)) // block)
    options = EngineOptions(kv_blocks=fast, kv_offload=f"{100 * _SLOW_SHARE}%")
    executor = SyntheticExecutor(artifact, bench.machine.open(), options)
    try:
        for record in (*_curve(bench, executor, fast), *_stages(bench, executor)):
            yield {"figure": "slow part", "program": file.stem, **record}
    finally:
        executor.close()


def _curve(bench: Bench, executor: SyntheticExecutor, fast: int) -> Iterator[Record]:
    rate, block = executor.slow_bytes_per_second, executor.kv_geometry.block_tokens
    yield {"way": "read", "bytes_per_second": rate, "share_of_link": rate / bench.peaks.to_device}
    stopwatch, bound = bench.machine.stopwatch(executor.loaded.device), executor.program("decode-1")
    from_fast = 0.0
    for share in _CONTEXTS:
        blocks = max(1, min(int(share * fast), executor.num_blocks))
        context = min(blocks * block, executor.model.context_tokens)
        executor.send(bound, decode_batch(1, context, block))
        seconds = bench.timed(stopwatch, executor.loaded.stream, executor.step(bound, "greedy"))
        slow_bytes = max(0, ceil_div(context, block) - fast) * executor.kv_geometry.block_bytes
        from_fast = from_fast if slow_bytes else seconds.median
        predicted = from_fast + slow_bytes / rate
        yield {
            "way": "curve",
            "context": context,
            "fast_tokens": fast * block,
            "slow_bytes": slow_bytes,
            "seconds": seconds.record(),
            "tokens_per_second": 1 / seconds.median,
            "predicted_seconds": predicted,
            "over_predicted": seconds.median / predicted,
        }


def _stages(bench: Bench, executor: SyntheticExecutor) -> Iterator[Record]:
    device, stream = executor.loaded.device, executor.loaded.stream
    stopwatch, bound, total = bench.machine.stopwatch(device), executor.program("decode-1"), executor.model.num_layers
    executor.send(bound, decode_batch(1, min(512, executor.model.context_tokens), executor.kv_geometry.block_tokens))
    body, head = bound.calls[: bound.program.head_start], bound.calls[bound.program.head_start :]
    places = [_layer(node) for node, _ in body]
    whole, all_bytes = 0.0, _weight_bytes(executor, 0)
    for quarters in reversed(_LAYER_SHARES):
        layers = total * quarters // max(_LAYER_SHARES)
        first = places.index(total - layers) if layers else len(places)
        graph = device.capture(stream, partial(_queue_all, [*body[first:], *head]))
        seconds = bench.timed(stopwatch, stream, partial(device.replay, graph))
        whole = whole or seconds.median
        predicted = whole * _weight_bytes(executor, first) / all_bytes
        yield {
            "way": "stage",
            "gpu_layers": layers,
            "seconds": seconds.record(),
            "predicted_seconds": predicted,
            "over_predicted": seconds.median / predicted,
        }


def _queue_all(steps: Sequence[BoundStep], stream: Stream) -> None:
    for _, queue in steps:
        queue(stream)


def _layer(node: str) -> int:
    parts = node.split(".")
    return int(parts[1]) if parts[0] == _LAYERS and len(parts) > 1 and parts[1].isdecimal() else -1


def _weight_bytes(executor: SyntheticExecutor, first: int) -> int:
    """Bytes of the weights that a decode step's launches read from a number on."""
    launches = executor.program("decode-1").program.launches[first:]
    arguments = [argument for one in launches if isinstance(one, Launch) for argument in one.arguments]
    names = {argument.name for argument in arguments if isinstance(argument, WeightArgument)}
    return sum(weight_bytes(executor.weights[name]) for name in names)
