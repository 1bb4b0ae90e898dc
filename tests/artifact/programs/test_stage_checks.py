"""Stages that do not fit their program are refused before any of them runs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ingot.artifact import Artifact
from ingot.artifact.programs.cpu_program_checks import read_operations
from ingot.artifact.programs.stage_checks import read_stages
from ingot.artifact.programs.stages import STAGES_FILE
from ingot.errors import ArtifactError
from ingot.pipeline.targets.cpu.place_stages import plan_stages
from tests.conftest import BuildArtifact
from tests.each_case import each_case
from tests.parity import CHECKPOINTS, MTP_CHECKPOINTS
from tests.runtime.cpu.native.staged_artifacts import with_plan
from tests.runtime.cpu.native.tiny_program import tiny_program, write_artifact

Json = dict[str, Any]


@pytest.fixture(scope="module")
def split(build_unmeasured: BuildArtifact) -> Artifact:
    """Three layers, the last on the first device."""
    return build_unmeasured(
        "int4-cpu",
        CHECKPOINTS / "qwen3",
        "passes.quantize-kv-cache=null",
        "devices=[{cpu: 1GiB}, {cpu: 1GiB}]",
        "place={gpu_layers: 1}",
    )


def offsets(raw: Json, device: int = 0) -> dict[str, int]:
    found: dict[str, int] = raw["devices"][device]["offsets"]
    return found


CASES: dict[str, tuple[Callable[[Json], object], str]] = {
    "order": (
        lambda raw: raw["stages"][0].update(end=10**6),
        r"its stages end at .*; they must ascend to \d",
    ),
    "too few": (lambda raw: raw["stages"][-1].update(end=raw["stages"][-1]["end"] - 1), "they must ascend to"),
    "empty stage": (lambda raw: raw["stages"].insert(1, raw["stages"][0]), "they must ascend to"),
    "unknown device": (lambda raw: raw["stages"][0].update(device=2), r"on the devices \[0, 2\], and it describes 2"),
    "unused device": (lambda raw: raw["stages"][0].update(device=0), r"on the devices \[0\], and it describes 2"),
    "one device": (lambda raw: raw["devices"].pop(), "devices: Tuple should have at least 2 items"),
    "a buffer less": (lambda raw: offsets(raw).popitem(), "'cpu:0': its offsets are of other buffers than"),
    "a buffer more": (lambda raw: offsets(raw).update(x=0), "its offsets are of other buffers than .* use: 'x'"),
    "small arena": (lambda raw: raw["devices"][1].update(arena_floats=16), "'cpu:1': the buffer .* of 16 floats"),
    "huge arena": (lambda raw: raw["devices"][1].update(arena_floats=2**40), "arena_floats is 1099511627776; it must"),
    "odd offset": (lambda raw: offsets(raw).update({next(iter(offsets(raw))): 8}), "must begin at a multiple of 16"),
    "before": (lambda raw: offsets(raw).update({next(iter(offsets(raw))): -16}), "is at -16 to"),
    "one place": (
        lambda raw: offsets(raw, 1).update(dict.fromkeys(offsets(raw, 1), 0)),
        "reads '.*', which its device does not have then",
    ),
    "type": (lambda raw: raw.update(stages="x"), "stages: Input should be"),
    "name": (lambda raw: raw["devices"][0].update(name="x" * 65), "name: String should have at most 64"),
    "key": (lambda raw: raw.update(more=1), "more: Extra inputs are not permitted"),
}


@each_case("case", CASES)
def test_stages_that_do_not_fit_the_program_are_refused(split: Artifact, tmp_path: Path, case: str) -> None:
    change, message = CASES[case]
    raw = json.loads(split.file(STAGES_FILE).read_text())
    change(raw)
    with pytest.raises(ArtifactError, match=message) as caught:
        read_stages(with_plan(split, tmp_path / "a", raw))
    assert STAGES_FILE in str(caught.value)


def test_stages_as_they_were_written_are_read(split: Artifact, tmp_path: Path) -> None:
    raw = json.loads(split.file(STAGES_FILE).read_text())
    assert read_stages(with_plan(split, tmp_path / "a", raw)) == read_stages(split)


@each_case("text", ["[" * 100_000, "{", '{"devices": 1, "devices": 2}', ""])
def test_text_that_is_not_a_document_is_refused(split: Artifact, tmp_path: Path, text: str) -> None:
    with pytest.raises(ArtifactError, match=r"stages\.json: "):
        read_stages(with_plan(split, tmp_path / "a", text))


def test_stages_of_another_artifact_are_refused(
    build_unmeasured: BuildArtifact, split: Artifact, tmp_path: Path
) -> None:
    other = build_unmeasured("fp32-cpu", CHECKPOINTS / "gemma2", "cpu.engine=native")
    raw = json.loads(split.file(STAGES_FILE).read_text())
    with pytest.raises(ArtifactError, match=r"stages\.json: .*is damaged, or of another artifact than program/oper"):
        read_stages(with_plan(other, tmp_path / "a", raw))


def test_stages_next_to_a_draft_head_are_refused(
    build_unmeasured: BuildArtifact, split: Artifact, tmp_path: Path
) -> None:
    headed = build_unmeasured("fp32-cpu", MTP_CHECKPOINTS / "mimo")
    raw = json.loads(split.file(STAGES_FILE).read_text())
    with pytest.raises(ArtifactError, match=r"has program/draft_head\.json too, which needs the program in one piece"):
        read_stages(with_plan(headed, tmp_path / "a", raw))


def test_layers_that_share_keys_and_values_are_refused_apart(build_unmeasured: BuildArtifact, tmp_path: Path) -> None:
    artifact = build_unmeasured("fp32-cpu", CHECKPOINTS / "gemma4_text", "cpu.engine=native")
    program = read_operations(artifact)
    shared = next(number for number, layer in enumerate(program.kv.layers) if layer.source != number)
    at = next(at for at, one in enumerate(program.operations) if one.kind == "attend" and one.layer == shared)
    ends = ((0, at), (1, at + 1), (0, len(program.operations)))
    used = [{view.buffer for one in program.operations[begin:end] for view in one.views} for begin, end in
            ((0, at), (at, at + 1), (at + 1, len(program.operations)))]  # fmt: skip
    names = (used[0] | used[2], used[1])
    devices = [
        {
            "name": f"cpu:{number}",
            "arena_floats": program.arena_floats,
            "offsets": {name: program.buffers[name].offset for name in own - {"logits"}},
        }
        for number, own in enumerate(names)
    ]
    plan = {"devices": devices, "stages": [{"device": device, "end": end} for device, end in ends]}
    source = program.kv.layers[shared].source
    with pytest.raises(ArtifactError, match=rf"layer {shared} reads keys and values of layer {source}, which another"):
        read_stages(with_plan(artifact, tmp_path / "a", plan))


def test_logits_on_several_devices_are_refused(split: Artifact, tmp_path: Path) -> None:
    artifact, program = write_artifact(tmp_path / "tiny"), tiny_program()
    devices = [int(one.node == "cap") for one in program.operations]
    plan = plan_stages(program, devices, ("cpu:0", "cpu:1"))
    assert plan is not None
    with pytest.raises(ArtifactError, match="its stages compute the logits on several devices"):
        read_stages(with_plan(artifact, tmp_path / "a", plan.model_dump(mode="json")))


@each_case(
    ("devices", "names", "message"),
    [
        # The last layer of the model computes rows of logits alone.
        ("experts", ("cuda:0", "cpu:0"), r"'layers.1.*' is copied to stage 3, and has no row for each token"),
        (
            "head",
            ("cuda:0", "cpu:0"),
            r"its 2 stages are on \['cuda:0', 'cpu:0'\]; the host and cuda:0 must take turns",
        ),
        ("experts", ("cpu:0", "cuda:0"), "the host and cuda:0 must take turns, cuda:0 the last"),
        ("experts", ("cuda:0", "cuda:0"), "the host and cuda:0 must take turns, cuda:0 the last"),
    ],
)
def test_stages_that_a_gpu_does_not_take_turns_with_are_refused(
    build_unmeasured: BuildArtifact, tmp_path: Path, devices: str, names: tuple[str, str], message: str
) -> None:
    artifact = build_unmeasured("fp32-cpu", CHECKPOINTS / "gpt_oss", "cpu.engine=native")
    program = read_operations(artifact)
    kinds = {"experts": lambda one: one.kind == "experts", "head": lambda one: one.node == "lm_head"}
    plan = plan_stages(program, [int(kinds[devices](one)) for one in program.operations], names)
    assert plan is not None
    with pytest.raises(ArtifactError, match=message):
        read_stages(with_plan(artifact, tmp_path / "a", plan.model_dump(mode="json")))
