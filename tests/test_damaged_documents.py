"""No damage to a JSON document, however well sealed, ends in a foreign exception, or takes memory without a bound.

A few hundred damages of each document run here. To look for more: python -m tests.fuzz_worker, with other seeds.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ingot.artifact import Artifact, open_artifact
from ingot.artifact.programs.expert_choices import EXPERTS_FILE
from ingot.errors import ArtifactError, CheckpointError, IngotError
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.runtime import Engine
from tests.artifact.tiny_artifact import reseal
from tests.conftest import BuildArtifact
from tests.data_paths import ROOT
from tests.each_case import each_case
from tests.parity import CHECKPOINTS
from tests.pipeline.tiny_checkpoint import copy_fixture


@pytest.fixture(scope="module")
def artifact(build_unmeasured: BuildArtifact) -> Artifact:
    return build_unmeasured("fp32-cpu", CHECKPOINTS / "llama", "cpu.engine=onnxruntime")


@pytest.fixture(scope="module")
def native(build_unmeasured: BuildArtifact) -> Artifact:
    return build_unmeasured("fp32-cpu", CHECKPOINTS / "llama", "cpu.engine=native")


@pytest.fixture(scope="module")
def split(build_unmeasured: BuildArtifact) -> Artifact:
    place = ("devices=[{cpu: 1GiB}, {cpu: 1GiB}]", "place={layers.1: 'cpu:1'}")
    return build_unmeasured("fp32-cpu", CHECKPOINTS / "llama", "cpu.engine=native", *place)


def escaped(use: str, folder: Path, document: str, count: int) -> list[list[str]]:
    """Damages whose exceptions are not IngotErrors, found by a process of its own."""
    command = [sys.executable, "-m", "tests.fuzz_worker", use, str(folder), document, "0", str(count)]
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[list[str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("use", "document", "count"),
    [
        ("run", "manifest.json", 200),
        ("run", "program/weights.safetensors", 100),
        ("export", "tokenizer/config.json", 100),
        ("export", "tokenizer/generation_config.json", 30),
    ],
)
def test_a_damaged_document_of_an_artifact_is_one_error(
    artifact: Artifact, use: str, document: str, count: int
) -> None:
    assert escaped(use, artifact.path, document, count) == []


@pytest.mark.parametrize(
    ("use", "document", "count"),
    [
        ("run", "manifest.json", 100),
        ("run", "program/operations.json", 200),
        ("run", "program/weights.safetensors", 50),
        ("export", "program/operations.json", 100),
    ],
)
def test_a_damaged_document_of_a_native_artifact_is_one_error(
    native: Artifact, use: str, document: str, count: int
) -> None:
    assert escaped(use, native.path, document, count) == []


@pytest.mark.parametrize(("document", "count"), [("program/stages.json", 200), ("program/operations.json", 50)])
def test_a_damaged_document_of_an_artifact_in_stages_is_one_error(split: Artifact, document: str, count: int) -> None:
    assert escaped("run", split.path, document, count) == []


def test_damaged_choices_of_experts_are_one_error(build_unmeasured: BuildArtifact, upcycled: Path) -> None:
    text = f"calibration={{text: {upcycled / 'heldout.txt'}, sequences: 4, sequence_tokens: 64}}"
    artifact = build_unmeasured("int8-cpu", upcycled, text)
    assert escaped("experts", artifact.path, EXPERTS_FILE, 100) == []


@each_case(
    ("name", "document", "count"),
    [
        ("llama", "config.json", 100),
        ("llama", "generation_config.json", 30),
        ("llama", "model.safetensors", 100),
        ("llama-sharded", "model.safetensors.index.json", 100),
        ("gemma3_text", "config.json", 100),
        ("phi3-longrope-long", "config.json", 100),
    ],
)
def test_a_damaged_document_of_a_checkpoint_is_one_error(name: str, document: str, count: int) -> None:
    assert escaped("build", CHECKPOINTS / name, document, count) == []


Change = Callable[[dict[str, Any]], object]

RESEALED: dict[str, tuple[Change, str]] = {
    "a step reads an unknown value": (
        lambda raw: raw["program"]["steps"][2].update(inputs=["nowhere"]),
        "step 2 of the program reads 'nowhere', which no step before it makes",
    ),
    "a step reads a value before it is made": (
        lambda raw: raw["program"]["steps"].reverse(),
        "step 0 of the program reads 'layers.2.self_attn.attention', which no step before it makes",
    ),
    "a step makes a value that is not described": (
        lambda raw: raw["program"]["values"].pop("embed_tokens"),
        "step 0 of the program makes 'embed_tokens', whose type and shape the manifest does not give",
    ),
    "a step makes a value twice": (
        lambda raw: raw["program"]["steps"][0].update(outputs=["embed_tokens"] * 2),
        "step 0 of the program makes 'embed_tokens', which exists already",
    ),
    "no step makes logits": (lambda raw: raw["program"]["steps"].pop(), "does not make 'logits' as float32"),
    "logits of another vocabulary": (
        lambda raw: raw["program"]["values"]["logits"].update(columns=127),
        r"does not make 'logits' as float32 \[logits, 128\]",
    ),
    "an input of another type": (
        lambda raw: raw["program"]["values"]["input_ids"].update(dtype="float32"),
        r"the program's input 'input_ids' is not described as int64 \[tokens\]",
    ),
    "a segment that is not listed": (
        lambda raw: raw["program"]["steps"][0].update(file="tokenizer/none.onnx"),
        "step 0 of the program needs the file 'tokenizer/none.onnx', which the manifest does not list",
    ),
    "a layer twice": (
        lambda raw: raw["program"]["steps"][3].update(layer=0),
        "attention of layer 0 is computed by 2 steps",
    ),
    "a layer that the pool does not have": (
        lambda raw: raw["program"]["steps"][1].update(layer=3),
        "attention of layer 3: the KV pool has 3 layers",
    ),
    "a window that is not the KV geometry's": (
        lambda raw: raw["program"]["steps"][1].update(window=4),
        "attention of layer 0 has a window of 4 tokens; the KV geometry has 0",
    ),
    "sizes for another number of layers": (
        lambda raw: raw["kv"].update(head_dim=[16, 32]),
        "head_dim has 2 entries; it needs one for each of the 3 layers",
    ),
    "max_batch_tokens": (
        lambda raw: raw.update(max_batch_tokens=10**12),
        r"max_batch_tokens: Input should be less than or equal to 1048576 \(it is 1000000000000\)",
    ),
    "max_batch_tokens true": (lambda raw: raw.update(max_batch_tokens=True), "max_batch_tokens: Input should be a"),
    "a KV type": (lambda raw: raw["kv"].update(dtype="int3"), "kv.dtype: Input should be 'float32'"),
    "odd int4": (
        lambda raw: raw["kv"].update(dtype="int4", head_dim=7),
        "int4 stores two dims in a byte",
    ),
    "huge blocks": (lambda raw: raw["kv"].update(block_tokens=10**9), "kv.block_tokens: Input should be less than"),
    "huge columns": (
        lambda raw: raw["program"]["values"]["layers.0.mlp.residual"].update(columns=2**31 - 1),
        "the values between the program's steps take .* TB for .* tokens, and this machine has",
    ),
    "schema 0": (
        lambda raw: raw.update(schema_version=0),
        "schema_version: Input should be greater than or equal to 1",
    ),
    "schema -1": (lambda raw: raw.update(schema_version=-1), "schema_version: Input should be greater"),
    "schema true": (lambda raw: raw.update(schema_version=True), "schema_version: Input should be a valid integer"),
    "schema text": (lambda raw: raw.update(schema_version="2"), "schema_version: Input should be a valid integer"),
    "schema of another age": (lambda raw: raw.update(schema_version=10**400), "schema_version is 1000.*update Ingot"),
    "infinite scale": (
        lambda raw: raw["program"]["steps"][1].update(scale=1e999),
        "Infinity, which JSON does not have",
    ),
    "no steps": (lambda raw: raw["program"].update(steps=[]), "has no steps for onnxruntime"),
    "an engine of GPUs": (lambda raw: raw.update(engine="cuda"), "the program has no launches, but the engine is cuda"),
}


@each_case("case", RESEALED)
def test_a_manifest_with_right_digests_and_wrong_content_is_refused(
    artifact: Artifact, tmp_path: Path, case: str
) -> None:
    change, message = RESEALED[case]
    folder = shutil.copytree(artifact.path, tmp_path / "a")
    reseal(folder, change)
    with pytest.raises(IngotError, match=message):
        Engine.load(folder)


def test_an_artifact_of_schema_2_loads_whose_kv_geometry_has_no_windows(artifact: Artifact, tmp_path: Path) -> None:
    folder = shutil.copytree(artifact.path, tmp_path / "a")

    def as_before(raw: dict[str, Any]) -> None:
        raw["schema_version"] = 2
        raw["program"]["steps"][1]["window"] = 4

    reseal(folder, as_before)
    with Engine.load(folder) as engine:
        assert len(engine.generate([1, 2, 3]).token_ids) > 0


@each_case("text", ["[" * 100_000, '{"a":' * 100_000, '{"a": 1, "a": 2}', "1" * 5000, "5", '"x"'])
def test_json_that_costs_a_stack_or_a_choice_is_refused_wherever_it_is(
    artifact: Artifact, tmp_path: Path, text: str
) -> None:
    folder = shutil.copytree(artifact.path, tmp_path / "a")
    (folder / "manifest.json").write_text(text)
    with pytest.raises(ArtifactError, match=r"manifest\.json: "):
        open_artifact(folder)
    for name, document in (("llama", "config.json"), ("llama-sharded", "model.safetensors.index.json")):
        checkpoint = copy_fixture(tmp_path, name)
        (checkpoint / document).write_text(text)
        with pytest.raises(CheckpointError, match=document):
            Checkpoint.open(checkpoint)


@pytest.mark.parametrize("verify", [True, False])
def test_a_damaged_header_of_weights_is_refused_even_without_digests(
    artifact: Artifact, tmp_path: Path, verify: bool
) -> None:
    folder = shutil.copytree(artifact.path, tmp_path / "a")
    file = folder / "program/weights.safetensors"
    content = bytearray(file.read_bytes())
    content[8:12] = b"{{{{"
    file.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"weights\.safetensors: "):
        Engine.load(open_artifact(folder, verify))
