"""The cache of plans: entries are complete or absent."""

from pathlib import Path

import pytest

from ingot.pipeline.targets.tensorrt.plan_builder import PlanCache

KEY = "0123456789abcdef" * 4


def test_an_entry_is_found_until_it_is_damaged_or_forgotten(tmp_path: Path) -> None:
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


def test_the_folder_is_in_ingots_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path))
    assert PlanCache().folder == tmp_path / "plans"
