"""Steps of synthetic models: decode and prefill, each kernel's share of its roofline, attention over long contexts."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.device import Bench, SyntheticExecutor, decode_batch, prefill_batch
from benchmarks.gpu.figures import Record, Work
from benchmarks.gpu.launches import Group, groups, step_work
from benchmarks.gpu.models import INVARIANT
from benchmarks.gpu.packing import unpack
from ingot.runtime.cuda.device import Device, Queue, Stream
from ingot.runtime.cuda.programs import BoundProgram
from ingot.runtime.cuda.stopwatch import Stopwatch
from ingot.runtime.options import EngineOptions
from ingot.runtime.steps.batch import ForwardBatch

DECODE_CONTEXT = 1024  # tokens of each sequence, if the model's context is long enough
LONG_SHARES = (16, 4, 1)  # share of the context, for attention alone
_OF_KEYS = ("attention", "rotary", "join")  # kernels that the precision of keys changes
_SECONDS_A_PROGRAM = 20.0  # to unpack, load and fill the largest


def steps(bench: Bench) -> Iterator[Record]:
    """Every program in turn."""
    for file in program_files(bench.programs, invariant=True):
        if not bench.room(_SECONDS_A_PROGRAM):
            yield {"figure": "step", "program": file.stem, "skipped": "no time left"}
            continue
        yield from _program(bench, file)


def program_files(folder: Path, *, invariant: bool = False) -> list[Path]:
    """The packed programs: large models first, 16-bit keys before quantized ones, batch-invariant ones last."""
    files = (file for file in folder.glob("*-kv-*.zip") if invariant or not file.stem.endswith(INVARIANT))
    return sorted(files, key=lambda file: (not file.stem.endswith("kv-16-bit"), INVARIANT in file.stem, file.stem))


def open_program(bench: Bench, file: Path, device: Device | None = None) -> SyntheticExecutor:
    """Load a packed program on a device, by default the machine's, with a pool for its largest steps."""
    folder = bench.scratch / file.stem
    artifact = unpack(file, folder)
    context, block = artifact.manifest.model.context_tokens, artifact.manifest.kv.block_tokens
    sequences = 64
    tokens = max(context, sequences * min(DECODE_CONTEXT, context))
    options = EngineOptions(kv_blocks=-(-tokens // block) + 1)
    executor = SyntheticExecutor(artifact, device or bench.machine.open(), options)
    for weights in (folder / "program").glob("weights*"):
        weights.unlink()  # the page cache may drop the sparse file
    return executor


def _program(bench: Bench, file: Path) -> Iterator[Record]:
    executor = open_program(bench, file)
    try:
        for bound in executor.loaded.programs:
            if not bench.room(8):
                yield {"figure": "step", "program": file.stem, "bucket": bound.program.name, "skipped": "no time left"}
                continue
            for record in _bucket(bench, executor, bound):
                yield {"program": file.stem, "bucket": bound.program.name, **record}
    finally:
        executor.close()


def _bucket(bench: Bench, executor: SyntheticExecutor, bound: BoundProgram) -> Iterator[Record]:
    """Measure the whole step, its kernels, and the attention of one sequence that fills the context."""
    stopwatch = bench.machine.stopwatch(executor.loaded.device)
    batch, facts = step_batch(executor, bound)
    executor.send(bound, batch)
    found = groups(executor, bound, batch)
    seconds = bench.timed(stopwatch, executor.loaded.stream, executor.step(bound, "greedy"))
    tokens = batch.num_tokens / seconds.median
    work = step_work(found)
    weights = sum(group.stored_bytes for group in found if not any(word in group.name for word in _OF_KEYS))
    over = {"weight_bytes": weights, "over_weights": seconds.median * bench.peaks.bytes_per_second / weights}
    yield {"figure": "step", **facts, **work.record(seconds, bench.peaks), **over, "tokens_per_second": tokens}
    is_usual = not executor.kv_geometry.is_quantized
    for group in found:
        if not is_usual and not any(word in group.name for word in _OF_KEYS):
            continue  # measured with 16-bit keys
        yield {"figure": "kernel", **facts, **_group(bench, executor, stopwatch, group)}
    if bound.program.name == "decode-1":
        yield from _long_attention(bench, executor, bound, stopwatch)


def step_batch(executor: SyntheticExecutor, bound: BoundProgram) -> tuple[ForwardBatch, Record]:
    """The batch that a bucket is measured on: rows of long sequences, or one prompt that fills it."""
    block, context = executor.kv_geometry.block_tokens, executor.model.context_tokens
    rows = bound.program.rows
    is_small = executor.batch_invariant and rows == bound.program.sequences  # such programs have no decode buckets
    if bound.program.attention == "decode" or is_small:
        length = min(DECODE_CONTEXT, context)
        return decode_batch(rows, length, block), {"phase": "decode", "rows": rows, "context": length}
    length = min(rows, context)
    return prefill_batch(length, block), {"phase": "prefill", "rows": length, "context": length}


def _group(bench: Bench, executor: SyntheticExecutor, stopwatch: Stopwatch, group: Group) -> Record:
    """Seconds and work of one launch of the group: the mean over its layers, replayed as a graph."""
    device, stream = executor.loaded.device, executor.loaded.stream
    graph = device.capture(stream, group.all)
    seconds = bench.timed(stopwatch, stream, lambda stream: device.replay(graph, stream))
    share = 1 / len(group.queues)
    work = Work(group.work.bytes * share, group.work.flops * share)
    return {"kernel": group.name, "launches": len(group.queues), **work.record(seconds.scaled(share), bench.peaks)}


def _long_attention(
    bench: Bench, executor: SyntheticExecutor, bound: BoundProgram, stopwatch: Stopwatch
) -> Iterator[Record]:
    """Measure decode attention of one sequence at a share of the context and at all of it."""
    context, block = executor.model.context_tokens, executor.kv_geometry.block_tokens
    for share in LONG_SHARES:
        length = context // share
        batch = decode_batch(1, length, block)
        executor.send(bound, batch)
        executor.step(bound, "body")(executor.loaded.stream)  # finite queries
        found = [*groups(executor, bound, batch, "decode_attention"), *groups(executor, bound, batch, "join_chunks")]
        both = _joined(found)
        facts: Record = {"phase": "decode", "rows": 1, "context": length}
        yield {"figure": "attention", **facts, **_group(bench, executor, stopwatch, both)}


def _joined(found: list[Group]) -> Group:
    """Both kernels of each layer, in their order, as one group."""
    one, other = found
    queues = tuple(_both(first, second) for first, second in zip(one.queues, other.queues, strict=True))
    return dataclasses.replace(one, name="attention with its join", queues=queues, work=Work(one.stored_bytes))


def _both(first: Queue, second: Queue) -> Queue:
    def run(stream: Stream) -> None:
        first(stream)
        second(stream)

    return run
