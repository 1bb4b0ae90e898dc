"""Kills processes of the disk store and damages its files, and checks that it serves only what was stored.

    python -m benchmarks.kv.disk_faults --kills 50 --corruptions 10000

Content is a function of the key, so a wrong byte cannot go unnoticed. `--kills`: two processes write, read and evict in
one folder and are killed (SIGKILL) at a random moment; then every block that the folder offers is compared, and a block
is written and read again. `--corruptions`: one of the faults below in a random file, then every block that it concerns
is read. The exit code is 1 if a wrong block was served or a store could not be used afterwards.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.device import device_facts
from ingot.runtime.kv.disk.block_file import file_name
from ingot.runtime.kv.disk.store import BlockUnavailable, DiskStore
from ingot.runtime.kv.keys import BlockContent, block_hash, root_hash

ROOT = root_hash("an artifact", "float32")
OTHER_ROOT = root_hash("another artifact of the same name", "float32")
BLOCK_BYTES = 64 << 10
TOKENS = 16
_FIELD_BYTES = 136  # fixed fields and checksum, before the tokens

Bytes = NDArray[np.uint8]


@dataclass
class Outcome:
    """Attempts, and their outcomes. `wrong` and `unusable` must be 0."""

    tried: int = 0
    served: int = 0
    wrong: int = 0
    refused: int = 0
    unusable: int = 0
    kinds: Counter[str] = field(default_factory=Counter)


def content_of(number: int, root: bytes = ROOT) -> BlockContent:
    """Key of block `number`: first of a chain if even, else it follows the block before it."""
    tokens = np.arange(number * TOKENS, (number + 1) * TOKENS, dtype=np.int64).tobytes()
    parent = content_of(number - 1, root).hash if number % 2 else root
    return BlockContent(block_hash(parent, tokens), parent, tokens)


def bytes_of(content: BlockContent, size: int = BLOCK_BYTES) -> Bytes:
    """The bytes of a block, which depend on its whole key."""
    seed = int.from_bytes(sha256(b"bytes" + content.hash).digest()[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def open_store(folder: Path, *, num_blocks: int, root: bytes = ROOT) -> DiskStore:
    """A store that holds `num_blocks` blocks."""
    size = BLOCK_BYTES + 1024
    return DiskStore.open(folder, max_bytes=num_blocks * size, block_bytes=BLOCK_BYTES, root=root)


def path_of(folder: Path, content: BlockContent) -> Path:
    """The file of a block."""
    name = file_name(content.hash)
    return folder / name[0] / name


def kill_writers(folder: Path, kills: int, seed: int) -> Outcome:
    """Kill two busy processes `kills` times, each time at another moment, and check all that they left."""
    outcome, chance = Outcome(), random.Random(seed)
    for _ in range(kills):
        workers = [_start_worker(folder, chance.randrange(1 << 30)) for _ in range(2)]
        time.sleep(chance.uniform(0.01, 0.25))
        for worker in workers:
            worker.send_signal(signal.SIGKILL)
            worker.wait()
        outcome.tried += 1
        _check_all(folder, outcome)
    return outcome


def corrupt(folder: Path, corruptions: int, seed: int) -> Outcome:
    """Damage one file at a time and read every block that the damage concerns."""
    outcome, chance = Outcome(), random.Random(seed)
    store, other = open_store(folder, num_blocks=64), open_store(folder, num_blocks=64, root=OTHER_ROOT)
    contents = [content_of(number) for number in range(16)]
    for _ in range(corruptions):
        for content in contents:
            store.write(content, bytes_of(content))
        kind = chance.choice(list(FAULTS))
        victim, bystander = chance.sample(contents, 2)
        FAULTS[kind](Target(folder, victim, bystander, chance, other))
        outcome.tried += 1
        outcome.kinds[kind] += 1
        damaged = (victim, bystander) if kind == "swap" else (victim,)
        for content in (victim, bystander):
            _read(store, content, outcome, expect=content not in damaged)
    usable = all(store.write(content, bytes_of(content)) for content in contents)
    outcome.unusable += store.failure is not None or not usable
    store.close()
    other.close()
    return outcome


@dataclass
class Target:
    """The file to damage, another one, and a store of another artifact in the same folder."""

    folder: Path
    victim: BlockContent
    bystander: BlockContent
    chance: random.Random
    other: DiskStore

    @property
    def path(self) -> Path:
        """The victim's file."""
        return path_of(self.folder, self.victim)

    def rewrite(self, change: Callable[[bytearray], bytes]) -> None:
        """Replace the file by a changed copy."""
        self.path.write_bytes(change(bytearray(self.path.read_bytes())))


def _flip(target: Target) -> None:
    def change(data: bytearray) -> bytes:
        data[target.chance.randrange(len(data))] ^= 1 << target.chance.randrange(8)
        return bytes(data)

    target.rewrite(change)


def _flip_header(target: Target) -> None:
    def change(data: bytearray) -> bytes:
        data[target.chance.randrange(_FIELD_BYTES + TOKENS * 8)] ^= target.chance.randrange(1, 256)
        return bytes(data)

    target.rewrite(change)


def _truncate(target: Target) -> None:
    os.truncate(target.path, target.chance.randrange(target.path.stat().st_size))


def _extend(target: Target) -> None:
    with target.path.open("ab") as file:
        file.write(target.chance.randbytes(target.chance.randrange(1, 5000)))


def _zero_fill(target: Target) -> None:
    """As after a power failure: the size is right, some pages were not written."""

    def change(data: bytearray) -> bytes:
        size, start = len(data), target.chance.randrange(0, len(data), 4096)
        end = min(size, start + 4096 * target.chance.randrange(1, 32))
        data[start:end] = bytes(end - start)
        return bytes(data)

    target.rewrite(change)


def _random_page(target: Target) -> None:
    def change(data: bytearray) -> bytes:
        start = target.chance.randrange(len(data) - 512)
        data[start : start + 512] = target.chance.randbytes(512)
        return bytes(data)

    target.rewrite(change)


def _swap(target: Target) -> None:
    aside = target.folder / "aside"
    second = path_of(target.folder, target.bystander)
    target.path.rename(aside)
    second.rename(target.path)
    aside.rename(second)


def _rename(target: Target) -> None:
    """Another block's file under this block's name: a sound file, and not this block."""
    shutil.copyfile(path_of(target.folder, target.bystander), target.path)


def _other_root(target: Target) -> None:
    """A block of the same tokens of another model with the same name, moved to this block's name."""
    number = np.frombuffer(target.victim.tokens, np.int64)[0] // TOKENS
    content = content_of(int(number), OTHER_ROOT)
    assert target.other.write(content, bytes_of(content))
    path_of(target.folder, content).rename(target.path)
    target.other.remove(content.hash)


def _symbolic_link(target: Target) -> None:
    copy = target.folder / "copy"
    shutil.copyfile(target.path, copy)
    target.path.unlink()
    target.path.symlink_to(copy)


FAULTS: dict[str, Callable[[Target], None]] = {
    "bit flip": _flip,
    "header": _flip_header,
    "truncate": _truncate,
    "extend": _extend,
    "zero pages": _zero_fill,
    "random page": _random_page,
    "swap": _swap,
    "rename": _rename,
    "other root": _other_root,
    "symbolic link": _symbolic_link,
}


def _read(store: DiskStore, content: BlockContent, outcome: Outcome, *, expect: bool) -> None:
    buffer = np.empty(BLOCK_BYTES, np.uint8)
    try:
        store.read_into(content, buffer)
    except BlockUnavailable:
        outcome.refused += 1
        outcome.unusable += expect  # a sound file must be served
    else:
        outcome.served += 1
        outcome.wrong += not expect or not np.array_equal(buffer, bytes_of(content))


def _check_all(folder: Path, outcome: Outcome) -> None:
    outcome.kinds["unfinished files"] += len(list((folder / "tmp").iterdir()))
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


_WORKER_BLOCKS = 100


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
