"""KV blocks to pinned host memory and back: alone, relative to the measured link, and during decode steps."""

import time
from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.gpu.device import Bench, SyntheticExecutor, decode_batch
from benchmarks.gpu.figures import Record, Spread
from benchmarks.gpu.steps import open_program, program_files
from ingot.runtime.cuda.host_blocks import HostBlocks

_SECONDS = 25.0
_MOST_BYTES = 1 << 30
_ROUNDS = 7
_STEPS = 20


def offload(bench: Bench) -> Iterator[Record]:
    """Measure blocks of 16-bit keys and of 4-bit keys."""
    wanted = ("llama-3.1-8b-int4-kv-16-bit", "llama-3.1-8b-int4-kv-int4", "tiny-int4-kv-16-bit")
    for file in program_files(bench.programs):
        if file.stem not in wanted:
            continue
        if not bench.room(_SECONDS):
            yield {"figure": "offload", "program": file.stem, "skipped": "no time left"}
            continue
        executor = open_program(bench, file)
        try:
            for record in _measured(bench, executor):
                yield {"figure": "offload", "program": file.stem, **record}
        finally:
            executor.close()


def _measured(bench: Bench, executor: SyntheticExecutor) -> Iterator[Record]:
    size = executor.kv_geometry.block_bytes
    count = min(executor.num_blocks // 2, 4 if bench.machine.is_dry else _MOST_BYTES // size)
    host = executor.host_blocks(count)
    rounds = 1 if bench.machine.is_dry else _ROUNDS
    ways = {"save": (_save, bench.peaks.to_host), "restore": (_restore, bench.peaks.to_device)}
    for name, (way, link) in ways.items():
        seconds = Spread.of([_seconds(executor, partial(way, host, count)) for _ in range(rounds + 1)][1:])
        rate = count * size / seconds.median
        facts: Record = {"way": name, "blocks": count, "block_bytes": size, "seconds": seconds.record()}
        yield {**facts, "bytes_per_second": rate, "share_of_link": rate / link}
    alone = _seconds(executor, partial(_steps, executor, bench.machine.is_dry))
    both = _seconds(executor, partial(_steps, executor, bench.machine.is_dry, host, count))
    yield {"way": "steps during a save", "seconds_alone": alone, "seconds_together": both, "slower": both / alone}


def _seconds(executor: SyntheticExecutor, work: Callable[[], object]) -> float:
    """Seconds from an idle device to an idle device."""
    device = executor.loaded.device
    device.synchronize("waiting for an idle device")
    begin = time.perf_counter()
    work()
    device.synchronize("copying blocks")
    return time.perf_counter() - begin


def _save(host: HostBlocks, count: int) -> None:
    for block in range(count):
        host.save(block, block)


def _restore(host: HostBlocks, count: int) -> None:
    for block in range(count):
        host.restore(block, block)


def _steps(executor: SyntheticExecutor, is_dry: bool, host: HostBlocks | None = None, count: int = 0) -> None:
    """Decode steps, with host blocks after saves that the side stream does at the same time."""
    if host is not None:
        _save(host, count)
    bound = max(
        (one for one in executor.loaded.programs if one.program.attention == "decode"),
        key=lambda one: one.program.rows,
    )
    length = min(512, executor.model.context_tokens)
    executor.send(bound, decode_batch(bound.program.rows, length, executor.kv_geometry.block_tokens))
    for _ in range(1 if is_dry else _STEPS):
        bound.run("greedy", executor.loaded.stream)
