"""Requests as data: JSON for the building process, keys for the cache."""

from dataclasses import replace
from pathlib import Path

from ingot.pipeline.targets.tensorrt.plan_request import PlanRequest, Profile


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


def test_the_key_depends_on_everything_in_the_build_but_not_on_the_folder(tmp_path: Path) -> None:
    asked = request(tmp_path)
    key = asked.key()
    (tmp_path / "elsewhere").mkdir()
    assert request(tmp_path / "elsewhere").key() == key
    others = [replace(asked, sms=(86,)), replace(asked, profiles=(Profile.of(1),)), replace(asked, rows={"x0": (32,)})]
    assert len({key, *(other.key() for other in others), replace(asked, library_version="1.8").key()}) == 5
    (tmp_path / "weights.safetensors").write_bytes(b"other weights")
    assert asked.key() != key
