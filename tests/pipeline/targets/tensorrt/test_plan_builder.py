"""The cache of plans, whose entries are complete or absent, and the process that builds a plan."""

import sys
from pathlib import Path

import pytest

from ingot.errors import BuildError
from ingot.pipeline.targets.tensorrt.plan_builder import PlanCache, build_or_recall
from ingot.pipeline.targets.tensorrt.plan_request import PlanRequest, Profile

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


def test_a_builder_that_crashes_is_an_error_with_the_end_of_its_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    worker = tmp_path / "worker.sh"
    message = '{"level": 40, "message": "Failed to parse the ONNX model"}'
    worker.write_text(f"#!/bin/sh\necho '{message}' >&2\nkill -SEGV $$\n")
    worker.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(worker))
    (tmp_path / "segment.onnx").write_bytes(b"")
    request = PlanRequest(
        str(tmp_path / "segment.onnx"), None, {"x": (64,)}, (), (Profile.of(1),), (89,), "tensorrt-rtx", "1.7.1.116"
    )
    with pytest.raises(BuildError, match=r"process that builds a TensorRT plan ended with signal 11: Failed to parse"):
        build_or_recall(request, PlanCache(tmp_path / "plans"))
    assert list((tmp_path / "plans").iterdir()) == []
