"""Kills processes of the disk store and damages its files, and checks that it serves only what was stored.

    python -m benchmarks.kv.disk_faults --kills 50 --corruptions 10000

`--kills`: two processes write, read and evict in one folder and are killed (SIGKILL) at a random moment; then every
block that the folder offers is compared, and a block is written and read again. `--corruptions`: one of the faults of
`disk_fault_kinds`, then every block is read, each fourth time by a store that was opened after the fault. The exit code
is 1 if a wrong block was served, a sound one was not, or a store could not be used afterwards: `problems` has the
attempt, the block, what was expected, what the stores counted and logged since, and where the block is.

The damages depend on the seed alone: names of segments and times of use, which decide what slots are used, are made
from it. So `--kills 0 --seed S --corruptions N` repeats a problem of seed S at attempt N.
"""

import json
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from unittest import mock

import click
import numpy as np

from benchmarks.device import device_facts
from benchmarks.kv.disk_fault_kinds import FAULTS, Harm, Target
from benchmarks.kv.disk_fault_report import Outcome
from benchmarks.kv.numbered_blocks import BLOCK_BYTES, OTHER_ROOT, Bytes, bytes_of, content_of, open_store
from ingot.runtime.kv.disk.store import BlockUnavailable, DiskStore
from ingot.runtime.kv.keys import BlockContent

_REOPENED = 4  # after each fourth fault
_WORKER_BLOCKS = 100
_MOST_ROUNDS = 5  # of healing
_TICK_NS = 100_000


def kill_writers(folder: Path, kills: int, seed: int) -> Outcome:
    """Kill two busy processes `kills` times, each time at another moment, and check all that they left."""
    outcome, chance = Outcome(seed), random.Random(seed)
    with outcome.logged():
        for _ in range(kills):
            workers = [_start_worker(folder, chance.randrange(1 << 30)) for _ in range(2)]
            seconds = chance.uniform(0.01, 0.25)
            time.sleep(seconds)
            outcome.begin(f"kill after {seconds:.3f} s")
            for worker in workers:
                worker.send_signal(signal.SIGKILL)
                if worker.wait() != -signal.SIGKILL:
                    outcome.note("wrong", "a process that ends when it is killed", f"status {worker.returncode}")
            _check_all(folder, outcome)
    return outcome


def corrupt(folder: Path, corruptions: int, seed: int) -> Outcome:
    """Damage one slot or segment at a time and read every block."""
    outcome, chance = Outcome(seed), random.Random(seed)
    with outcome.logged(), _repeatable(seed):
        store, other = open_store(folder, num_blocks=64), open_store(folder, num_blocks=64, root=OTHER_ROOT)
        contents = [content_of(number) for number in range(16)]
        for _ in range(corruptions):
            _heal(store, contents, outcome)
            kind = chance.choice(list(FAULTS))
            outcome.begin(kind)
            outcome.kinds[kind] += 1
            outcome.watch(store=store, other=other)
            victim, bystander = chance.sample(contents, 2)
            harm = FAULTS[kind](Target(folder, store, other, contents, victim, bystander, chance))
            if chance.randrange(_REOPENED) == 0:
                store.close()
                store = open_store(folder, num_blocks=64)
                outcome.watch(store=store)
                harm = harm._replace(uncertain=harm.unlisted)
            for content in contents:
                _read(store, content, outcome, expect=_expected(harm, content))
        if store.failure is not None:
            outcome.note("unusable", "a store that works", store.failure, store=store)
        _heal(store, contents, outcome)
        store.close()
        other.close()
    return outcome


def _expected(harm: Harm, content: BlockContent) -> bool | None:
    """Whether a block must be served after a fault; None where it may be."""
    if content.hash in harm.uncertain - harm.spoiled:
        return None
    return content.hash not in harm.spoiled


@contextmanager
def _repeatable(seed: int) -> Iterator[None]:
    """Take the random names of files from the seed, and times of use from a clock that goes on with each look."""
    names, times = random.Random(f"names {seed}"), count(time.time_ns(), _TICK_NS)
    with (
        mock.patch.object(secrets, "token_hex", lambda num_bytes: names.randbytes(num_bytes).hex()),
        mock.patch.object(time, "time_ns", times.__next__),
    ):
        yield


def _heal(store: DiskStore, contents: list[BlockContent], outcome: Outcome) -> None:
    """Store each block once. One that a damaged table promises is found missing when it is read, and written then."""
    for _ in range(_MOST_ROUNDS):
        for content in contents:
            if len(store._index.places(content.hash)) > 1:
                store.remove(content.hash)
            if not store.write(content, bytes_of(content)):
                outcome.note("unusable", "a block that is stored", "refused", store=store, content=content)
        missing = [content for content in contents if not _is_served_once(store, content, outcome)]
        if not missing:
            return
    found = f"not so after it was written {_MOST_ROUNDS} times"
    outcome.note("unusable", "a block that is in one slot, and is served", found, store=store, content=missing[0])


def _is_served_once(store: DiskStore, content: BlockContent, outcome: Outcome) -> bool:
    buffer = np.empty(BLOCK_BYTES, np.uint8)
    try:
        store.read_into(content, buffer)
    except BlockUnavailable:
        return False
    _compare(store, content, buffer, outcome)
    return len(store._index.places(content.hash)) == 1


def _read(store: DiskStore, content: BlockContent, outcome: Outcome, *, expect: bool | None) -> None:
    """Read a block that must be served, must not, or (None) may be."""
    buffer = np.empty(BLOCK_BYTES, np.uint8)
    try:
        store.read_into(content, buffer)
    except BlockUnavailable as error:
        outcome.refused += 1
        if expect is True:
            outcome.note("unusable", "a sound block that is served", str(error), store=store, content=content)
    else:
        outcome.served += 1
        if expect is False:
            outcome.note("wrong", "a damaged block that is not served", "served", store=store, content=content)
        else:
            _compare(store, content, buffer, outcome)


def _compare(store: DiskStore, content: BlockContent, buffer: Bytes, outcome: Outcome) -> None:
    differing = np.flatnonzero(buffer != bytes_of(content))
    if len(differing):
        found = f"{len(differing)} bytes differ, the first at {differing[0]}"
        outcome.note("wrong", "the bytes that were stored", found, store=store, content=content)


def _check_all(folder: Path, outcome: Outcome) -> None:
    outcome.kinds["unfinished segments"] += len(list((folder / "tmp").iterdir()))
    store = open_store(folder, num_blocks=_WORKER_BLOCKS)
    outcome.watch(store=store)
    left = [path.name for path in (folder / "tmp").iterdir()]
    if left:
        outcome.note("unusable", "no temporary files of processes that were killed", ", ".join(left), store=store)
    for number in range(2 * _WORKER_BLOCKS):
        content = content_of(number)
        if store.contains(content.hash):
            _read(store, content, outcome, expect=True)
    extra = content_of(10**6 + outcome.tried)
    if not store.write(extra, bytes_of(extra)):
        outcome.note("unusable", "a block that is stored", "refused", store=store, content=extra)
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
    result = {name: outcome.as_json() for name, outcome in outcomes.items()}
    text = json.dumps({"device": device_facts(), **result}, indent=1)
    print(text)
    if output:
        output.write_text(text + "\n")
    sys.exit(any(outcome.wrong or outcome.unusable for outcome in outcomes.values()))


if __name__ == "__main__":
    main()
