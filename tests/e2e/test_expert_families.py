"""Mixtures of experts through the whole of it, on both CPU engines: the logits are transformers' own, gates pass, and
`ingot verify` finds every answer equal.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from ingot.artifact import Artifact, open_artifact
from ingot.artifact.manifest import CPU_ENGINES
from ingot.cli.main import run
from ingot.runtime import Engine, SamplingParams
from tests.conftest import BuildArtifact
from tests.oracle.cases import Case
from tests.oracle.moe_cases import MOE_CASES
from tests.parity import CHECKPOINTS, LOGITS, compare, engine_logits, load_logits

MAX_BATCH_TOKENS = 7
DECODED = SamplingParams(max_tokens=6, ignore_eos=True)
BUILDS = [(case, engine) for case in MOE_CASES for engine in CPU_ENGINES]
SMALL_EVALUATION = ("tokens=2048", "window_tokens=128", "layer_kl_tokens=256")
GATES = "gates={perplexity_ratio: {max: 1.08}, top1_agreement: {min: 0.8}, size_ratio: {max: 0.6}}"


def built(build_unmeasured: BuildArtifact, case: Case, engine: str) -> Artifact:
    return build_unmeasured("fp32-cpu", CHECKPOINTS / case.name, f"cpu.engine={engine}")


@pytest.mark.parametrize(("case", "engine"), BUILDS, ids=lambda value: value if isinstance(value, str) else value.name)
def test_prompts_in_chunks_and_decoded_tokens(build_unmeasured: BuildArtifact, case: Case, engine: str) -> None:
    tokens, expected = load_logits(CHECKPOINTS / case.name / LOGITS)
    artifact = built(build_unmeasured, case, engine)
    parity = compare(engine_logits(artifact, tokens, MAX_BATCH_TOKENS), expected)
    print(f"{case.name}: worst difference {parity.worst:.1e}, limit {parity.limit:.1e}")
    assert parity.worst <= parity.limit
    with Engine.load(artifact, kv_blocks=32, max_batch_tokens=MAX_BATCH_TOKENS) as loaded:
        for prompt, done in zip(tokens, loaded.generate(tokens, DECODED, keep_logits=True), strict=True):
            assert done.logits is not None
            whole = loaded.prompt_logits([*prompt, *done.token_ids[:-1]])
            assert np.array_equal(whole[len(prompt) - 1 :].view(np.int32), done.logits.view(np.int32))


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
