"""Steps of synthetic models: decode and prefill, each kernel's share of its roofline, attention over long contexts."""

import dataclasses
import json
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.gpu.device import Bench, SyntheticExecutor, decode_batch, prefill_batch
from benchmarks.gpu.figures import Work
from benchmarks.gpu.parts import Record, Task
from benchmarks.gpu.programs.models import DEPENDENT, INVARIANT, LLAMA_8B, MORE_BUCKETS
from benchmarks.gpu.programs.packing import WEIGHTS_TABLE, unpack
from benchmarks.gpu.times.launches import Group, groups, step_work
from ingot.artifact.programs.launch_program import LAUNCHES_FILE
from ingot.runtime.cuda.driver.device import Device
from ingot.runtime.cuda.driver.stopwatch import Stopwatch
from ingot.runtime.cuda.programs import BoundProgram
from ingot.runtime.forward_batch import ForwardBatch
from ingot.runtime.options import EngineOptions

DECODE_CONTEXT = 1024  # tokens of each sequence, if the model's context is long enough
LONG_SHARES = (16, 4, 1)  # share of the context, for attention alone
_OF_KEYS = ("attention", "kv_write", "join")  # kernels that the precision of keys changes
_SECONDS_A_BUCKET = 12.0  # the largest program's loading included
_EXTRA = (INVARIANT, DEPENDENT, MORE_BUCKETS)  # ends of the names of programs besides the usual ones
_FIRST = ("decode-1", "decode-64", "ragged-4096")  # buckets with goals


def steps(bench: Bench) -> list[Task]:
    """Every bucket of every program, and attention of one sequence over long contexts."""
    opened = OpenedProgram(bench)
    tasks = []
    for file in program_files(bench.programs, invariant=True):
        if file.stem.endswith((DEPENDENT, MORE_BUCKETS)):
            continue  # the parts "dependent" and "other-steps" measure them
        names = bucket_names(file)
        for name in sorted(names, key=lambda name: (name not in _FIRST, names.index(name))):
            run = partial(_bucket, opened, file, name)
            tasks.append(Task(f"{file.stem} {name}", run, least=_SECONDS_A_BUCKET))
        if "decode-1" in names:
            run = partial(_long_attention, opened, file)
            tasks.append(Task(f"{file.stem} long attention", run, least=_SECONDS_A_BUCKET))
    return tasks


def program_files(folder: Path, *, invariant: bool = False) -> list[Path]:
    """The packed programs in the order of what they decide.

    The largest model first; usual before batch-invariant programs, dependent launches and more buckets, keys
    of 16 bits before quantized ones, 4-bit weights before others.
    """
    files = (file for file in folder.glob("*-kv-*.zip") if invariant or not file.stem.endswith(_EXTRA))
    return sorted(filter(is_without_weights, files), key=lambda file: _rank(file.stem))


def is_without_weights(file: Path) -> bool:
    """Whether a packed program is one that `unpack` gives weights: small models bring theirs."""
    with zipfile.ZipFile(file) as archive:
        return WEIGHTS_TABLE in archive.namelist()


def _rank(name: str) -> tuple[object, ...]:
    is_large = name.startswith(LLAMA_8B.name) and not name.endswith(_EXTRA)
    return (not is_large, name.endswith(_EXTRA), "kv-16-bit" not in name, "-int4-kv" not in name, name)


def bucket_names(file: Path) -> list[str]:
    """Names of a packed program's buckets."""
    with zipfile.ZipFile(file) as archive:
        programs = json.loads(archive.read(LAUNCHES_FILE))["programs"]
    return [f"{one['attention']}-{one['rows']}" for one in programs]


@dataclass
class OpenedProgram:
    """The program that the tasks of a part share: opened when it is first needed, closed before another is."""

    bench: Bench
    file: Path | None = None
    executor: SyntheticExecutor | None = None

    @contextmanager
    def use(self, file: Path) -> Iterator[SyntheticExecutor]:
        """Open a program, or take the open one; after an error it is closed, so that the next task opens it anew."""
        if self.file != file or self.executor is None:
            self.close()
            self.file, self.executor = file, open_program(self.bench, file)
        try:
            yield self.executor
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Free what the open program takes, if there is one."""
        if self.executor is not None:
            self.executor.close()
        self.executor = None


def open_program(
    bench: Bench, file: Path, device: Device | None = None, *, kv_bytes: str | None = None
) -> SyntheticExecutor:
    """Load a packed program on a device, by default the machine's, with a pool for its largest steps.

    kv_bytes    share of the free memory that the pool has instead
    """
    folder = bench.scratch / file.stem
    artifact = unpack(file, folder)
    context, block = artifact.manifest.model.context_tokens, artifact.manifest.kv.block_tokens
    sequences = 64
    tokens = max(context, sequences * min(DECODE_CONTEXT, context))
    options = EngineOptions(kv_bytes=kv_bytes) if kv_bytes else EngineOptions(kv_blocks=-(-tokens // block) + 1)
    executor = SyntheticExecutor(artifact, device or bench.machine.open(), options)
    for weights in (folder / "program").glob("weights*"):
        weights.unlink()  # the page cache may drop the sparse file
    return executor


def _bucket(opened: OpenedProgram, file: Path, name: str) -> Iterator[Record]:
    """Measure the whole step and its kernels."""
    with opened.use(file) as executor:
        for record in _measured(opened.bench, executor, executor.program(name)):
            yield {"program": file.stem, "bucket": name, **record}


def _measured(bench: Bench, executor: SyntheticExecutor, bound: BoundProgram) -> Iterator[Record]:
    stopwatch = bench.machine.stopwatch(executor.loaded.device)
    batch, facts = step_batch(executor, bound)
    executor.send(bound, batch)
    found = groups(executor, bound, batch)
    seconds = bench.timed(stopwatch, executor.loaded.stream, executor.step(bound, "greedy"))
    tokens = batch.num_tokens / seconds.median
    work = step_work(found)
    weights = sum(group.stored_bytes for group in found if not _is_of_keys(group))
    over = {"weight_bytes": weights, "over_weights": seconds.median * bench.peaks.bytes_per_second / weights}
    yield {"figure": "step", **facts, **work.record(seconds, bench.peaks), **over, "tokens_per_second": tokens}
    is_usual = not executor.kv_geometry.is_quantized
    for group in found:
        if not is_usual and not _is_of_keys(group):
            continue  # measured with 16-bit keys
        yield {"figure": "kernel", **facts, **_group(bench, executor, stopwatch, group)}


def _is_of_keys(group: Group) -> bool:
    return any(word in group.name.split()[0] for word in _OF_KEYS)


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


def _long_attention(opened: OpenedProgram, file: Path) -> Iterator[Record]:
    """Measure decode attention of one sequence at a share of the context and at all of it."""
    with opened.use(file) as executor:
        bench, bound = opened.bench, executor.program("decode-1")
        stopwatch = bench.machine.stopwatch(executor.loaded.device)
        context, block = executor.model.context_tokens, executor.kv_geometry.block_tokens
        for share in LONG_SHARES:
            length = context // share
            batch = decode_batch(1, length, block)
            executor.send(bound, batch)
            executor.step(bound, "body")(executor.loaded.stream)  # finite queries
            (found,) = groups(executor, bound, batch, "decode_attention")
            found = dataclasses.replace(found, name="attention", work=Work(found.stored_bytes))
            facts: Record = {
                "program": file.stem,
                "bucket": "decode-1",
                "phase": "decode",
                "rows": 1,
                "context": length,
            }
            yield {"figure": "attention", **facts, **_group(bench, executor, stopwatch, found)}
