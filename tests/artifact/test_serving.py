"""Serving options: sizes as text, and where an artifact keeps them."""

import json
from pathlib import Path
from typing import get_args

import pytest
from pydantic import ValidationError

from ingot.artifact import MANIFEST, ArtifactWriter, Program, open_artifact
from ingot.artifact.serving import KVPolicy, ServingOptions
from ingot.errors import ArtifactError
from ingot.options import parse_bytes
from ingot.runtime.kv.eviction import POLICIES
from tests.artifact.tiny_artifact import KV, MODEL, reseal, seal
from tests.each_case import each_case


def seal_with(target: Path, serving: ServingOptions | None) -> Path:
    with ArtifactWriter(target) as writer:
        writer.describe(name="t", model=MODEL, kv=KV, target="cpu", program=Program(), versions={}, serving=serving)
        return writer.seal()


@each_case(
    ("text", "count"),
    [("0", 0), ("4096", 4096), ("4GiB", 4 << 30), ("1.5 GB", 1_500_000_000), (" 8kB ", 8000), ("2TiB", 2 << 40)],
)
def test_a_size_may_have_a_unit(text: str, count: int) -> None:
    assert parse_bytes(text) == count
    assert ServingOptions.model_validate({"kv_host_bytes": text}).kv_host_bytes == count


@each_case("text", ["", "GiB", "-1", "4 gib", "4GX", "4  GiB", "1e3", "0x10", "٤GiB", "9" * 17])
def test_other_text_is_not_a_size(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a size; write a number of bytes, or one with a unit: kB, MB, .* TiB"):
        parse_bytes(text)


def test_policies_are_those_of_the_runtime() -> None:
    assert set(get_args(KVPolicy)) == set(POLICIES)


def test_only_what_is_set_is_given() -> None:
    assert ServingOptions().given() == {}
    assert ServingOptions(kv_host_bytes=0, kv_policy="arc").given() == {"kv_host_bytes": 0, "kv_policy": "arc"}
    with pytest.raises(ValidationError, match="kv_bytes"):
        ServingOptions(kv_bytes=0)


def test_options_are_sealed_by_the_digest_of_the_manifest_and_not_by_the_identity(tmp_path: Path) -> None:
    plain = open_artifact(seal_with(tmp_path / "plain", None)).manifest
    served = open_artifact(seal_with(tmp_path / "served", ServingOptions(kv_host_bytes=1 << 30))).manifest
    assert served.serving == ServingOptions(kv_host_bytes=1 << 30)
    assert served.identity == plain.identity
    assert served.digest != plain.digest


def test_cores_are_sealed_as_numbers(tmp_path: Path) -> None:
    folder = seal_with(tmp_path / "t", ServingOptions.model_validate({"cpu_affinity": "3,0-1"}))
    assert json.loads((folder / MANIFEST).read_text())["serving"]["cpu_affinity"] == [3, 0, 1]
    serving = open_artifact(folder).manifest.serving
    assert serving is not None
    assert serving.cpu_affinity == (3, 0, 1)


def test_options_that_were_changed_after_the_seal_are_refused(tmp_path: Path) -> None:
    file = seal_with(tmp_path / "t", ServingOptions(kv_host_bytes=1)) / MANIFEST
    file.write_text(file.read_text().replace('"kv_host_bytes": 1', '"kv_host_bytes": 2'))
    with pytest.raises(ArtifactError, match="its own digest does not match"):
        open_artifact(tmp_path / "t")


def test_a_manifest_of_an_older_version_has_none(tmp_path: Path) -> None:
    folder = seal(tmp_path / "t")
    reseal(folder, lambda raw: raw.pop("serving"))
    assert "serving" not in json.loads((folder / MANIFEST).read_text())
    assert open_artifact(folder).manifest.serving is None


def test_a_name_that_is_not_fit_for_a_folder_is_refused(tmp_path: Path) -> None:
    folder = seal(tmp_path / "t")
    reseal(folder, lambda raw: raw.update(name="../elsewhere"))
    with pytest.raises(ArtifactError, match="name: String should match pattern"):
        open_artifact(folder)
