"""`ingot inspect` shows the facts, the program, the files, and the manifest as JSON."""

import json
import re
from pathlib import Path

import pytest

from ingot.artifact import Artifact, KVGeometry
from ingot.artifact.programs.expert_choices import read_expert_choices
from ingot.cli.compiler.inspect import kv_in_words
from ingot.cli.main import run
from tests.conftest import BuildArtifact
from tests.data_paths import DEMO_MODEL
from tests.parity import MTP_CHECKPOINTS

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def artifact(build_unmeasured: BuildArtifact) -> Artifact:
    return build_unmeasured("int4-cpu")


def test_the_facts_are_shown_and_verified(artifact: Artifact, capsys: Captured) -> None:
    assert run(["inspect", str(artifact.path)]) == 0
    shown = capsys.readouterr().out
    assert f"identity   {artifact.manifest.identity} (verified)" in shown
    assert "llama, 5,770,496 parameters, 6 layers, 4 KV heads of 32" in shown
    assert "attention" not in shown


def test_defaults_of_serving_are_shown_where_the_artifact_has_some(
    artifact: Artifact, build_unmeasured: BuildArtifact, two_layers: Path, capsys: Captured
) -> None:
    served = build_unmeasured("int4-cpu", two_layers, "serving={kv_host_bytes: 8GB, max_sequences: 4, kv_policy: lru}")
    assert run(["inspect", str(served.path)]) == 0
    assert "served with" in (shown := capsys.readouterr().out)
    assert "max_sequences 4, kv_host_bytes 8.0 GB, kv_policy lru" in shown
    run(["inspect", str(artifact.path)])
    assert "served with" not in capsys.readouterr().out


def test_counts_of_experts_are_shown_next_to_what_equal_likelihood_says(
    build_unmeasured: BuildArtifact, upcycled: Path, capsys: Captured
) -> None:
    text = f"calibration={{text: {upcycled / 'heldout.txt'}, sequences: 16, sequence_tokens: 16}}"
    artifact = build_unmeasured("int8-cpu", upcycled, text)
    choices = read_expert_choices(artifact)
    assert choices is not None
    assert run(["inspect", str(artifact.path)]) == 0
    shown = capsys.readouterr().out
    assert "Experts chosen on 256 tokens of heldout.txt" in shown
    rows = [line.split() for line in shown.splitlines() if line.startswith("layers.")]
    assert [row[0] for row in rows] == ["layers.0.mlp", "layers.1.mlp"]
    for row, layer in zip(rows, choices.layers.values(), strict=True):
        busiest = f"{max(layer.counts) / (2 * 256):.1%}"
        # 4 (1 - (1 / 2) ** 16) experts, if all are equally likely.
        counted = f"{layer.concurrent[4]:.2f}", f"{layer.consecutive[4]:.2f}"
        assert row[1:] == ["2", "of", "4", busiest, busiest, "2", *counted, "4.00"]
    assert run(["inspect", str(build_unmeasured("int8-cpu", upcycled).path)]) == 0
    assert "Experts chosen" not in capsys.readouterr().out


def test_layers_of_different_shapes_are_counted_by_shape() -> None:
    columns = {"num_kv_heads": (4, 4, 1), "head_dim": (32, 32, 64), "shares": (0, 0, 2)}
    kv = KVGeometry.model_validate({"num_layers": 3, **columns, "state_bytes": 2000})
    assert kv_in_words(kv) == (
        "1 with 4 KV heads of 32, 1 with 4 KV heads of 32 shared with an earlier layer, 1 with 1 KV heads of 64,"
        " 2.0 kB of side state"
    )


def test_program_and_files_are_shown_when_asked_for(artifact: Artifact, capsys: Captured) -> None:
    assert run(["inspect", str(artifact.path), "--program", "--files", "--no-verify"]) == 0
    shown = capsys.readouterr().out
    assert "(not verified)" in shown
    assert "layer 5: 8 x 32 heads over 4" in shown
    for name, entry in artifact.manifest.files.items():
        assert name in shown
        assert entry.sha256 in shown


def test_the_pages_of_the_weights_are_shown_when_asked_for(artifact: Artifact, capsys: Captured) -> None:
    assert run(["inspect", str(artifact.path), "--memory"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^weights +[0-9.]+ MB on \S+$", shown, re.MULTILINE)
    assert all(f"\n{name} " in shown for name in ("page cache", "huge pages", "free"))


def test_operations_of_the_native_engine_are_listed(build_unmeasured: BuildArtifact, capsys: Captured) -> None:
    native = build_unmeasured("int4-cpu", DEMO_MODEL, "cpu.engine=native")
    assert run(["inspect", str(native.path), "--program"]) == 0
    shown = capsys.readouterr().out
    assert "cpu, run by native" in shown
    assert "CPU launch program" in shown
    assert "layers.5.mlp.gate_up_proj" in shown
    assert "rms norm, int8 by block, silu, gate" in " ".join(shown.split())
    assert run(["inspect", str(native.path), "--bucket", "decode-1"]) == 2
    assert "has no buckets; --program lists its steps" in capsys.readouterr().err


def test_the_mtp_layer_of_an_artifact_is_shown(build_unmeasured: BuildArtifact, capsys: Captured) -> None:
    artifact = build_unmeasured("fp32-cpu", MTP_CHECKPOINTS / "mimo")
    assert run(["inspect", str(artifact.path), "--program"]) == 0
    shown = capsys.readouterr().out
    assert "by its MTP layer" in shown
    assert "Draft head, " in shown
    assert "draft.embedding_norm" in shown


def test_the_stages_of_an_artifact_are_shown(build_unmeasured: BuildArtifact, capsys: Captured) -> None:
    place = ("devices=[{cpu: 1GiB}, {cpu: 1GiB}]", "place={gpu_layers: 2}")
    artifact = build_unmeasured("int4-cpu", DEMO_MODEL, "cpu.engine=native", *place)
    assert run(["inspect", str(artifact.path), "--program"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(r"on cpu:0: \d+ operations, [\d.]+ MB of weights, .* a KV block; cpu:1: .* in 2 stages", shown)
    assert "embed_tokens .. layers.3.mlp.down_proj" in shown
    assert "from cpu:1" in shown


def test_the_json_is_the_manifest(artifact: Artifact, capsys: Captured) -> None:
    assert run(["inspect", str(artifact.path), "--program", "--files", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == artifact.manifest.model_dump(mode="json")
