"""A CPU launch program that does not fit its artifact is refused before any of it runs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ingot.artifact import Artifact, open_artifact
from ingot.artifact.programs.cpu_program import OPERATIONS_FILE, WEIGHTS_FILE
from ingot.artifact.programs.cpu_program_checks import read_draft_programs, read_operations
from ingot.artifact.programs.draft_head import DRAFT_HEAD_FILE
from ingot.errors import ArtifactError
from tests.artifact.tiny_artifact import reseal
from tests.conftest import BuildArtifact
from tests.each_case import each_case
from tests.parity import CHECKPOINTS, MTP_CHECKPOINTS

Json = dict[str, Any]


@pytest.fixture(scope="module")
def artifact(build_unmeasured: BuildArtifact) -> Artifact:
    return build_unmeasured("int4-cpu", CHECKPOINTS / "qwen3", "cpu.engine=native", "passes.quantize-kv-cache=null")


def operation(raw: Json, kind: str, **facts: Any) -> Json:
    """The first operation of a kind with these facts."""
    found: Json = next(o for o in raw["operations"] if o["kind"] == kind and facts.items() <= o.items())
    return found


def linear(raw: Json, **facts: Any) -> Json:
    return operation(raw, "linear", **facts)


def matrix(raw: Json) -> Json:
    found: Json = raw["matrices"][linear(raw)["matrix"]]
    return found


def buffer_of(raw: Json, kind: str) -> Json:
    found: Json = raw["buffers"][operation(raw, kind)["output"]["buffer"]]
    return found


def rotate(raw: Json, **facts: Any) -> None:
    """Rotate the first queries before they are attended to."""
    attend = operation(raw, "attend")
    own = {"kind": "rotate", "node": "r", "input": attend["query"], "output": attend["query"], "heads": 1}
    tables = {name: attend[name] for name in ("cos", "sin", "head_dim", "rotary_dim")}
    raw["operations"].insert(raw["operations"].index(attend), {**own, **tables, **facts})
    raw["head_start"] += 1


CASES: dict[str, tuple[Callable[[Json], object], str]] = {
    "context": (lambda raw: raw.update(context_tokens=7), "it was lowered for context_tokens 7, and the model has"),
    "vocabulary": (
        lambda raw: raw.update(vocab_size=3),
        "it was lowered for vocab_size 3",
    ),
    "KV geometry": (lambda raw: raw["kv"].update(block_tokens=8), "its KV geometry is not the manifest's"),
    "huge arena": (lambda raw: raw.update(arena_floats=2**40), "arena_floats is .*; it must be at most"),
    "arena": (lambda raw: raw.update(arena_floats=16), r"the buffer '.*' ends at \d+ of 16 floats"),
    "offset": (lambda raw: buffer_of(raw, "attend").update(offset=8), "has the offset 8; it must be a multiple of 16"),
    "no place": (lambda raw: buffer_of(raw, "attend").update(offset=-1), "has the offset -1; it must be a multiple"),
    "logits": (
        lambda raw: raw["buffers"]["logits"].update(offset=0),
        "'logits' is not rows of .* outside of",
    ),
    "view": (
        lambda raw: linear(raw)["output"].update(column=1),
        r"operation 1 .*: uses columns 1 to \d+ of",
    ),
    "buffer": (lambda raw: linear(raw)["input"].update(buffer="x"), "operation 1 .*: has no buffer 'x'"),
    "matrix": (
        lambda raw: linear(raw).update(matrix="x"),
        "operation 1 .*: reads the matrix 'x', which",
    ),
    "block": (lambda raw: matrix(raw).update(block=8), "the matrix '.*' has blocks of 8; they must be multiples"),
    "long block": (lambda raw: matrix(raw).update(block=2**17), "multiples of 16 up to 65536"),
    "wide buffer": (lambda raw: buffer_of(raw, "embed").update(columns=2**25), "has 33554432 columns; there may be up"),
    "no scales": (lambda raw: matrix(raw).update(scale_bytes=0), "the matrix '.*' has integer codes without scales"),
    "long rows": (
        lambda raw: matrix(raw).update(per_row=True, k=2**17),
        "has 131072 columns with one scale per row; there may be up to 65536",
    ),
    "odd pairs": (
        lambda raw: raw["matrices"][linear(raw, store="gate")["matrix"]].update(n=17),
        "17 rows in pairs",
    ),
    "float blocks": (lambda raw: matrix(raw).update(form="float16"), "has float16 elements with zero points or blocks"),
    "pairs": (lambda raw: matrix(raw).update(pairs=True), "stores 'store' of a matrix of pairs"),
    "rounding": (lambda raw: linear(raw).update(rounding="none"), "activations rounded by 'none' by int4 weights"),
    "static": (lambda raw: linear(raw).update(rounding="static"), "rounds by 'static' with the static scale None"),
    "order": (lambda raw: raw["operations"].pop(0), "operation 0 .*: reads '.*', which no operation before it makes"),
    "overwritten": (
        lambda raw: buffer_of(raw, "attend").update(offset=buffer_of(raw, "embed")["offset"]),
        "reads '.*', which no operation before it makes",
    ),
    "own input": (
        lambda raw: linear(raw, store="add").update(output=linear(raw, store="add")["input"]),
        "writes columns of '.*' that it reads|uses columns",
    ),
    "rows": (lambda raw: linear(raw).update(rows="logits"), "writes rows of logits to"),
    "table": (
        lambda raw: raw["matrices"][operation(raw, "embed")["table"]].update(n=5),
        r"reads rows up to \d+ of '.*', which has 5",
    ),
    "layer": (lambda raw: operation(raw, "attend").update(layer=9), r"attends in layer 9; the KV pool has \d"),
    "twice": (lambda raw: operation(raw, "attend", layer=1).update(layer=0), "layer 0 is computed a second time"),
    "heads": (
        lambda raw: operation(raw, "attend").update(num_kv_heads=1),
        "heads over 1 of .* dimensions; the KV",
    ),
    "window": (lambda raw: operation(raw, "attend").update(window=3), "has a window of 3 tokens; the KV geometry has"),
    "no key": (lambda raw: operation(raw, "attend").update(key=None), "not both a key and a value"),
    "rotation": (lambda raw: operation(raw, "attend").update(sin=None), "rotates .* dimensions, or lacks a table"),
    "sinks": (lambda raw: operation(raw, "attend").update(sinks="x"), "weights.safetensors: holds no tensor 'x'"),
    "wide rotation": (lambda raw: rotate(raw, rotary_dim=32, head_dim=16), "rotates 32 of 16 dimensions"),
    "rotation of others": (lambda raw: rotate(raw, cos="x"), "weights.safetensors: holds no tensor 'x'"),
    "numbers": (
        lambda raw: linear(raw, store="gate").update(activation="xielu"),
        "has 0 numbers of the activation 'xielu', which has 4",
    ),
    "clamped without up": (
        lambda raw: linear(raw, store="store").update(activation="clamped-swiglu", numbers=[1.7, 7.0]),
        "the activation 'clamped-swiglu' without an up projection",
    ),
    "head": (lambda raw: raw.update(head_start=2), "attends after head_start, 2"),
    "late head": (lambda raw: raw.update(head_start=10**6), "head_start is 1000000, and it has"),
    "no logits": (lambda raw: raw["operations"].pop(), "no operation makes the logits"),
    "type": (lambda raw: raw.update(vocab_size="3"), "vocab_size: Input should be a valid integer"),
}


def changed(artifact: Artifact, folder: Path, change: Callable[[Json], object]) -> Artifact:
    copy = folder / "a"
    shutil.copytree(artifact.path, copy)
    raw = json.loads((copy / OPERATIONS_FILE).read_text())
    change(raw)
    (copy / OPERATIONS_FILE).write_text(json.dumps(raw))
    reseal(copy)
    return open_artifact(copy)


@each_case("case", CASES)
def test_a_program_that_does_not_fit_is_refused(artifact: Artifact, tmp_path: Path, case: str) -> None:
    change, message = CASES[case]
    with pytest.raises(ArtifactError, match=message):
        read_operations(changed(artifact, tmp_path, change))


def test_a_program_as_it_was_written_is_read(artifact: Artifact, tmp_path: Path) -> None:
    found = read_operations(changed(artifact, tmp_path, lambda raw: None))
    assert found == read_operations(artifact)


HEAD_CASES: dict[str, tuple[Callable[[Json], object], str]] = {
    "hidden size": (lambda raw: raw.update(hidden_size=7), "the model has no buffer 'hidden' with 7 columns"),
    "input": (lambda raw: raw["head"]["buffers"].pop("hidden_states"), "the head has no buffer 'hidden_states' with"),
    "rows": (lambda raw: raw["head"]["buffers"]["hidden"].update(rows="tokens"), "and rows of logits"),
    "geometry": (lambda raw: raw["model"]["kv"].update(block_tokens=32), "its KV geometry is not the manifest's"),
    "head's attention": (lambda raw: operation(raw["head"], "attend").update(layer=1), "attends in layer 1"),
    "overwritten": (
        lambda raw: raw["model"]["buffers"]["hidden"].update(offset=raw["model"]["buffers"]["embed_tokens"]["offset"]),
        "reads 'embed_tokens', which no operation before it makes",
    ),
    "weights": (lambda raw: linear(raw["head"]).update(matrix="x"), "reads the matrix 'x'"),
}


@each_case("case", HEAD_CASES)
def test_a_draft_head_that_does_not_fit_is_refused(build_unmeasured: BuildArtifact, tmp_path: Path, case: str) -> None:
    artifact, (change, message) = build_unmeasured("fp32-cpu", MTP_CHECKPOINTS / "mimo"), HEAD_CASES[case]
    read_draft_programs(artifact)
    shutil.copytree(artifact.path, copy := tmp_path / "a")
    raw = json.loads((copy / DRAFT_HEAD_FILE).read_text())
    change(raw)
    (copy / DRAFT_HEAD_FILE).write_text(json.dumps(raw))
    reseal(copy)
    with pytest.raises(ArtifactError, match=message):
        read_draft_programs(open_artifact(copy))


def test_an_artifact_of_another_engine_has_no_operations(build_unmeasured: BuildArtifact) -> None:
    other = build_unmeasured("int4-cpu", CHECKPOINTS / "qwen3", "cpu.engine=onnxruntime")
    with pytest.raises(ArtifactError, match="is run by onnxruntime, and has no program of operations"):
        read_operations(other)


@pytest.mark.parametrize("kind", ["matrix", "norm", "table"])
def test_tensors_that_are_missing_or_truncated_are_named(artifact: Artifact, tmp_path: Path, kind: str) -> None:
    raw = json.loads(artifact.file(OPERATIONS_FILE).read_text())
    layer, attend = linear(raw), operation(raw, "attend")
    name = {"matrix": layer["matrix"], "norm": layer["norm"]["weight"], "table": attend["cos"]}[kind]
    for change, message in (("missing", f"holds no tensor '{name}'"), ("cut", f"'{name}' is .*; the program needs")):
        copy = tmp_path / change
        shutil.copytree(artifact.path, copy)
        tensors = load_file(copy / WEIGHTS_FILE)
        cut = tensors.pop(name)[:-1]
        save_file(tensors if change == "missing" else {**tensors, name: np.ascontiguousarray(cut)}, copy / WEIGHTS_FILE)
        reseal(copy)
        with pytest.raises(ArtifactError, match=message):
            read_operations(open_artifact(copy))
