"""Side state in artifacts: its parts, and programs whose recurrent layers do not fit them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ingot.artifact import Artifact, KVGeometry, open_artifact
from ingot.artifact.programs.cpu_program import OPERATIONS_FILE
from ingot.artifact.programs.cpu_program_checks import read_operations
from ingot.artifact.programs.recurrent import ConvolutionFacts, DeltaRuleFacts, RecurrentFacts, ScanFacts, place_states
from ingot.artifact.programs.state_parts import StatePart
from ingot.errors import ArtifactError, EngineError
from ingot.runtime.cpu.recurrent_operands import check_recurrent
from tests.artifact.tiny_artifact import reseal
from tests.each_case import each_case

Json = dict[str, Any]
DELTA = DeltaRuleFacts(layer=1, num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=20, scale=1.0)


def test_parts_follow_each_other_and_a_convolution_of_one_tap_has_none() -> None:
    layers: list[RecurrentFacts] = [
        ConvolutionFacts(layer=1, channels=5, taps=4),
        DELTA,
        ConvolutionFacts(layer=2, channels=5, taps=1),
    ]
    scan = ScanFacts(layer=2, num_heads=2, head_dim=16, state_dim=3, num_groups=1)
    parts, size = place_states([*layers, scan])
    assert [(part.layer, part.kind, part.offset, part.bytes) for part in parts] == [
        (1, "convolution", 0, 3 * 5 * 4),
        (1, "delta-rule", 64, 4 * 8 * 32 * 4),  # 20 columns are stored as 32
        (2, "scan", 64 + 4096, 2 * 3 * 16 * 4),
    ]
    assert size == 64 + 4096 + 384


def geometry(*parts: StatePart, state_bytes: int = 256) -> KVGeometry:
    return KVGeometry(num_layers=1, num_kv_heads=1, head_dim=4, state_bytes=state_bytes, state=parts)


def part(offset: int, size: int, layer: int = 0) -> StatePart:
    return StatePart(layer=layer, kind="scan", offset=offset, bytes=size)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([part(0, 64), part(48, 64, 1)], "scan of layer 1 begins at byte 48; it must be a multiple of 16 from 64 on"),
        ([part(8, 64)], "scan of layer 0 begins at byte 8; it must be a multiple of 16 from 0 on"),
        ([part(0, 64), part(240, 64, 1)], "scan of layer 1 ends at byte 304 of 256"),
        ([part(0, 64), part(64, 64)], "scan of layer 0 is there twice"),
    ],
)
def test_parts_that_overlap_or_leave_the_state_are_refused(parts: list[StatePart], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        geometry(*parts)


def test_parts_are_in_the_manifest_and_in_the_digest_of_the_layout() -> None:
    one, other = geometry(part(0, 64)), geometry(part(64, 64))
    assert KVGeometry.model_validate_json(one.model_dump_json()) == one
    assert one.format_digest("by-dim") != other.format_digest("by-dim")
    assert "state" not in geometry(state_bytes=0).model_dump()


@pytest.fixture(scope="module")
def artifact(build_hybrid: Callable[..., Artifact]) -> Artifact:
    return build_hybrid("fp32-cpu", "cpu.engine=native")


def operation(raw: Json, kind: str) -> Json:
    found: Json = next(one for one in raw["operations"] if one["kind"] == kind)
    return found


def twice(raw: Json, kind: str) -> None:
    one = operation(raw, kind)
    raw["operations"].insert(raw["operations"].index(one), one)


def with_vector(raw: Json, **change: Any) -> None:
    one = next(one for one in raw["operations"] if one.get("vector"))
    one.update(change)


CASES: dict[str, tuple[Callable[[Json], object], str]] = {
    "layer": (
        lambda raw: operation(raw, "delta-rule").update(layer=7),
        r"keeps \d+ bytes of state \(delta-rule of layer 7\); the KV geometry has 0 for it",
    ),
    "taps": (
        lambda raw: operation(raw, "convolve").update(taps=5),
        r"keeps \d+ bytes of state \(convolution of layer 0\); the KV geometry has \d+ for it",
    ),
    "many taps": (lambda raw: operation(raw, "convolve").update(taps=65), "taps: Input should be less than or equal"),
    "columns": (
        lambda raw: operation(raw, "scan").update(head_dim=33),
        r"uses columns 0 to 264 of '.*', which has 256",
    ),
    "keys": (lambda raw: operation(raw, "delta-rule").update(key_dim=2048), "key_dim: Input should be less than or eq"),
    "heads": (lambda raw: operation(raw, "delta-rule").update(num_key_heads=3, key_dim=16), "4 value heads over 3 key"),
    "groups": (lambda raw: operation(raw, "scan").update(num_groups=3, state_dim=5), "8 heads in 3 groups"),
    "twice": (lambda raw: twice(raw, "scan"), "the scan of layer 2 is computed a second time"),
    "head": (lambda raw: raw.update(head_start=3), "changes side state after head_start, 3"),
    "weight": (lambda raw: operation(raw, "convolve").update(weight="x"), "weights.safetensors: holds no tensor 'x'"),
    "a": (lambda raw: operation(raw, "scan").update(a=operation(raw, "convolve")["weight"]), r"needs F32 \[8\]"),
    "not computed": (
        lambda raw: operation(raw, "scan").update(kind="convolve", input=operation(raw, "scan")["b"]),
        "validation error|Field required",
    ),
    "vector": (lambda raw: with_vector(raw, vector="x"), "weights.safetensors: holds no tensor 'x'"),
    "vector and number": (
        lambda raw: with_vector(raw, b=2.0),
        "combines with the tensor '.*' and with another operand",
    ),
}


@each_case("case", CASES)
def test_a_program_that_does_not_fit_its_state_is_refused(artifact: Artifact, tmp_path: Path, case: str) -> None:
    change, message = CASES[case]
    copy = tmp_path / "a"
    shutil.copytree(artifact.path, copy)
    raw = json.loads((copy / OPERATIONS_FILE).read_text())
    change(raw)
    (copy / OPERATIONS_FILE).write_text(json.dumps(raw))
    reseal(copy)
    with pytest.raises(ArtifactError, match=message):
        read_operations(open_artifact(copy))


STEPS: dict[str, tuple[Json, str]] = {
    "layer": ({"layer": 5}, r"delta-rule of layer 5: keeps \d+ bytes of state \(delta-rule of layer 5\); the KV geo"),
    "sizes": ({"key_dim": 25}, "delta-rule of layer 0: keeps"),
    "heads": ({"num_key_heads": 3}, "4 value heads over 3 key heads"),
    "value": ({"value": "input_ids"}, r"'input_ids' is int64 \[tokens, 0\]; its value must be float32 \[tokens, 256\]"),
}


@each_case("case", STEPS)
def test_a_step_that_does_not_fit_its_state_or_values_is_refused(
    build_hybrid: Callable[..., Artifact], case: str
) -> None:
    change, message = STEPS[case]
    manifest = build_hybrid("fp32-cpu", "cpu.engine=onnxruntime").manifest
    steps = [one.model_copy(update=change) if one.kind == "delta-rule" else one for one in manifest.program.steps]
    check_recurrent(manifest.program, manifest.kv)
    with pytest.raises(EngineError, match=message):
        check_recurrent(manifest.program.model_copy(update={"steps": tuple(steps)}), manifest.kv)


def test_steps_that_keep_one_state_and_states_without_a_step_are_refused(build_hybrid: Callable[..., Artifact]) -> None:
    manifest = build_hybrid("fp32-cpu", "cpu.engine=onnxruntime").manifest
    steps = manifest.program.steps
    doubled = (*steps, next(one for one in steps if one.kind == "scan"))
    with pytest.raises(EngineError, match="scan of layer 2: is computed by two steps"):
        check_recurrent(manifest.program.model_copy(update={"steps": doubled}), manifest.kv)
    fewer = tuple(one for one in steps if one.kind != "scan")
    with pytest.raises(EngineError, match="has state for a scan in layer 2, which the program does not compute"):
        check_recurrent(manifest.program.model_copy(update={"steps": fewer}), manifest.kv)
