"""What an artifact keeps of its checkpoint: configuration and tokenizer, read back as they were."""

import json
import shutil
from pathlib import Path

import pytest

from ingot.artifact import open_artifact
from ingot.errors import UsageError
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.config.decoder import read_config
from ingot.pipeline.checkpoint.sealed import CONFIG, sealed_checkpoint
from tests.conftest import BuildArtifact
from tests.data_paths import DEMO_MODEL


def test_the_configuration_and_the_tokenizer_are_those_of_the_checkpoint(build_unmeasured: BuildArtifact) -> None:
    original, sealed = Checkpoint.open(DEMO_MODEL), sealed_checkpoint(build_unmeasured("int4-cpu"))
    assert sealed.config == original.config
    assert sealed.generation_config == original.generation_config
    assert read_config(sealed) == read_config(original)
    assert list(sealed.tokenizer_files) == list(original.tokenizer_files)


def test_the_configuration_is_part_of_the_identity(build_unmeasured: BuildArtifact) -> None:
    manifest = build_unmeasured("int4-cpu").manifest
    assert CONFIG in manifest.files


def test_an_artifact_without_its_configuration_says_what_to_do(build_unmeasured: BuildArtifact, tmp_path: Path) -> None:
    old = tmp_path / "old"
    shutil.copytree(build_unmeasured("int4-cpu").path, old)
    manifest = json.loads((old / "manifest.json").read_text())
    del manifest["files"][CONFIG]
    (old / CONFIG).unlink()
    (old / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UsageError, match=r"holds no tokenizer/config\.json.*older Ingot: build it again"):
        sealed_checkpoint(open_artifact(old, verify=False))
