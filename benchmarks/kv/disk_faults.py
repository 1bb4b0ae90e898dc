"""Kills processes of the disk store and damages its files, and checks that it serves only what was stored.

    python -m benchmarks.kv.disk_faults --kills 50 --corruptions 10000

`--kills`: two processes write, read and evict in one folder and are killed (SIGKILL) at a random moment; then every
block that the folder offers is compared, and a block is written and read again. `--corruptions`: one of the faults of
`disk_fault_kinds`, then every block is read, each fourth time by a store that was opened after the fault. The exit code
is 1 if a wrong block was served, a sound one was not, or a store could not be used afterwards.
"""

import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import click
import numpy as np

from benchmarks.device import device_facts
from benchmarks.kv.disk_fault_kinds import FAULTS, Target
from benchmarks.kv.numbered_blocks import BLOCK_BYTES, OTHER_ROOT, bytes_of, content_of, open_store
from ingot.runtime.kv.disk.store import BlockUnavailable, DiskStore
from ingot.runtime.kv.keys import BlockContent

_REOPENED = 4  # after each fourth fault
_WORKER_BLOCKS = 100


@dataclass
class Outcome:
    """Attempts, and their outcomes. `wrong` and `unusable` must be 0."""

    tried: int = 0
    served: int = 0
    wrong: int = 0
    refused: int = 0
    unusable: int = 0
    kinds: Counter[str] = field(default_factory=Counter)


def kill_writers(folder: Path, kills: int, seed: int) -> Outcome:
    """Kill two busy processes `kills` times, each time at another moment, and check all that they left."""
    outcome, chance = Outcome(), random.Random(seed)
    for _ in range(kills):
        workers = [_start_worker(folder, chance.randrange(1 << 30)) for _ in range(2)]
        time.sleep(chance.uniform(0.01, 0.25))
        for worker in workers:
            worker.send_signal(signal.SIGKILL)
            outcome.wrong += worker.wait() != -signal.SIGKILL  # it ended by itself, at a wrong block
        outcome.tried += 1
        _check_all(folder, outcome)
    return outcome


def corrupt(folder: Path, corruptions: int, seed: int) -> Outcome:
    """Damage one slot or segment at a time and read every block."""
    outcome, chance = Outcome(), random.Random(seed)
    store, other = open_store(folder, num_blocks=64), open_store(folder, num_blocks=64, root=OTHER_ROOT)
    contents = [content_of(number) for number in range(16)]
    for _ in range(corruptions):
        _heal(store, contents, outcome)
        kind = chance.choice(list(FAULTS))
        victim, bystander = chance.sample(contents, 2)
        harm = FAULTS[kind](Target(folder, store, other, contents, victim, bystander, chance))
        outcome.tried += 1
        outcome.kinds[kind] += 1
        if chance.randrange(_REOPENED) == 0:
            store.close()
            store = open_store(folder, num_blocks=64)
            over_limit = contents if store.stats.evictions else []  # by files that were extended
            harm = harm._replace(uncertain=harm.unlisted.union(content.hash for content in over_limit))
        for content in contents:
            if content.hash in harm.uncertain - harm.spoiled:
                _read(store, content, outcome, expect=None)
            else:
                _read(store, content, outcome, expect=content.hash not in harm.spoiled)
    outcome.unusable += store.failure is not None
    _heal(store, contents, outcome)
    store.close()
    other.close()
    return outcome


def _heal(store: DiskStore, contents: list[BlockContent], outcome: Outcome) -> None:
    """Store each block once. One that a damaged table promises is found missing when it is read, and written then."""
    for _ in range(5):
        for content in contents:
            if len(store._index.places(content.hash)) > 1:
                store.remove(content.hash)
            outcome.unusable += not store.write(content, bytes_of(content))
        if all(_is_served_once(store, content, outcome) for content in contents):
            return
    outcome.unusable += 1


def _is_served_once(store: DiskStore, content: BlockContent, outcome: Outcome) -> bool:
    buffer = np.empty(BLOCK_BYTES, np.uint8)
    try:
        store.read_into(content, buffer)
    except BlockUnavailable:
        return False
    outcome.wrong += not np.array_equal(buffer, bytes_of(content))
    return len(store._index.places(content.hash)) == 1


def _read(store: DiskStore, content: BlockContent, outcome: Outcome, *, expect: bool | None) -> None:
    """Read a block that must be served, must not, or (None) may be."""
    buffer = np.empty(BLOCK_BYTES, np.uint8)
    try:
        store.read_into(content, buffer)
    except BlockUnavailable:
        outcome.refused += 1
        outcome.unusable += expect is True  # a sound block must be served
    else:
        outcome.served += 1
        outcome.wrong += expect is False or not np.array_equal(buffer, bytes_of(content))


def _check_all(folder: Path, outcome: Outcome) -> None:
    outcome.kinds["unfinished segments"] += len(list((folder / "tmp").iterdir()))
    store = open_store(folder, num_blocks=_WORKER_BLOCKS)
    outcome.unusable += bool(list((folder / "tmp").iterdir()))
    for number in range(2 * _WORKER_BLOCKS):
        content = content_of(number)
        if store.contains(content.hash):
            _read(store, content, outcome, expect=True)
    extra = content_of(10**6 + outcome.tried)
    outcome.unusable += not store.write(extra, bytes_of(extra))
    _read(store, extra, outcome, expect=True)
    store.remove(extra.hash)
    outcome.kinds["blocks found"] += len(store)
    outcome.kinds["damaged"] += store.stats.damaged
    store.close()


def _start_worker(folder: Path, seed: int) -> "subprocess.Popen[str]":
    """Start a process that uses the store until it is killed; returns when it does."""
    command = [sys.executable, "-m", "benchmarks.kv.disk_faults", "--worker", str(folder), "--seed", str(seed)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    with process.stdout:
        assert process.stdout.readline() == "ready\n"
    return process


def _work(folder: Path, seed: int) -> None:
    chance = random.Random(seed)
    store = open_store(folder, num_blocks=_WORKER_BLOCKS)
    contents = [content_of(number) for number in range(2 * _WORKER_BLOCKS)]
    blocks = [bytes_of(content) for content in contents]
    buffer = np.empty(BLOCK_BYTES, np.uint8)
    print("ready", flush=True)
    while True:
        number = chance.randrange(len(contents))
        with suppress(BlockUnavailable):
            store.read_into(contents[number], buffer)
            assert np.array_equal(buffer, blocks[number])
        store.write(contents[number], blocks[number])


@click.command()
@click.option("--kills", default=50, show_default=True)
@click.option("--corruptions", default=10_000, show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--folder", type=click.Path(path_type=Path), help="Where to put the store; default: a temporary folder.")
@click.option("--output", type=click.Path(path_type=Path), help="Write the result as JSON.")
@click.option("--worker", type=click.Path(path_type=Path), hidden=True)
def main(
    kills: int, corruptions: int, seed: int, folder: Path | None, output: Path | None, worker: Path | None
) -> None:
    """Kill, damage, and count what was served."""
    if worker:
        _work(worker, seed)
    with tempfile.TemporaryDirectory(dir=folder) as base:
        outcomes = {
            "kills": kill_writers(Path(base) / "kills", kills, seed),
            "corruptions": corrupt(Path(base) / "corruptions", corruptions, seed),
        }
    result = {name: {**vars(outcome), "kinds": dict(outcome.kinds)} for name, outcome in outcomes.items()}
    text = json.dumps({"device": device_facts(), "seed": seed, **result}, indent=1)
    print(text)
    if output:
        output.write_text(text + "\n")
    sys.exit(any(outcome.wrong or outcome.unusable for outcome in outcomes.values()))


if __name__ == "__main__":
    main()
