"""The CUDA executor on a GPU: tests of tests/runtime/cuda again, with compiled kernels instead of the interpreter."""

import logging

import numpy as np
import pytest

from ingot.artifact import Artifact
from ingot.runtime import Engine, SamplingParams
from ingot.runtime.cpu.executor import OnnxRuntimeExecutor
from ingot.runtime.cuda.driver import driver
from ingot.runtime.forward_batch import FloatArray
from tests.gpu.conftest import MakeExecutor
from tests.runtime.cuda.batches import Growing, greedy, token_ids, whole_logits

pytestmark = pytest.mark.gpu

IDS = [token_ids(21, 0), token_ids(12, 1), token_ids(5, 2)]
TABLES = [[7, 2, 11, 30, 31, 32], [0, 9, 22, -1, -1, -1], [5, 40, -1, -1, -1, -1]]
TOLERANCE = {"float16": 1e-2, "int8": 4e-2}  # of the largest logit: 11 bits of activations; 7 of keys and values


@pytest.fixture(scope="module")
def wanted(reference: Artifact) -> list[FloatArray]:
    """Logits of IDS by onnxruntime."""
    executor = OnnxRuntimeExecutor(reference, num_blocks=4)
    logits = [whole_logits(executor, ids) for ids in IDS]
    executor.close()
    return logits


def assert_close(found: FloatArray, wanted: FloatArray, kv: str) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE[kv] * np.abs(wanted).max())


def test_chunks_and_mixed_and_decode_steps_have_onnxruntimes_logits(
    make_executor: MakeExecutor, wanted: list[FloatArray]
) -> None:
    executor = make_executor()
    sequences = Growing(IDS, TABLES)
    found: list[list[FloatArray]] = [[], [], []]
    for counts in ([12, 0, 4], [7, 9, 0], [1, 1, 1], [1, 1, 0], [0, 1, 0]):
        rows = executor.forward(sequences.step(counts)).copy()
        taken = [index for index, count in enumerate(counts) if count]
        parts = np.split(rows, np.cumsum([counts[index] for index in taken])[:-1])
        for sequence, part in zip(taken, parts, strict=True):
            found[sequence].append(part)
    for chunks, exact in zip(found, wanted, strict=True):
        assert_close(np.concatenate(chunks), exact, executor.kv_geometry.dtype)


def test_a_replayed_step_has_the_bits_of_kernels_run_one_by_one(
    make_executor: MakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for blocking in ("0", "1"):
        monkeypatch.setenv("INGOT_CUDA_BLOCKING", blocking)
        executor = make_executor()
        sequences = Growing(IDS, TABLES)
        steps = [executor.forward(sequences.step(counts)).copy() for counts in ([9, 3, 2], [1, 1, 1], [1, 1, 1])]
        found.append(np.concatenate(steps))
    np.testing.assert_array_equal(found[0], found[1])


def test_submitted_steps_choose_the_likeliest_tokens(make_executor: MakeExecutor) -> None:
    executor = make_executor()
    sequences = Growing([IDS[0][:9]], [TABLES[0]])
    steps = [executor.submit(sequences.step([9], "last"), greedy(1), np.full(9, -1, np.int32))]
    sequences.ids = [np.zeros(21, np.int64)]  # replaced by the carried tokens
    for _ in range(8):
        steps.append(executor.submit(sequences.step([1], "last"), greedy(1), np.zeros(1, np.int32)))
    chosen = [int(step.tokens()[0]) for step in steps]
    again = Growing([np.array([*IDS[0][:9], *chosen])], [[20, 21, 24, 25, 26]])
    logits = [executor.forward(again.step([count], "last"))[0].copy() for count in (9, *[1] * 8)]
    assert [int(row.argmax()) for row in logits] == chosen


def test_tokens_are_the_same_every_time_and_greedy_ones_alone_too(launches: Artifact) -> None:
    prompts = [ids.tolist() for ids in IDS]
    params = [
        SamplingParams(max_tokens=12, ignore_eos=True, temperature=temperature, seed=seed, top_p=0.95)
        for seed, temperature in enumerate((0.0, 0.8, 0.0))
    ]
    together = []
    for _ in range(2):
        with Engine.load(launches, kv_blocks=12) as engine:  # too few for all at once: one is preempted
            together.append([completion.token_ids for completion in engine.generate(prompts, params)])
            assert engine.metrics().num_preemptions > 0
    assert together[0] == together[1]
    with Engine.load(launches, kv_blocks=48, prefix_cache=False) as engine:
        alone = [engine.generate(prompts[index], params[index]).token_ids for index in (0, 2)]
    assert alone == [together[0][0], together[0][2]]


def test_the_pool_takes_free_memory_and_all_memory_is_freed(
    make_executor: MakeExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    device = driver.open_device()
    device.activate()
    before = device.free_bytes()
    executor = make_executor(kv_blocks=None)
    assert executor.num_blocks == executor.max_sequences * 16  # 4 sequences of 64 tokens is the most that can be used
    assert "were free" in caplog.text
    executor.warm_up()
    executor.close()
    assert before - device.free_bytes() < 64 * 2**20  # the driver keeps some memory
    device.close()
