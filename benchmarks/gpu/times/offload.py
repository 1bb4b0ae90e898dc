"""KV blocks to pinned host memory and back: alone, relative to the measured link, and while decode steps run.

way "save", "restore"   all blocks in one go: seconds, bytes per second, share of the link, the host's time for each
                        block, and the time of a block by the GPU's own clock, which the tiers' cost model gets
way "step"              decode steps as an engine queues them, one ahead, while blocks move in some directions:
                        milliseconds of a step, and the blocks that moved during it
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path

import numpy as np

from benchmarks.gpu.device import Bench, SyntheticExecutor, decode_batch
from benchmarks.gpu.figures import Spread
from benchmarks.gpu.parts import Record, Task
from benchmarks.gpu.times.steps import open_program, program_files
from ingot.runtime.cuda.host_blocks import BlockTransfer, PinnedBlocks
from ingot.runtime.forward_batch import SamplingArrays

_SECONDS = 30.0
_MOST_BYTES = 1 << 30
_IN_FLIGHT_BYTES = 128 << 20  # as the tiers have of blocks that are saved
_ROUNDS = 7
_STEPS = 20
_LENGTH = 512  # tokens of each sequence of a step
_DIRECTIONS = ((), ("save",), ("restore",), ("save", "restore"))


def offload(bench: Bench) -> list[Task]:
    """Blocks of 16-bit keys and of 4-bit keys."""
    wanted = ("llama-3.1-8b-int4-kv-16-bit", "llama-3.1-8b-int4-kv-int4", "tiny-int4-kv-16-bit")
    files = (file for file in program_files(bench.programs) if file.stem in wanted)
    return [Task(file.stem, partial(_of_program, bench, file), least=_SECONDS) for file in files]


def _of_program(bench: Bench, file: Path) -> Iterator[Record]:
    executor = open_program(bench, file)
    try:
        for record in _measured(bench, executor):
            yield {"figure": "offload", "program": file.stem, **record}
    finally:
        executor.close()


def _measured(bench: Bench, executor: SyntheticExecutor) -> Iterator[Record]:
    steps = _Steps(executor, bench.machine.is_dry)
    without = steps.measure(lambda: None)
    size, first = executor.kv_geometry.block_bytes, steps.num_blocks
    count = min(executor.num_blocks - first, 4 if bench.machine.is_dry else _MOST_BYTES // size)
    blocks = range(first, first + count)  # none that a step uses
    host = executor.host_blocks(count)
    ways = {"save": host.save, "restore": lambda block, slot: host.restore(slot, block)}
    for name, link in (("save", bench.peaks.to_host), ("restore", bench.peaks.to_device)):
        yield {"way": name, **_alone(host, ways[name], blocks, size, link, 1 if bench.machine.is_dry else _ROUNDS)}
    facts: Record = {"way": "step", "rows": steps.rows, "context": steps.length, "block_bytes": size}
    yield {**facts, "moving": "no tiers", "seconds": without.record(), "blocks_per_step": 0.0}
    for directions in _DIRECTIONS:
        mover = _Mover({name: ways[name] for name in directions}, blocks, max(1, min(count, _IN_FLIGHT_BYTES // size)))
        seconds = steps.measure(mover.move)
        moved = mover.num_moved / steps.num_measured
        mover.finish()
        yield {
            **facts,
            "moving": " and ".join(directions) or "nothing",
            "seconds": seconds.record(),
            "blocks_per_step": moved,
            "over_no_tiers": seconds.median / without.median,
        }


def _alone(
    host: PinnedBlocks,
    way: Callable[[int, int], BlockTransfer],
    blocks: range,
    size: int,
    link: float,
    rounds: int,
) -> Record:
    """Move all blocks, each round from an idle device until all are done; the first round does not count."""
    wall, queueing, copying = [], [], []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        transfers = [way(block, slot) for slot, block in enumerate(blocks)]
        queueing.append((time.perf_counter() - begin) / len(blocks))
        _wait(transfers)
        wall.append(time.perf_counter() - begin)
        copying.append(sum(transfer.seconds for transfer in transfers) / len(blocks))
    host.check()
    seconds = Spread.of(wall[1:])
    rate = len(blocks) * size / seconds.median
    return {
        "blocks": len(blocks),
        "block_bytes": size,
        "seconds": seconds.record(),
        "bytes_per_second": rate,
        "share_of_link": rate / link,
        "host_seconds_per_block": Spread.of(queueing[1:]).record(),
        "device_seconds_per_block": Spread.of(copying[1:]).record(),
    }


def _wait(transfers: list[BlockTransfer]) -> None:
    left = deque(transfers)
    while left:
        if left[0].done:
            left.popleft()


class _Steps:
    """Decode steps of the largest bucket, each queued before the tokens of the one before it are read."""

    def __init__(self, executor: SyntheticExecutor, is_dry: bool) -> None:
        self._executor = executor
        self.rows = max(one.program.rows for one in executor.loaded.programs if one.program.attention == "decode")
        self.length = min(_LENGTH, executor.model.context_tokens)
        self._batch = decode_batch(self.rows, self.length, executor.kv_geometry.block_tokens)
        zeros, ones = np.zeros(self.rows, np.float32), np.ones(self.rows, np.float32)
        self._draws = SamplingArrays(zeros, np.zeros(self.rows, np.int32), ones, zeros)
        self._carried = np.full(self.rows, -1, np.int32)
        self._rounds, self._steps = (1, 2) if is_dry else (_ROUNDS, _STEPS)

    @property
    def num_blocks(self) -> int:
        """Blocks that the steps use: the first ones of the pool."""
        return self._batch.block_tables.size

    @property
    def num_measured(self) -> int:
        """Steps that `measure` runs."""
        return self._rounds * self._steps

    def measure(self, between: Callable[[], object]) -> Spread:
        """Seconds of a step, with `between` called after each is queued."""
        seconds = []
        for _ in range(self._rounds):
            before = self._executor.submit(self._batch, self._draws, self._carried)
            before.tokens()
            begin = time.perf_counter()
            for _ in range(self._steps):
                step = self._executor.submit(self._batch, self._draws, self._carried)
                between()
                before.tokens()
                before = step
            before.tokens()
            seconds.append((time.perf_counter() - begin) / self._steps)
        return Spread.of(seconds)


class _Mover:
    """Keeps blocks moving in each direction, so many at a time."""

    def __init__(self, ways: dict[str, Callable[[int, int], BlockTransfer]], blocks: range, most: int) -> None:
        self._most = max(1, most // max(1, len(ways)))
        # Directions use blocks and slots of their own.
        places = list(enumerate(blocks))
        self._ways = [
            (way, cycle(places[index :: len(ways)]), deque[BlockTransfer]()) for index, way in enumerate(ways.values())
        ]
        self.num_moved = 0

    def move(self) -> None:
        """Note what is done, and begin as many more."""
        for way, places, moving in self._ways:
            while moving and moving[0].done:
                moving.popleft()
                self.num_moved += 1
            while len(moving) < self._most:
                slot, block = next(places)
                moving.append(way(block, slot))

    def finish(self) -> None:
        """Wait for what moves."""
        for _, _, moving in self._ways:
            _wait([*moving])
