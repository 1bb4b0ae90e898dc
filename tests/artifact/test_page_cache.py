"""The page cache of large files: empty after a build, filled by the check of digests."""

import os
import sys
from pathlib import Path

import pytest

from ingot.artifact import ArtifactWriter, Program, open_artifact
from ingot.artifact.page_cache import LEAST_BYTES, drop_from_cache, read_in_huge_pages
from ingot.file_systems import file_system
from ingot.runtime.cpu.weight_pages import SystemMemory
from tests.artifact.tiny_artifact import KV, MODEL

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the calls are Linux's")


def cached_bytes(file: Path) -> int:
    memory = SystemMemory()
    return memory.cached_bytes(memory.map_file(file))


def test_a_sealed_artifact_is_not_cached_until_it_is_read(tmp_path: Path) -> None:
    weights = os.urandom(LEAST_BYTES)
    with ArtifactWriter(tmp_path / "artifact") as writer:
        (writer.path / "weights").write_bytes(weights)
        writer.describe(name="t", model=MODEL, kv=KV, target="cpu", program=Program(), versions={})
        file = writer.seal() / "weights"
    left = cached_bytes(file)
    assert open_artifact(file.parent).manifest.files["weights"].bytes == LEAST_BYTES
    assert cached_bytes(file) == LEAST_BYTES
    assert file.read_bytes() == weights
    if left > LEAST_BYTES / 2:
        pytest.skip(f"{file_system(file)} keeps its files in memory")


def test_what_cannot_be_dropped_is_named(tmp_path: Path) -> None:
    assert drop_from_cache(tmp_path / "none") == "No such file or directory"


def test_reading_ahead_takes_any_part_of_any_file(tmp_path: Path) -> None:
    for size in (0, 5, LEAST_BYTES + 5):
        (tmp_path / "file").write_bytes(bytes(size))
        handle = os.open(tmp_path / "file", os.O_RDONLY)
        for begin in (0, 4096, LEAST_BYTES, 1 << 40):
            read_in_huge_pages(handle, begin, 1 << 20)
        os.close(handle)
