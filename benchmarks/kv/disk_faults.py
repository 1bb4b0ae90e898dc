"""Kills processes of the disk store and damages its files, and checks that it serves only what was stored.

    python -m benchmarks.kv.disk_faults --kills 50 --corruptions 10000

Content is a function of the key, so a wrong byte cannot go unnoticed. `--kills`: two processes write, read and evict in
one folder and are killed (SIGKILL) at a random moment; then every block that the folder offers is compared, and a block
is written and read again. `--corruptions`: one of the faults below in a random slot or segment, then every block is
read, each fourth time by a store that was opened after the fault. The exit code is 1 if a wrong block was served, a
sound one was not, or a store could not be used afterwards.
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
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.device import device_facts
from ingot.runtime.kv.disk.index import Place
from ingot.runtime.kv.disk.segment import new_name
from ingot.runtime.kv.disk.slot import record_bytes, slot_bytes
from ingot.runtime.kv.disk.store import BlockUnavailable, DiskStore
from ingot.runtime.kv.keys import BlockContent, block_hash, root_hash

ROOT = root_hash("an artifact", "float32")
OTHER_ROOT = root_hash("another artifact of the same name", "float32")
BLOCK_BYTES = 64 << 10
TOKENS = 16
_HEADER_BYTES = record_bytes(TOKENS * 8, 0)
_RECORD_BYTES = record_bytes(TOKENS * 8, BLOCK_BYTES)
_SLOT_BYTES = slot_bytes(TOKENS * 8, BLOCK_BYTES)
_ENTRY_BYTES = 64  # of a segment's table
_REOPENED = 4  # after each fourth fault

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


@lru_cache(maxsize=64)
def bytes_of(content: BlockContent, size: int = BLOCK_BYTES) -> Bytes:
    """The bytes of a block, which depend on its whole key."""
    seed = int.from_bytes(sha256(b"bytes" + content.hash).digest()[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def open_store(folder: Path, *, num_blocks: int, root: bytes = ROOT) -> DiskStore:
    """A store that holds `num_blocks` blocks."""
    return DiskStore.open(folder, max_bytes=num_blocks * (_SLOT_BYTES + 1024), block_bytes=BLOCK_BYTES, root=root)


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


class Harm(NamedTuple):
    """Keys of the blocks that a fault concerns: all others must be served.

    spoiled     must not be served
    unlisted    are served by a store that is open, and may be missing in one that is opened later
    uncertain   those of them, once it was
    """

    spoiled: frozenset[bytes] = frozenset()
    unlisted: frozenset[bytes] = frozenset()
    uncertain: frozenset[bytes] = frozenset()


@dataclass
class Target:
    """The block to damage and another one of those stored, and a store of another artifact in the same folder."""

    folder: Path
    store: DiskStore
    other: DiskStore
    contents: list[BlockContent]
    victim: BlockContent
    bystander: BlockContent
    chance: random.Random

    def place(self, content: BlockContent) -> Place:
        """The slot of a block."""
        found = self.store._index.places(content.hash)
        assert len(found) == 1, "a block is in two slots"
        return found[0]

    def path(self, content: BlockContent) -> Path:
        """The segment of a block, which an earlier fault may have renamed."""
        inode = os.fstat(self.place(content).segment.file).st_ino
        return next(path for path in (self.folder / "segments").iterdir() if path.lstat().st_ino == inode)

    def read(self, content: BlockContent) -> bytes:
        """All bytes of a block's slot."""
        segment, slot = self.place(content)
        return os.pread(segment.file, _SLOT_BYTES, segment.offset(slot))

    def write(self, content: BlockContent, data: bytes, at: int = 0) -> None:
        """Write to a block's slot, from byte `at` on."""
        segment, slot = self.place(content)
        os.pwrite(segment.file, data, segment.offset(slot) + at)

    def neighbours(self, first_slot: int = 0) -> frozenset[bytes]:
        """The blocks in the victim's segment, from a slot on."""
        segment = self.place(self.victim).segment
        places = {content.hash: self.place(content) for content in self.contents}
        return frozenset(key for key, place in places.items() if place.segment is segment and place.slot >= first_slot)

    @property
    def spoiled(self) -> Harm:
        """Harm to the victim alone."""
        return Harm(spoiled=frozenset([self.victim.hash]))


def _flip(target: Target) -> Harm:
    return _change(target, target.chance.randrange(_RECORD_BYTES), 1 << target.chance.randrange(8))


def _flip_header(target: Target) -> Harm:
    return _change(target, target.chance.randrange(_HEADER_BYTES), target.chance.randrange(1, 256))


def _change(target: Target, at: int, bits: int) -> Harm:
    target.write(target.victim, bytes([target.read(target.victim)[at] ^ bits]), at)
    return target.spoiled


def _zero_pages(target: Target) -> Harm:
    """As after a power failure: some pages were not written."""
    start = target.chance.randrange(0, _RECORD_BYTES, 4096)
    end = min(_SLOT_BYTES, start + 4096 * target.chance.randrange(1, 32))
    target.write(target.victim, bytes(end - start), start)
    return target.spoiled


def _random_bytes(target: Target) -> Harm:
    target.write(target.victim, target.chance.randbytes(512), target.chance.randrange(_RECORD_BYTES - 512))
    return target.spoiled


def _torn_start(target: Target) -> Harm:
    """Another block was being written to the slot: its start is there, and the table names the victim."""
    target.write(target.victim, target.read(target.bystander)[: target.chance.randrange(200, _RECORD_BYTES)])
    return target.spoiled


def _torn_end(target: Target) -> Harm:
    """The victim was being written to a slot of another block: the end is the other's."""
    at = target.chance.randrange(_HEADER_BYTES, _RECORD_BYTES - 16)
    target.write(target.victim, target.read(target.bystander)[at:], at)
    return target.spoiled


def _swap(target: Target) -> Harm:
    first, second = target.read(target.victim), target.read(target.bystander)
    target.write(target.victim, second)
    target.write(target.bystander, first)
    return Harm(spoiled=frozenset([target.victim.hash, target.bystander.hash]))


def _other_block(target: Target) -> Harm:
    """A sound slot, of another block."""
    target.write(target.victim, target.read(target.bystander))
    return target.spoiled


def _other_root(target: Target) -> Harm:
    """The slot of a block of the same tokens of another model with the same name."""
    number = np.frombuffer(target.victim.tokens, np.int64)[0] // TOKENS
    content = content_of(int(number), OTHER_ROOT)
    assert target.other.write(content, bytes_of(content))
    place = target.other._index.place(content.hash)
    assert place
    target.write(target.victim, os.pread(place.segment.file, _SLOT_BYTES, place.segment.offset(place.slot)))
    target.other.remove(content.hash)
    return target.spoiled


def _truncate(target: Target) -> Harm:
    """The segment ends inside the victim's slot."""
    segment, slot = target.place(target.victim)
    os.ftruncate(segment.file, segment.offset(slot) + target.chance.randrange(_RECORD_BYTES))
    return Harm(spoiled=target.neighbours(slot))


def _truncate_and_extend(target: Target) -> Harm:
    """The segment has its size again, and zeros at its end."""
    harm = _truncate(target)
    segment = target.place(target.victim).segment
    os.ftruncate(segment.file, segment.geometry.file_bytes)
    return harm


def _extend(target: Target) -> Harm:
    with target.path(target.victim).open("ab") as file:
        file.write(target.chance.randbytes(target.chance.randrange(1, 5000)))
    return Harm()


def _zero_table(target: Target) -> Harm:
    harm = Harm(unlisted=target.neighbours())
    segment = target.place(target.victim).segment
    os.pwrite(segment.file, bytes(segment.geometry.table_bytes), 0)
    return harm


def _random_table(target: Target) -> Harm:
    harm = Harm(unlisted=target.neighbours())
    segment = target.place(target.victim).segment
    os.pwrite(segment.file, target.chance.randbytes(_ENTRY_BYTES * segment.num_slots), 0)
    return harm


def _swap_entries(target: Target) -> Harm:
    places = target.place(target.victim), target.place(target.bystander)
    entries = [os.pread(segment.file, _ENTRY_BYTES, slot * _ENTRY_BYTES) for segment, slot in places]
    for (segment, slot), entry in zip(places, reversed(entries), strict=True):
        os.pwrite(segment.file, entry, slot * _ENTRY_BYTES)
    return Harm(unlisted=frozenset([target.victim.hash, target.bystander.hash]))


def _rename_segment(target: Target) -> Harm:
    path = target.path(target.victim)
    path.rename(path.with_name(new_name(target.place(target.victim).segment.geometry)))
    return Harm()


def _swap_segments(target: Target) -> Harm:
    first, second, aside = target.path(target.victim), target.path(target.bystander), target.folder / "aside"
    if first != second and first.name.split("-")[1:] == second.name.split("-")[1:]:
        first.rename(aside)
        second.rename(first)
        aside.rename(second)
    return Harm()


def _delete_segment(target: Target) -> Harm:
    harm = Harm(spoiled=target.neighbours())
    target.path(target.victim).unlink()
    return harm


def _symbolic_link(target: Target) -> Harm:
    """A link to a sound copy in the segment's place is not followed."""
    harm, path, copy = Harm(spoiled=target.neighbours()), target.path(target.victim), target.folder / "copy"
    shutil.copyfile(path, copy)
    path.unlink()
    path.symlink_to(copy)
    return harm


FAULTS: dict[str, Callable[[Target], Harm]] = {
    "bit flip": _flip,
    "header": _flip_header,
    "zero pages": _zero_pages,
    "random bytes": _random_bytes,
    "torn start": _torn_start,
    "torn end": _torn_end,
    "swapped slots": _swap,
    "another block's slot": _other_block,
    "another artifact's slot": _other_root,
    "truncated": _truncate,
    "truncated and extended": _truncate_and_extend,
    "extended": _extend,
    "zeroed table": _zero_table,
    "random table": _random_table,
    "swapped entries": _swap_entries,
    "renamed segment": _rename_segment,
    "swapped segments": _swap_segments,
    "deleted segment": _delete_segment,
    "symbolic link": _symbolic_link,
}


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
