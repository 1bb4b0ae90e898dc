"""Real models through the whole pipeline and runtime: the tokens are transformers' own, alone and among others."""

import json

import numpy as np
import pytest

from ingot.runtime import Engine, SamplingParams
from tests.conftest import BuildArtifact
from tests.data_paths import ROOT, shared_data
from tests.tolerances import within

GREEDY = SamplingParams(max_tokens=200, ignore_eos=True)
REAL_MODELS = ["stories260K", "babyllama-105"]
TRAINED_MODELS = ["stdlib-hybrid-4m", "stdlib-mixture-6m"]


@pytest.mark.parametrize("model", REAL_MODELS)
def test_greedy_tokens_equal_the_golden_ones_alone_and_in_a_batch(build_unmeasured: BuildArtifact, model: str) -> None:
    golden = np.load(shared_data(f"golden/logits/{model}.npz"))["greedy_from_bos_200"].tolist()
    artifact = build_unmeasured("fp32-cpu", shared_data(f"models/{model}"))
    others = [[1, *np.random.default_rng(n).integers(3, 100, 5 + 7 * n).tolist()] for n in range(6)]
    with Engine.load(artifact, kv_blocks=64, max_batch_tokens=48) as engine:
        alone = engine.generate(golden[:1], GREEDY)
        together = engine.generate([*others[:3], golden[:1], *others[3:]], GREEDY)
    assert list(alone.token_ids) == golden[1:]
    assert list(together[3].token_ids) == golden[1:]


@pytest.mark.parametrize("model", REAL_MODELS)
def test_logits_equal_the_golden_ones(build_unmeasured: BuildArtifact, model: str) -> None:
    golden = np.load(shared_data(f"golden/logits/{model}.npz"))
    artifact = build_unmeasured("fp32-cpu", shared_data(f"models/{model}"))
    with Engine.load(artifact, kv_blocks=64, max_batch_tokens=48) as engine:
        logits = engine.prompt_logits(golden["input_ids"].tolist())
    assert within("golden.float32", float(np.abs(logits - golden["logits_fp32"]).max()), model)


@pytest.mark.parametrize("model", TRAINED_MODELS)
@pytest.mark.parametrize("engine", ["native", "onnxruntime"])
def test_a_trained_model_has_the_golden_tokens_in_chunks_and_among_others(
    build_unmeasured: BuildArtifact, model: str, engine: str
) -> None:
    golden = json.loads((ROOT / "tests" / "fixtures" / "golden" / f"{model}.json").read_text())
    artifact = build_unmeasured("fp32-cpu", ROOT / "examples" / "models" / model, f"cpu.engine={engine}")
    params = SamplingParams(max_tokens=len(golden["greedy"]), ignore_eos=True)
    others = [np.random.default_rng(n).integers(3, 4096, 5 + 9 * n).tolist() for n in range(4)]
    with Engine.load(artifact, kv_blocks=128, max_batch_tokens=24) as loaded:
        found = loaded.generate([*others[:2], golden["prompt"], *others[2:]], params)
        again = loaded.generate(golden["prompt"] + golden["greedy"][:100], params)
    assert list(found[2].token_ids) == golden["greedy"]
    assert list(again.token_ids)[:100] == golden["greedy"][100:]
