"""Models on two devices, from the recipe to tokens: features of the engine change no bit, and answers are those of one.

tests/runtime/cpu/native/test_staged_program.py compares the logits of every cut.
"""

from pathlib import Path
from typing import Any

import pytest

from ingot.artifact import Artifact, open_artifact
from ingot.artifact.programs.draft_head import DRAFT_HEAD_FILE
from ingot.artifact.programs.stages import STAGES_FILE
from ingot.errors import UsageError
from ingot.runtime import Engine, SamplingParams
from ingot.validation.verify import VerifyOptions, open_subject, verify
from tests.conftest import BuildArtifact
from tests.parity import CHECKPOINTS, MTP_CHECKPOINTS
from tests.runtime.cpu.native.kernel_cases import needs_library

pytestmark = needs_library

DEVICES = "devices=[{cpu: 1GiB}, {cpu: 1GiB}]"
CELLS = (
    "prefix-hit+chunked-prefill",
    "preemption+host-restore",
    "swap+choices",
    "disk-restore+suffix",
    "failed-transfers+batch-mates",
    "minimal-pool+choices",
    "prefix-hit+slow-part",
)
PARAMS = SamplingParams(max_tokens=24, temperature=0.8, seed=3, ignore_eos=True)


def assert_verified(artifact: Artifact, *more: str) -> None:
    assert artifact.has(STAGES_FILE)
    cells = (*CELLS, *more)
    found = verify(open_subject(artifact), VerifyOptions(quick=True, only=cells))
    assert [(cell.name, cell.verdict) for cell in found.cells if cell.verdict != "OK"] == []
    assert len(found.cells) == len(cells)


def test_verify_finds_nothing_in_a_model_split_by_layers(build_unmeasured: BuildArtifact, two_layers: Path) -> None:
    artifact = build_unmeasured("int8-cpu", two_layers, DEVICES, "place={gpu_layers: 1}")
    assert_verified(artifact, "prefix-hit+adapter-mates")


def test_verify_finds_nothing_in_a_mixture_with_its_experts_on_the_host(
    build_unmeasured: BuildArtifact, upcycled: Path
) -> None:
    placed = ("passes.quantize-weights.block_size=32", DEVICES, "place={host: experts}")
    split = build_unmeasured("int4-cpu", upcycled, *placed)
    assert_verified(split)
    whole = build_unmeasured("int4-cpu", upcycled, placed[0])
    with Engine.load(split, kv_blocks=32) as one, Engine.load(whole, kv_blocks=32) as other:
        found, expected = (engine.generate([5, 7, 9] * 20, PARAMS, keep_logits=True) for engine in (one, other))
    assert found.token_ids == expected.token_ids
    assert found.logits is not None
    assert expected.logits is not None
    assert found.logits.tobytes() == expected.logits.tobytes()


@pytest.mark.parametrize("place", ["{gpu_layers: 2}", "{layers.*.self_attn: 'cpu:1', layers.*.linear_attn: 'cpu:1'}"])
def test_verify_finds_nothing_in_a_model_whose_side_state_is_divided(
    build_unmeasured: BuildArtifact, place: str
) -> None:
    assert_verified(
        build_unmeasured("int4-cpu", CHECKPOINTS / "qwen3_next", "engine.block_tokens=4", DEVICES, f"place={place}")
    )


def test_blocks_on_disk_serve_the_artifact_that_wrote_them_alone(
    build_unmeasured: BuildArtifact, two_layers: Path, tmp_path: Path
) -> None:
    split = build_unmeasured("int8-cpu", two_layers, DEVICES, "place={gpu_layers: 1}")
    whole = build_unmeasured("int8-cpu", two_layers)
    assert split.manifest.identity != whole.manifest.identity
    prompt = [5, 7, 9] * 40
    disk: dict[str, Any] = {"kv_disk_path": tmp_path / "kv", "kv_disk_bytes": 1 << 30}
    cached = []
    for artifact in (split, split, whole):
        with Engine.load(artifact, kv_blocks=32, kv_host_bytes=1 << 24, kv_restore="always", **disk) as engine:
            cached.append(engine.generate(prompt, PARAMS).cached_tokens)
            assert engine.flush_kv()
    assert cached[0] == cached[2] == 0
    assert cached[1] > 0


def test_the_mtp_layer_of_a_placed_model_is_left_out(
    build_unmeasured: BuildArtifact, caplog: pytest.LogCaptureFixture
) -> None:
    artifact = build_unmeasured("fp32-cpu", MTP_CHECKPOINTS / "mimo", DEVICES, "place={gpu_layers: 1}")
    assert not artifact.has(DRAFT_HEAD_FILE)
    assert open_artifact(artifact.path).has(STAGES_FILE)
    with pytest.raises(UsageError, match="has no MTP layer to draft by"):
        Engine.load(artifact, kv_blocks=8, speculation="mtp")


def test_a_model_that_another_engine_runs_is_not_placed(build_unmeasured: BuildArtifact) -> None:
    with pytest.raises(UsageError, match=r"place divides programs of .* cuda targets, and this model is run by"):
        build_unmeasured("fp32-cpu", CHECKPOINTS / "gemma3n_text", DEVICES, "place={gpu_layers: 1}")
