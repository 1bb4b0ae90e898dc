"""Measures what writing and reading a block on disk costs the thread that does it, and how long a folder takes to open.

    python -m benchmarks.kv.disk_writes --output benchmarks/results/kv-disk-writes.json

CPU time is that of the calling thread: on a machine whose cores compute, it is what a step waits for. "new" blocks find
room, "evicting" ones take the place of others. Nothing is flushed to the device.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.device import device_facts
from ingot.runtime.kv.disk.store import DiskStore
from ingot.runtime.kv.keys import BlockContent, block_hash, root_hash

_ROOT = root_hash("an artifact", "float32")
_TOKENS = 16
_CHAIN = 64  # blocks of a prompt
_SIZES = {"49 kB": (49_152, 1000), "1 MiB": (1 << 20, 100)}  # bytes of a block, blocks


def chain_of(count: int) -> list[BlockContent]:
    """Keys of prompts of `_CHAIN` blocks, one after another."""
    contents: list[BlockContent] = []
    for number in range(count):
        tokens = np.arange(number * _TOKENS, (number + 1) * _TOKENS, dtype=np.int64).tobytes()
        parent = contents[-1].hash if number % _CHAIN else _ROOT
        contents.append(BlockContent(block_hash(parent, tokens), parent, tokens))
    return contents


def timed(call: Callable[[BlockContent], object], contents: Iterable[BlockContent]) -> dict[str, float]:
    """Milliseconds of a call: CPU time of this thread, mean and median of the wall time."""
    walls: list[float] = []
    cpu = time.thread_time()
    for content in contents:
        started = time.perf_counter()
        call(content)
        walls.append(time.perf_counter() - started)
    cpu = (time.thread_time() - cpu) / len(walls)
    found = {"cpu_ms": cpu, "wall_ms": statistics.mean(walls), "wall_median_ms": statistics.median(walls)}
    return {name: round(seconds * 1e3, 4) for name, seconds in found.items()}


def measure_blocks(folder: Path, block_bytes: int, count: int) -> dict[str, Any]:
    """Write `count` blocks into an empty folder, read them, and write as many again over them."""
    store = DiskStore.open(folder, max_bytes=(block_bytes + 8192) * count, block_bytes=block_bytes, root=_ROOT)
    buffer = np.random.default_rng(0).integers(0, 256, block_bytes, np.uint8)
    contents = chain_of(2 * count)
    result = {
        "new": timed(lambda content: store.write(content, buffer), contents[:count]),
        "read": timed(lambda content: store.read_into(content, buffer), contents[:count]),
        "evicting": timed(lambda content: store.write(content, buffer), contents[count:]),
    }
    assert store.stats.refused_writes == 0
    store.close()
    return result


def measure_open(folder: Path, count: int) -> dict[str, float]:
    """Open a folder with `count` small blocks several times."""
    options: dict[str, Any] = {"max_bytes": 1 << 30, "block_bytes": 4096, "root": _ROOT}
    buffer = np.zeros(4096, np.uint8)
    store = DiskStore.open(folder, **options)
    for content in chain_of(count):
        assert store.write(content, buffer)
    store.close()
    seconds: list[float] = []
    for _ in range(5):
        started = time.perf_counter()
        store = DiskStore.open(folder, **options)
        seconds.append(time.perf_counter() - started)
        assert len(store) == count
        store.close()
    return {"blocks": count, "median_ms": round(statistics.median(seconds) * 1e3, 2)}


@click.command()
@click.option("--folder", type=click.Path(path_type=Path), help="Where to put the store; default: a temporary folder.")
@click.option("--blocks", default=10_000, show_default=True, help="Blocks in the folder that is opened.")
@click.option("--output", type=click.Path(path_type=Path), help="Write the result as JSON.")
def main(folder: Path | None, blocks: int, output: Path | None) -> None:
    """Measure the disk store."""
    result: dict[str, Any] = {"device": device_facts()}
    with tempfile.TemporaryDirectory(dir=folder) as base:
        for name, (block_bytes, count) in _SIZES.items():
            result[name] = measure_blocks(Path(base) / name.replace(" ", ""), block_bytes, count)
        result["open"] = measure_open(Path(base) / "open", blocks)
    text = json.dumps(result, indent=1)
    print(text)
    if output:
        output.write_text(text + "\n")


if __name__ == "__main__":
    main()
