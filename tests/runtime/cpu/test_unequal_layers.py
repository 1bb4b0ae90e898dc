"""A model whose layers differ in heads, dims and windows and share keys and values, on the CPU engine."""

import random
from pathlib import Path

import numpy as np
import pytest

from ingot.artifact import Artifact, KVGeometry
from ingot.artifact.kv_geometry import KVType
from ingot.errors import ArtifactError, EngineError
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.cpu.executor import OnnxRuntimeExecutor
from ingot.runtime.cpu.native import attention
from ingot.runtime.cpu.native.library import native_library
from ingot.runtime.engine.engine import Engine
from tests.each_case import each_case
from tests.runtime.unequal_artifact import LAYERS, VOCAB, geometry, make_artifact, reference_logits

PROMPT = np.random.default_rng(3).integers(0, VOCAB, 150)  # longer than both windows


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return make_artifact(tmp_path_factory.mktemp("unequal") / "artifact")


@pytest.fixture(params=["native", "numpy"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(attention, "attention_backend", lambda: "numpy")
    elif native_library() is None:
        pytest.skip("the kernel is not built")


def engine(
    artifact: Artifact, *, num_blocks: int = 64, max_batch_tokens: int = 512, prefix_cache: bool = True
) -> Engine:
    executor = OnnxRuntimeExecutor(artifact, num_blocks=num_blocks, max_batch_tokens=max_batch_tokens)
    return Engine(executor, prefix_cache=prefix_cache)


@pytest.mark.usefixtures("backend")
@each_case("chunk", [512, 37, 1])
def test_logits_are_those_of_the_definition_whatever_the_chunk(artifact: Artifact, chunk: int) -> None:
    expected = reference_logits(PROMPT)
    with engine(artifact, max_batch_tokens=chunk) as under_test:
        logits = under_test.prompt_logits(PROMPT.tolist())
    np.testing.assert_allclose(logits, expected, atol=2e-5 * float(np.abs(expected).max()))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 2e-3), ("int8", 3e-2)])
def test_rounded_keys_and_values_are_at_each_layers_own_place(dtype: KVType, tolerance: float, tmp_path: Path) -> None:
    expected = reference_logits(PROMPT)
    with engine(make_artifact(tmp_path / "rounded", geometry(dtype))) as under_test:
        logits = under_test.prompt_logits(PROMPT.tolist())
    assert np.abs(logits - expected).max() < tolerance * np.abs(expected).max()


@pytest.mark.usefixtures("backend")
def test_hits_chunks_preemption_and_batch_mates_change_no_bit(artifact: Artifact) -> None:
    rng = random.Random(1)
    requests = []
    for _ in range(10):
        prompt = [
            *PROMPT.tolist()[: rng.choice([0, 40, 88])],
            *(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30))),
        ]
        requests.append((prompt, SamplingParams(max_tokens=rng.randrange(1, 25))))
    expected = []
    for prompt, params in requests:
        with engine(artifact, prefix_cache=False) as alone:
            expected.append(alone.generate(prompt, params, keep_logits=True))
    with engine(artifact, num_blocks=24, max_batch_tokens=40) as together:
        for _ in range(2):
            prompts, params_list = [prompt for prompt, _ in requests], [params for _, params in requests]
            completions = together.generate(prompts, params_list, keep_logits=True)
            for completion, wanted in zip(completions, expected, strict=True):
                assert completion.token_ids == wanted.token_ids
                assert completion.logits is not None
                assert wanted.logits is not None
                assert completion.logits.tobytes() == wanted.logits.tobytes()
        metrics = together.metrics()
        assert metrics.num_preemptions > 0
        assert metrics.prefix_hit_tokens > 0
        together.check()


def test_a_block_has_no_bytes_for_layers_that_share(artifact: Artifact) -> None:
    kv = artifact.manifest.kv
    floats = sum(2 * each.kv_heads * each.dim * 8 for number, each in enumerate(LAYERS) if each.source == number)
    assert kv.block_bytes == 4 * floats


def changed(**columns: object) -> KVGeometry:
    return KVGeometry.model_validate({**geometry().model_dump(), **columns})


@pytest.mark.parametrize(
    ("kv", "message"),
    [
        (changed(shares=(0, 1, 2, 3, 1)), "attention of layer 3 lacks its key or value, and shares no other layer's"),
        (changed(window=0), "attention of layer 1 has a window of 12 tokens; the KV geometry has 0"),
        (changed(value_dim=0), "attention of layer 0 has a value, but values are a part of the keys there"),
    ],
)
def test_a_program_that_contradicts_the_geometry_is_refused(kv: KVGeometry, message: str, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=message):
        make_artifact(tmp_path / "artifact", kv)


@pytest.mark.parametrize(
    ("kv", "message"),
    [
        (changed(num_kv_heads=(2, 1, 1, 2, 1)), "attention of layer 2: 2 heads over 2 of 8 dimensions do not fit"),
        (changed(value_dim=4), "attention of layer 0: 4 heads over 2 of 16 dimensions do not fit the KV pool, which"),
        (changed(state_bytes=8), "the KV geometry has 8 bytes of side state, and not which layers keep them"),
    ],
)
def test_what_the_kernel_cannot_read_is_refused_by_name(kv: KVGeometry, message: str, tmp_path: Path) -> None:
    artifact = make_artifact(tmp_path / "artifact", kv)
    with pytest.raises(EngineError, match=message):
        OnnxRuntimeExecutor(artifact, num_blocks=4)
