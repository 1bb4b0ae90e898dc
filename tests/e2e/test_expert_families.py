"""A quantized mixture of experts passes gates, and `ingot verify` finds every answer equal on both CPU engines.

test_imported_families.py compares the families' logits with those of transformers.
"""

import json
from pathlib import Path

import pytest

from ingot.artifact import open_artifact
from ingot.artifact.manifest import CPU_ENGINES
from ingot.cli.main import run
from tests.conftest import BuildArtifact

SMALL_EVALUATION = ("tokens=2048", "window_tokens=128", "layer_kl_tokens=256")
GATES = "gates={perplexity_ratio: {max: 1.08}, top1_agreement: {min: 0.8}, size_ratio: {max: 0.6}}"


def test_four_bits_pass_the_gates_on_a_mixture_with_its_evidence(
    upcycled: Path, memory_of_this_process: None, tmp_path: Path
) -> None:
    settings = [f"checkpoint={upcycled}", "latency=null", GATES, *(f"evaluation.{one}" for one in SMALL_EVALUATION)]
    overrides = [part for one in settings for part in ("--set", one)]
    assert run(["build", "demo", *overrides, "-o", str(tmp_path / "mixture")]) == 0
    artifact = open_artifact(tmp_path / "mixture")
    assert artifact.manifest.engine == "native"
    rows = json.loads((artifact.path / "evidence/quantization.json").read_text())["weights"]
    experts = [row["name"] for row in rows if ".experts." in row["name"]]
    assert len(experts) == 2 * 4 * 2  # layers, experts, packed gate and up, down
    assert not [row for row in rows if "router" in row["name"]]


@pytest.mark.parametrize("engine", CPU_ENGINES)
@pytest.mark.parametrize("recipe", ["fp32-cpu", "int4-cpu"])
def test_every_answer_is_the_plain_paths(
    build_unmeasured: BuildArtifact, upcycled: Path, recipe: str, engine: str
) -> None:
    artifact = build_unmeasured(recipe, upcycled, f"cpu.engine={engine}")
    for cell in ("chunked-prefill+batch-mates", "prefix-hit+preemption"):
        assert run(["verify", str(artifact.path), "--only", cell]) == 0
