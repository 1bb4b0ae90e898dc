"""The whole CUDA executor, on a device that interprets kernels and runs all work as late as allowed."""

from pathlib import Path

import numpy as np
import pytest

from ingot.artifact import Artifact
from ingot.errors import EngineError, UsageError
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.cpu.executor import OnnxRuntimeExecutor
from ingot.runtime.executors import PipelinedExecutor
from ingot.runtime.forward_batch import FloatArray, SamplingArrays
from ingot.runtime.truncation_sampling import TokenChoice, choose_token
from tests.runtime.cuda.artifacts import buckets, model_of, write_artifact
from tests.runtime.cuda.batches import Growing, greedy, token_ids, whole_logits
from tests.runtime.cuda.conftest import MakeExecutor
from tests.simulators.interpreted_device import InterpretedDevice

IDS = [token_ids(9, 0), token_ids(6, 1), token_ids(3, 2)]
TABLES = [[7, 2, 11], [0, 9, -1], [5, -1, -1]]


@pytest.fixture(scope="module")
def wanted(reference: Artifact) -> list[FloatArray]:
    """Logits of IDS by onnxruntime."""
    executor = OnnxRuntimeExecutor(reference, num_blocks=4)
    logits = [whole_logits(executor, ids) for ids in IDS]
    executor.close()
    return logits


def assert_close(found: FloatArray, wanted: FloatArray) -> None:
    np.testing.assert_allclose(found, wanted, atol=2e-5 * np.abs(wanted).max())


def test_chunks_and_mixed_and_decode_steps_have_onnxruntimes_logits(
    make_executor: MakeExecutor, wanted: list[FloatArray]
) -> None:
    executor = make_executor()
    sequences = Growing(IDS, TABLES)
    found: list[list[FloatArray]] = [[], [], []]
    for counts in ([5, 0, 2], [2, 4, 0], [1, 1, 1], [1, 1, 0]):  # ragged, ragged, decode of 4, decode of 4
        rows = executor.forward(sequences.step(counts)).copy()
        for sequence, part in zip(
            [index for index, count in enumerate(counts) if count],
            np.split(rows, np.cumsum([count for count in counts if count])[:-1]),
            strict=True,
        ):
            found[sequence].append(part)
    for parts, exact in zip(found, wanted, strict=True):
        assert_close(np.concatenate(parts), exact)


def test_more_logit_rows_than_the_head_has_run_it_several_times(
    make_executor: MakeExecutor, wanted: list[FloatArray]
) -> None:
    device = InterpretedDevice()
    executor = make_executor(device)
    found = executor.forward(Growing(IDS, TABLES).step([6, 0, 0]))
    assert found.shape == (6, 128)  # the bucket has 4 rows of logits
    assert_close(found, wanted[0][:6])


def test_a_quantized_pool_has_its_scales_where_the_kernels_read_them(
    make_executor: MakeExecutor, checkpoint: Path, tmp_path: Path, wanted: list[FloatArray]
) -> None:
    model = model_of(checkpoint, kv="int8", block_tokens=4)
    executor = make_executor(artifact=write_artifact(model, tmp_path / "int8", buckets((1,), ragged=8)))
    sequences = Growing(IDS, TABLES)
    found = [executor.forward(sequences.step([count, 0, 0])).copy() for count in (5, 1)]
    limit = 0.02 * np.abs(wanted[0]).max()  # 7 bits of keys and values
    np.testing.assert_allclose(np.concatenate(found), wanted[0][:6], atol=limit)


def test_it_is_a_pipelined_executor_with_the_artifacts_limits(make_executor: MakeExecutor) -> None:
    executor = make_executor()
    assert isinstance(executor, PipelinedExecutor)
    assert (executor.max_batch_tokens, executor.max_sequences, executor.num_blocks) == (8, 4, 24)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch_tokens": 9}, "max_batch_tokens is 9, and the artifact's largest bucket holds 8"),
        ({"max_sequences": 5}, "max_sequences is 5, and the artifact's largest bucket holds 4"),
    ],
)
def test_limits_beyond_the_largest_bucket_are_refused(
    make_executor: MakeExecutor, options: dict[str, int], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        make_executor(**options)


def test_submitted_steps_carry_tokens_on_the_device(make_executor: MakeExecutor, wanted: list[FloatArray]) -> None:
    executor = make_executor()
    prompt = IDS[0][:5]
    sequences = Growing([prompt], [TABLES[0]])
    steps = [executor.submit(sequences.step([5], "last"), greedy(1), np.full(5, -1, np.int32))]
    sequences.ids = [np.zeros(9, np.int64)]  # replaced by the carried tokens
    for _ in range(4):  # one more than may be unread: the first is copied out
        steps.append(executor.submit(sequences.step([1], "last"), greedy(1), np.zeros(1, np.int32)))
    chosen = [int(step.tokens()[0]) for step in steps]
    again = Growing([np.array([*prompt, *chosen])], [[20, 21, 22]])
    logits = [executor.forward(again.step([count], "last"))[0].copy() for count in (5, 1, 1, 1, 1)]
    assert [int(row.argmax()) for row in logits] == chosen
    assert chosen[0] == wanted[0][4].argmax()


def test_a_closed_executor_says_so_and_its_steps_keep_their_tokens(make_executor: MakeExecutor) -> None:
    executor = make_executor()
    step = executor.submit(Growing(IDS, TABLES).step([3, 0, 0], "last"), greedy(1), np.full(3, -1, np.int32))
    executor.close()
    executor.close()
    assert step.tokens().shape == (1,)
    with pytest.raises(EngineError, match="the executor is closed"):
        executor.copy_block(0, 1)


def test_it_reports_its_gpu_and_the_memory_that_it_uses(make_executor: MakeExecutor) -> None:
    device = InterpretedDevice()
    executor = make_executor(device)
    facts = executor.device
    assert (facts.name, facts.sm, facts.total_bytes) == (device.name, device.sm, device.total_bytes)
    assert facts.used_bytes == device.total_bytes - device.free_bytes() > executor.num_blocks * 64


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_token_is_chosen_from_every_row_of_logits_however_many_the_head_has(
    make_executor: MakeExecutor, temperature: float
) -> None:
    executor = make_executor()
    rows = 7  # of two sequences, as where drafts are verified; the bucket has 4 rows of logits
    random = np.random.default_rng(3)
    draws = SamplingArrays(
        temperatures=np.where(np.arange(rows) < 5, temperature, 0).astype(np.float32),  # the last run is greedy
        top_ks=np.full(rows, 9, np.int32),
        top_ps=np.full(rows, 0.9, np.float32),
        uniforms=random.uniform(0, 1, rows).astype(np.float32),
    )
    logits = executor.forward(Growing(IDS, TABLES).step([4, 3, 0])).copy()
    step = executor.submit(Growing(IDS, TABLES).step([4, 3, 0]), draws, np.full(rows, -1, np.int32))
    plain = executor.submit(
        Growing(IDS, [[20], [21], [22]]).step([0, 2, 0], "last"), greedy(1), np.full(2, -1, np.int32)
    )
    wanted = [
        choose_token(row, TokenChoice.of(SamplingParams(temperature=each, top_k=9, top_p=0.9)), uniform)
        for row, each, uniform in zip(logits, draws.temperatures.tolist(), draws.uniforms.tolist(), strict=True)
    ]
    assert step.tokens().tolist() == wanted
    assert plain.tokens().shape == (1,)
    assert len(set(wanted)) > 1
