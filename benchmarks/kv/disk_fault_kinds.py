"""Faults of the files of a disk store: each damages a random slot or segment, and says which blocks that concerns."""

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.kv.numbered_blocks import BLOCK_BYTES, OTHER_ROOT, SLOT_BYTES, TOKENS, bytes_of, content_of
from ingot.runtime.kv.disk.index import DiskPlace
from ingot.runtime.kv.disk.segment import new_name
from ingot.runtime.kv.disk.slot import record_bytes
from ingot.runtime.kv.disk.store import DiskStore
from ingot.runtime.kv.keys import BlockContent

_HEADER_BYTES = record_bytes(TOKENS * 8, 0)
_RECORD_BYTES = record_bytes(TOKENS * 8, BLOCK_BYTES)
_ENTRY_BYTES = 64  # of a segment's table


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

    def place(self, content: BlockContent) -> DiskPlace:
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
        return os.pread(segment.file, SLOT_BYTES, segment.offset(slot))

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
    end = min(SLOT_BYTES, start + 4096 * target.chance.randrange(1, 32))
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
    target.write(target.victim, os.pread(place.segment.file, SLOT_BYTES, place.segment.offset(place.slot)))
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
