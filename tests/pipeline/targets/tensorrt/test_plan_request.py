"""The cache of plans: keys from inputs, entries that are whole or not there."""

from dataclasses import replace
from pathlib import Path

import pytest

from ingot.pipeline.targets.tensorrt.plan_request import PlanCache, PlanRequest, Profile

KEY = "0123456789abcdef" * 4


def request(folder: Path) -> PlanRequest:
    (folder / "segment.onnx").write_bytes(b"graph")
    (folder / "weights.safetensors").write_bytes(b"weights")
    return PlanRequest(
        onnx=str(folder / "segment.onnx"),
        data=str(folder / "weights.safetensors"),
        rows={"x0": (64,), "position_ids": ()},
        vectors=("norm",),
        profiles=(Profile.of(1), Profile(2, 8, 8)),
        sms=(86, 89),
        library="tensorrt-rtx",
        library_version="1.7.1.116",
    )


def test_a_request_crosses_processes_unchanged(tmp_path: Path) -> None:
    asked = request(tmp_path)
    assert PlanRequest.from_json(asked.to_json()) == asked


def test_the_key_follows_all_that_goes_into_the_build_and_not_where_it_lies(tmp_path: Path) -> None:
    asked = request(tmp_path)
    key = asked.key()
    (tmp_path / "elsewhere").mkdir()
    assert request(tmp_path / "elsewhere").key() == key
    others = [replace(asked, sms=(86,)), replace(asked, profiles=(Profile.of(1),)), replace(asked, rows={"x0": (32,)})]
    assert len({key, *(other.key() for other in others), replace(asked, library_version="1.8").key()}) == 5
    (tmp_path / "weights.safetensors").write_bytes(b"other weights")
    assert asked.key() != key


def test_what_was_put_in_is_found_until_it_is_damaged_or_forgotten(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path / "plans")
    assert cache.find(KEY) is None
    with cache.new_entry(KEY) as file:
        file.write_bytes(b"a plan")
    found = cache.find(KEY)
    assert found is not None
    assert found.read_bytes() == b"a plan"
    found.write_bytes(b"a pla?")
    assert cache.find(KEY) is None
    with cache.new_entry(KEY) as file:
        file.write_bytes(b"the plan again")
    assert cache.find(KEY) == found
    cache.forget(KEY)
    assert cache.find(KEY) is None
    assert list(cache.folder.iterdir()) == []


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path)
    with pytest.raises(RuntimeError), cache.new_entry(KEY) as file:
        file.write_bytes(b"half a pl")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_the_cache_lies_where_ingots_cache_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path))
    assert PlanCache().folder == tmp_path / "plans"
