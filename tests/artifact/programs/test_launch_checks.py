"""A launch program that does not fit its artifact is refused before anything is loaded onto a device."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ingot.artifact import Artifact, open_artifact
from ingot.artifact.programs.launch_checks import read_launches
from ingot.artifact.programs.launch_program import ELEMENT_BYTES, LAUNCHES_FILE
from ingot.errors import ArtifactError
from tests.artifact.tiny_artifact import reseal
from tests.each_case import each_case
from tests.runtime.cuda.artifacts import buckets, model_of, write_artifact
from tests.structural_fuzz import damages


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return write_artifact(model_of(), tmp_path_factory.mktemp("launches") / "a", buckets())


def first_launch(raw: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = raw["programs"][0]["launches"][0]
    return found


def first_buffer(raw: dict[str, Any]) -> dict[str, Any]:
    """The first argument of the program that is a buffer of the arena."""
    places = raw["programs"][0]["places"]
    steps = raw["programs"][0]["launches"]
    found: dict[str, Any] = next(a for s in steps for a in s["arguments"] if a.get("name") in places)
    return found


def move_to_the_end(raw: dict[str, Any]) -> None:
    """Have the first argument begin where its buffer ends."""
    buffer, place = first_buffer(raw), raw["programs"][0]["places"]
    buffer.update(offset=place[buffer["name"]]["bytes"] // ELEMENT_BYTES[buffer["type"]])


def write(artifact: Artifact, folder: Path, text: str) -> Path:
    copy = folder / "a"
    shutil.copytree(artifact.path, copy, dirs_exist_ok=True)
    (copy / LAUNCHES_FILE).write_text(text)
    reseal(copy)
    return copy


CASES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "context": (
        lambda raw: raw.update(context_tokens=32),
        "it was lowered for context_tokens 32, and the model has 64",
    ),
    "vocabulary": (lambda raw: raw.update(vocab_size=127), "it was lowered for vocab_size 127, and the model has 128"),
    "KV geometry": (lambda raw: raw["kv"].update(head_dim=16), "its KV geometry is not the manifest's"),
    "kernel without code": (
        lambda raw: raw["cubins"]["90"].pop(next(iter(raw["cubins"]["90"]))),
        "it has no code of the kernel '.*' for SM 90",
    ),
    "code without kernel": (
        lambda raw: raw["cubins"]["90"].update(x={"symbol": "x", "shared_bytes": 0}),
        "it has code for SM 90 of 'x', which is not one of its kernels",
    ),
    "unknown kernel": (lambda raw: first_launch(raw).update(kernel="x"), r"step 0 .*: launches 'x', which is not one"),
    "arguments": (lambda raw: first_launch(raw)["arguments"].pop(), r"step 0 .*: passes \d+ arguments to '.*', which"),
    "a number for a pointer": (
        lambda raw: first_launch(raw)["arguments"].__setitem__(0, {"kind": "number", "value": 7}),
        r"passes 7 as argument 0 of 'gather_rows-.*', which takes \*i64",
    ),
    "a pointer for a number": (
        lambda raw: first_launch(raw)["arguments"].__setitem__(5, {"kind": "null", "type": "i32"}),
        r"passes a pointer to i32 as argument 5 of 'gather_rows-.*', which takes i32",
    ),
    "a pointer to another type": (
        lambda raw: first_launch(raw)["arguments"][1].update(type="i64"),
        r"passes a pointer to i64 as argument 1 of 'gather_rows-.*', which takes \*i32",
    ),
    "a number of more bits": (
        lambda raw: first_launch(raw)["arguments"].__setitem__(5, {"kind": "number", "value": 2**31}),
        r"passes 2147483648 as argument 5 of 'gather_rows-.*', which takes i32",
    ),
    "grid": (lambda raw: first_launch(raw).update(grid=[1, 0, 1]), r"step 0 .*: has a grid of \[1, 0, 1\]"),
    "huge grid": (lambda raw: first_launch(raw).update(grid=[1, 1, 2**16]), r"has a grid of \[1, 1, 65536\]"),
    "unknown buffer": (lambda raw: first_buffer(raw).update(name="x"), "reads the buffer 'x', which neither the arena"),
    "offset": (lambda raw: first_buffer(raw).update(offset=10**9), r"reads '.*' from byte \d+ of \d+"),
    "offset of the end": (move_to_the_end, r"reads '.*' from byte (\d+) of \1"),
    "dependent launches": (
        lambda raw: raw.update(dependent=True),
        "its launches are dependent, and the kernel '.*' does not wait for the launch before it",
    ),
    "usual launches": (
        lambda raw: next(iter(raw["kernels"].values()))["constants"].update(DEPENDENT=True),
        "its launches are not dependent, and the kernel '.*' waits for the launch before it",
    ),
    "counters": (lambda raw: raw.update(counters=0), r"decode-1: step \d+ .*: counts from place 0 of 0 counters on"),
    "type": (lambda raw: first_buffer(raw).update(type="fp23"), "an argument of the unknown type 'fp23'"),
    "arena": (lambda raw: raw["programs"][0].update(arena_bytes=1), r"the buffer '.*' ends at \d+ of 1 arena bytes"),
    "huge arena": (lambda raw: raw["programs"][0].update(arena_bytes=2**60), "arena_bytes is .*; it must be at most"),
    "head": (lambda raw: raw["programs"][0].update(head_start=10**6), "head_start is 1000000, and it has"),
    "rows": (lambda raw: raw["programs"][1].update(rows=5), "it has 5 rows for 4 sequences"),
    "true": (lambda raw: raw.update(vocab_size=True), "vocab_size: Input should be a valid integer"),
    "text": (lambda raw: raw.update(vocab_size="128"), "vocab_size: Input should be a valid integer"),
}


@each_case("case", CASES)
def test_a_program_that_does_not_fit_its_artifact_is_refused(launches: Artifact, tmp_path: Path, case: str) -> None:
    change, message = CASES[case]
    raw = json.loads(launches.file(LAUNCHES_FILE).read_text())
    change(raw)
    opened = open_artifact(write(launches, tmp_path, json.dumps(raw)))
    with pytest.raises(ArtifactError, match=rf"launches\.json: .*{message}.*; build the artifact again"):
        read_launches(opened)


def test_the_program_of_a_build_is_read(launches: Artifact) -> None:
    assert read_launches(launches).context_tokens == launches.manifest.model.context_tokens


def test_a_program_that_is_not_listed_is_refused_at_once(launches: Artifact, tmp_path: Path) -> None:
    copy = write(launches, tmp_path, launches.file(LAUNCHES_FILE).read_text())
    reseal(copy, lambda raw: raw["program"].update(launches="program/other.json"))
    with pytest.raises(ArtifactError, match=r"program\.launches needs the file 'program/other\.json', which the manif"):
        open_artifact(copy)


def test_damaged_launches_are_one_error(launches: Artifact, tmp_path: Path) -> None:
    raw = json.loads(launches.file(LAUNCHES_FILE).read_text())
    raw["programs"] = raw["programs"][:1]
    for damage in damages(raw, seed=0, count=60):
        opened = open_artifact(write(launches, tmp_path, damage.text.encode("utf-8", "replace").decode()))
        try:
            read_launches(opened)
        except ArtifactError as error:
            assert len(str(error)) < 2500  # noqa: PT017  # most damages are refused, some change nothing that matters
