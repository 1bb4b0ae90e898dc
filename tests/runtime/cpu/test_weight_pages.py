"""Weights in huge pages: each step, what stops it, and that the bytes are those of the file."""

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ingot.artifact.page_cache import LEAST_BYTES, POPULATE_READ
from ingot.errors import EngineError
from ingot.runtime.cpu.weight_pages import (
    HUGE_BYTES,
    SystemMemory,
    huge_bytes_in,
    place_ranges,
    place_weights,
    read_into,
    weights_in_words,
)
from tests.each_case import each_case
from tests.simulators.simulated_memory import SimulatedMemory


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("weights") / "weights.safetensors"
    block = os.urandom(1 << 20)
    with file.open("wb", buffering=0) as stream:
        for number in range(LEAST_BYTES // len(block) + 1):
            stream.write(number.to_bytes(8, "little") + block[8:])
    return file


READ_AGAIN = "read again from the disk"


@each_case(
    ("memory", "placement", "calls", "done"),
    [
        (SimulatedMemory(cached=False), "mapped", "read", ()),
        (SimulatedMemory(can_collapse=True), "mapped", "", ("collapsed in the page cache",)),
        (SimulatedMemory(), "mapped", "drop read drop read", (READ_AGAIN,)),
        (SimulatedMemory(users=0.5), "copied", "drop read copy", ("copied",)),
        (SimulatedMemory(has_huge_files=False), "copied", "drop read copy", (READ_AGAIN, "copied")),
        (SimulatedMemory(refused={"drop": "Operation not permitted"}), "copied", "drop copy", ("copied",)),
        (SimulatedMemory(refused={POPULATE_READ: "Invalid argument"}), "copied", "copy", ("copied",)),
    ],
)
def test_the_cheapest_step_that_gives_huge_pages_is_taken(
    memory: SimulatedMemory, placement: str, calls: str, done: tuple[str, ...], weights: Path
) -> None:
    placed = place_weights(weights, memory=memory)
    assert (placed.pages.placement, memory.calls, placed.pages.done) == (placement, calls.split(), done)
    assert placed.pages.is_huge
    assert placed.content == weights.read_bytes()


@each_case(
    ("memory", "reason"),
    [
        (SimulatedMemory(users=0.5, free=LEAST_BYTES), "another process uses the file.*; too little memory"),
        (
            SimulatedMemory(has_huge_files=False, free=0),
            "somefs has no huge pages for files on this kernel, or no memory .*; ",
        ),
        (SimulatedMemory(users=1.0, may_be_copied=False), "enabled is never, so a copy would gain nothing"),
        (SimulatedMemory(refused={"drop": "Operation not permitted"}, free=0), r"dropped \(Operation not permitted\)"),
        (SimulatedMemory(process_refusal="no huge pages for this process"), "no huge pages for this process; "),
        (SimulatedMemory(refused={"smaps": "Permission denied"}), "/proc/self/smaps cannot be read"),
        (SimulatedMemory(users=1.0, refused={"map": "No memory"}), "a copy failed: No memory"),
        (SimulatedMemory(users=1.0, anonymous_are_huge=False), "the system gave the copy small pages"),
    ],
)
def test_what_leaves_small_pages_is_named_once_in_a_warning(
    memory: SimulatedMemory, reason: str, weights: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        placed = place_weights(weights, memory=memory)
    assert placed.pages.placement == "mapped"
    assert not placed.pages.is_huge
    assert placed.content == weights.read_bytes()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert caplog.records[0].getMessage().startswith(f"weights: {len(placed.content) / 1e6:.1f} MB mapped, ")
    assert re.search(reason, str(placed.pages)), str(placed.pages)


def test_mapped_is_never_a_copy_and_copied_is_always_one(weights: Path) -> None:
    memory = SimulatedMemory(users=1.0)
    assert place_weights(weights, "mapped", memory=memory).pages.placement == "mapped"
    assert "copy" not in memory.calls
    memory = SimulatedMemory(cached=False)
    assert place_weights(weights, "copied", memory=memory).pages.placement == "copied"
    assert memory.calls == ["copy"]


def test_a_copy_that_is_asked_for_needs_the_memory(weights: Path) -> None:
    size = weights.stat().st_size
    with pytest.raises(EngineError, match=r"is copied, which takes 17\.8 MB, and 10 B of memory are free"):
        place_weights(weights, "copied", reserved_bytes=size, memory=SimulatedMemory(free=size + 10))
    assert place_weights(weights, "copied", memory=SimulatedMemory(free=size)).pages.placement == "copied"


def test_of_a_copy_of_ranges_only_these_are_read(weights: Path) -> None:
    content, few = weights.read_bytes(), [(4096, 1 << 20), (9 << 20, 5000)]
    most = [(4096, LEAST_BYTES)]
    for placement, ranges, is_copied in (
        ("mapped", most, False), ("auto", few, False), ("auto", most, True), ("copied", few, True)
    ):  # fmt: skip
        found = place_ranges(weights, ranges, placement)  # type: ignore[arg-type]  # a word of WeightPlacement
        assert all(found[begin : begin + size] == content[begin : begin + size] for begin, size in ranges)
        assert (found[8:4096] == content[8:4096]) != is_copied, "the first bytes are in no range"


def test_a_copy_of_ranges_that_is_asked_for_needs_the_memory(weights: Path) -> None:
    with pytest.raises(EngineError, match=r"takes 1\.0 MB for this stage, and 0 B of memory are free; set weights to"):
        place_ranges(weights, [(0, 1_000_000)], "copied", SimulatedMemory(free=0))


def test_small_files_are_mapped_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(bytes(LEAST_BYTES - 1))
    memory = SimulatedMemory()
    placed = place_weights(tmp_path / "weights", memory=memory)
    assert (memory.calls, placed.pages.huge_bytes, placed.pages.is_huge) == ([], None, True)


def test_a_file_that_ends_early_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(bytes(10))
    with pytest.raises(OSError, match="the file ends after 10 of 11 bytes"):
        read_into(tmp_path / "weights", memoryview(bytearray(11)))


def test_huge_pages_of_a_mapping_are_counted_in_all_its_parts() -> None:
    smaps = """\
7f0000000000-7f0000200000 r--s 00000000 fe:00 5 /w
Rss:                2048 kB
FilePmdMapped:      2048 kB
7f0000200000-7f0000600000 r--s 00200000 fe:00 5 /w
ShmemPmdMapped:     4096 kB
AnonHugePages:         0 kB
7f0000600000-7f0000800000 rw-p 00000000 00:00 0
AnonHugePages:      2048 kB
"""
    assert huge_bytes_in(smaps, 0x7F0000000000, 0x7F0000600000) == 6 << 20


linux = pytest.mark.skipif(sys.platform != "linux", reason="the calls are Linux's")


@linux
@each_case("placement", ["auto", "mapped", "copied"])
def test_this_system_gives_the_bytes_of_the_file(placement: str, weights: Path) -> None:
    placed = place_weights(weights, placement)  # type: ignore[arg-type]
    assert placed.content.readonly
    assert placed.content == weights.read_bytes()


@linux
def test_this_system_maps_a_file_in_huge_pages_again_after_a_write(weights: Path) -> None:
    copy = weights.with_name("copy")
    copy.write_bytes(weights.read_bytes())
    pages = place_weights(copy, "mapped").pages
    if not pages.is_huge:
        pytest.skip(f"not on this system: {pages}")
    assert (pages.huge_bytes or 0) >= 0.9 * (pages.num_bytes // HUGE_BYTES) * HUGE_BYTES
    memory = SystemMemory()
    assert memory.cached_bytes(memory.map_file(copy)) == pages.num_bytes


@linux
def test_a_process_without_huge_pages_loads_and_says_why(weights: Path) -> None:
    code = (
        "import ctypes, sys; from pathlib import Path; from ingot.runtime.cpu.weight_pages import place_weights\n"
        "assert ctypes.CDLL(None).prctl(41, 1, 0, 0, 0) == 0\n"
        "placed = place_weights(Path(sys.argv[1]))\n"
        "assert placed.content == Path(sys.argv[1]).read_bytes()\n"
        "print(placed.pages)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(weights)], capture_output=True, text=True, check=True)
    assert " mapped, 0 B in huge pages, in " in done.stdout
    assert "huge pages are turned off for this process" in done.stdout


def test_a_look_says_in_which_pages_a_file_is(weights: Path) -> None:
    found = weights_in_words(weights, SimulatedMemory(free=3_000_000))
    assert found["weights"] == "17.8 MB on somefs"
    assert found["page cache"] == "0 B; the rest is read from the disk when it is loaded"
    assert found["free"] == "3.0 MB"
    assert weights_in_words(weights, SimulatedMemory(users=1.0))["page cache"] == "all, 0 B in huge pages"


@linux
def test_copies_of_a_library_are_put_into_huge_pages(weights: Path) -> None:
    """In a process of its own: this one's memory is large."""
    code = (
        "import numpy as np; from ingot.runtime.cpu.weight_pages import collapse_copies\n"
        "copy = np.full(64 << 20, 7, np.uint8)\n"
        "print(collapse_copies(copy.nbytes, 'mapped'), collapse_copies(copy.nbytes, 'auto'), sep='\\n')\n"
        "assert (copy == 7).all()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    mapped, collapsed = done.stdout.splitlines()
    assert mapped == "67.1 MB copied, in 0.00 s"
    assert collapsed.startswith("67.1 MB copied, "), collapsed
