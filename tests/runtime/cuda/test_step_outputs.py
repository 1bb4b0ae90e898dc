"""Outputs of steps: tokens read late, failed steps, and rows without finite logits."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ingot.artifact import KVGeometry
from ingot.artifact.programs.launch_program import WEIGHTS_FILE, CudaProgram, LaunchProgram
from ingot.errors import EngineError
from ingot.runtime.cuda.step_outputs import StepOutputs
from tests.runtime.cuda.artifacts import SM
from tests.runtime.cuda.batches import Growing, greedy, token_ids
from tests.runtime.cuda.conftest import ChangeArtifact, MakeExecutor
from tests.simulators.interpreted_device import InterpretedDevice

VOCABULARY = 6
PROGRAM = CudaProgram(
    sms=(SM,),
    activation_type="fp32",
    kv=KVGeometry(num_layers=1, num_kv_heads=1, head_dim=4, block_tokens=2),
    vocab_size=VOCABULARY,
    context_tokens=8,
    tile_queries=32,
    kernels={},
    cubins={SM: {}},
    programs=(
        LaunchProgram(
            rows=2,
            sequences=2,
            logits_rows=2,
            attention="decode",
            tiles=0,
            arena_bytes=0,
            places={},
            launches=(),
            head_start=0,
        ),
    ),
)

IDS = [token_ids(9, 0), token_ids(6, 1), token_ids(3, 2)]
TABLES = [[7, 2, 11], [0, 9, -1], [5, -1, -1]]


def test_a_row_whose_logits_are_not_finite_has_no_token(make_executor: MakeExecutor, change: ChangeArtifact) -> None:
    artifact = change()
    tensors = load_file(artifact.path / WEIGHTS_FILE)
    (name,) = (name for name in tensors if name.startswith("lm_head"))
    save_file({**tensors, name: np.full_like(tensors[name], np.nan)}, artifact.path / WEIGHTS_FILE)
    executor = make_executor(artifact=artifact)
    sequences = Growing(IDS, TABLES)
    first = executor.submit(sequences.step([3, 0, 0], "last"), greedy(1), np.full(3, -1, np.int32))
    second = executor.submit(sequences.step([1, 0, 0], "last"), greedy(1), np.zeros(1, np.int32))
    assert [step.tokens().tolist() for step in (first, second)] == [[-1], [-1]]


def test_a_failure_on_the_device_is_an_error_of_the_step_that_is_read(make_executor: MakeExecutor) -> None:
    device = InterpretedDevice()
    executor = make_executor(device)
    sequences = Growing(IDS, TABLES)
    good = executor.submit(sequences.step([3, 0, 0], "last"), greedy(1), np.full(3, -1, np.int32))
    good.tokens()
    device.failing = "greedy"
    bad = executor.submit(sequences.step([1, 0, 0], "last"), greedy(1), np.full(1, -1, np.int32))
    with pytest.raises(EngineError, match="a step of the decode bucket of 1 rows: greedy broke"):
        bad.tokens()
    executor.close()
    assert device.closed


def test_tokens_outlive_the_pinned_memory_that_a_later_step_reuses() -> None:
    device = InterpretedDevice()
    stream = device.make_stream()
    outputs = StepOutputs(device, stream, PROGRAM)
    source, steps = device.allocate_pinned(16, "a test"), []
    for number in range(6):  # two more than have pinned memory of their own
        source.view(np.int64)[:] = [number, number + 10]
        device.copy_in(outputs.addresses["tokens"], source, stream)
        tokens = outputs.tokens(2)
        outputs.queue_tokens(tokens)
        steps.append(outputs.step(tokens, f"step {number}"))
        device.synchronize("a test")
    outputs.close()
    assert [step.tokens().tolist() for step in steps] == [[number, number + 10] for number in range(6)]


def test_more_rows_of_logits_than_pinned_memory_holds_are_copied_from_it() -> None:
    device = InterpretedDevice()
    outputs = StepOutputs(device, device.make_stream(), PROGRAM)
    content = np.arange(2 * VOCABULARY, dtype=np.float32).reshape(2, VOCABULARY)
    device.view(outputs.addresses["logits"], content.nbytes)[:] = content.reshape(-1).view(np.uint8)
    target = outputs.logits(5)
    assert target.shape == (5, VOCABULARY)
    outputs.read_logits(target[3:], "a test")
    np.testing.assert_array_equal(target[3:], content)
