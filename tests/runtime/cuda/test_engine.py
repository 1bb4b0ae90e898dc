"""The engine over the CUDA executor gives onnxruntime's tokens, for all steps and blocks."""

import re
from collections.abc import Sequence

import numpy as np
import pytest

from ingot.artifact import Artifact
from ingot.cli.main import run
from ingot.errors import EngineError
from ingot.runtime import Completion, Engine, SamplingParams
from ingot.runtime.cuda.executor import CudaExecutor
from ingot.runtime.forward_batch import FloatArray, ForwardBatch
from ingot.runtime.options import EngineOptions
from tests.runtime.cuda.batches import token_ids
from tests.simulators.interpreted_device import InterpretedDevice

PARAMS = SamplingParams(max_tokens=5, ignore_eos=True)
COMMON = token_ids(8, 7).tolist()
PROMPTS: list[list[int]] = [
    [*COMMON, *token_ids(3, 8).tolist()],
    token_ids(5, 9).tolist(),
    [*COMMON, *token_ids(4, 10).tolist()],
]


@pytest.fixture(scope="module")
def wanted(reference: Artifact) -> list[Completion]:
    """Completions of PROMPTS by onnxruntime."""
    with Engine.load(reference, kv_blocks=16) as engine:
        completions: list[Completion] = engine.generate(PROMPTS, PARAMS)
    return completions


def engine_of(launches: Artifact, device: InterpretedDevice | None = None, *, kv_blocks: int) -> Engine:
    executor = CudaExecutor(launches, device or InterpretedDevice(), EngineOptions(kv_blocks=kv_blocks))
    return Engine(executor, max_sequences=executor.max_sequences)


def tokens(completions: Sequence[Completion]) -> list[list[int]]:
    return [list(completion.token_ids) for completion in completions]


def test_greedy_tokens_are_onnxruntimes_in_chunks_and_batches_and_from_the_prefix_cache(
    launches: Artifact, wanted: list[Completion]
) -> None:
    device = InterpretedDevice()
    with engine_of(launches, device, kv_blocks=24) as engine:
        assert tokens(engine.generate(PROMPTS, PARAMS)) == tokens(wanted)
        engine.add(PROMPTS[2], PARAMS)
        for _ in range(3):
            engine.step()
        concurrent = engine.generate(PROMPTS[2], SamplingParams(max_tokens=2, ignore_eos=True))
        assert concurrent.token_ids == wanted[2].token_ids[:2]
        assert engine.metrics().prefix_hit_tokens >= 2 * (len(PROMPTS[2]) - 1)
        assert device.num_copies > 0  # of the block that both sequences write to


def test_preempted_requests_have_the_same_tokens(launches: Artifact, wanted: list[Completion]) -> None:
    with engine_of(launches, kv_blocks=6) as engine:
        assert tokens(engine.generate(PROMPTS[:2], PARAMS)) == tokens(wanted[:2])
        assert engine.metrics().num_preemptions > 0


class HostSampled:
    """The executor without `submit`: logits go to the host."""

    def __init__(self, executor: CudaExecutor) -> None:
        self._executor = executor
        self.model, self.kv_geometry = executor.model, executor.kv_geometry
        self.num_blocks, self.max_batch_tokens = executor.num_blocks, executor.max_batch_tokens
        self.max_sequences, self.device = executor.max_sequences, executor.device
        self.key_order, self.kernel_version = executor.key_order, executor.kernel_version

    def forward(self, batch: ForwardBatch) -> FloatArray:
        return self._executor.forward(batch)

    def copy_block(self, source: int, target: int) -> None:
        self._executor.copy_block(source, target)

    def close(self) -> None:
        self._executor.close()


def test_tokens_sampled_on_the_device_are_those_sampled_on_the_host(launches: Artifact) -> None:
    params = SamplingParams(max_tokens=2, temperature=0.9, top_k=20, top_p=0.9, seed=4, ignore_eos=True)
    found = []
    for host in (False, True):
        executor = CudaExecutor(launches, InterpretedDevice(), EngineOptions(kv_blocks=8))
        with Engine(HostSampled(executor) if host else executor, max_sequences=1) as engine:
            found.append(engine.generate(PROMPTS[1], params).token_ids)
    assert found[0] == found[1]


def test_prompt_logits_are_those_of_onnxruntime(launches: Artifact, reference: Artifact) -> None:
    with Engine.load(reference, kv_blocks=16) as engine:
        exact = engine.prompt_logits(PROMPTS[0])
    with engine_of(launches, kv_blocks=8) as engine:
        np.testing.assert_allclose(engine.prompt_logits(PROMPTS[0]), exact, atol=2e-5 * np.abs(exact).max())


def test_without_a_gpu_a_cuda_artifact_is_refused_with_a_reason(
    launches: Artifact, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hides any GPU
    reason = r"driver cannot be loaded|no GPU can be used|needs cuda-bindings"
    with pytest.raises(EngineError, match=reason):
        Engine.load(launches)
    assert run(["run", str(launches.path), "text"]) == 1
    *_, line = capsys.readouterr().err.splitlines()  # a note says before that the artifact was not measured
    assert re.search(reason, line)
