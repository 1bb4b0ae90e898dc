"""Damages are repeated by their seed, and a problem explains itself."""

import json
from pathlib import Path

import numpy as np
import pytest
from benchmarks.kv import disk_faults
from benchmarks.kv.numbered_blocks import content_of

from ingot.runtime.kv.disk.store import BlockUnavailable, DiskStore
from ingot.runtime.kv.keys import BlockContent


def test_damages_are_repeated_by_their_seed(tmp_path: Path) -> None:
    first, second, other = (
        disk_faults.corrupt(tmp_path / name, corruptions=80, seed=seed).as_json()
        for name, seed in (("first", 5), ("second", 5), ("other", 6))
    )
    assert first == second != other
    assert first["problems"] == []


def test_a_sound_block_that_is_not_served_is_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_into, reads = DiskStore.read_into, iter(range(10**6))

    def fail_once(store: DiskStore, content: BlockContent, buffer: np.ndarray) -> None:
        if content == content_of(3) and next(reads) == 1:  # first it is read to see that it was stored
            raise BlockUnavailable("as planted")
        read_into(store, content, buffer)

    monkeypatch.setattr(DiskStore, "read_into", fail_once)
    outcome = disk_faults.corrupt(tmp_path, corruptions=1, seed=2)
    assert (outcome.wrong, outcome.unusable) == (0, 1)
    problem = json.loads(json.dumps(outcome.as_json()))["problems"][0]
    assert (problem["count"], problem["seed"], problem["attempt"], problem["block"]) == ("unusable", 2, 1, 3)
    assert (problem["of"], *outcome.kinds) == (next(iter(outcome.kinds)),) * 2
    assert (problem["expected"], problem["found"]) == ("a sound block that is served", "as planted")
    assert 1 <= problem["counted_since"]["store"]["hits"] <= 3
    assert len(problem["in_index"]) == len(problem["in_tables"]) == len(problem["in_slots"]) == 1
    assert problem["in_tables"][0].startswith(problem["in_index"][0])


def test_a_wrong_byte_is_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_into = DiskStore.read_into

    def change(store: DiskStore, content: BlockContent, buffer: np.ndarray) -> None:
        read_into(store, content, buffer)
        if content == content_of(3):
            buffer[100] ^= 1

    monkeypatch.setattr(DiskStore, "read_into", change)
    outcome = disk_faults.corrupt(tmp_path, corruptions=1, seed=2)
    assert outcome.wrong == len(outcome.problems) > 0
    assert {problem["found"] for problem in outcome.problems} == {"1 bytes differ, the first at 100"}
