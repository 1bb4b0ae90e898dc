"""Bound programs: CUDA graphs, blocking mode, and arguments that cannot be bound."""

from typing import Literal

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ingot.artifact import Artifact
from ingot.artifact.programs.launch_checks import read_launches
from ingot.artifact.programs.launch_program import WEIGHTS_FILE, BufferArgument, LaunchProgram, SegmentCall
from ingot.errors import ArtifactError, EngineError
from ingot.runtime.cuda.programs import BoundProgram, NoBinder, choose
from ingot.runtime.cuda.step_inputs import InputLayout
from tests.runtime.cuda.batches import Growing, token_ids
from tests.runtime.cuda.conftest import ChangeArtifact, MakeExecutor
from tests.simulators.interpreted_device import InterpretedDevice


def test_weights_that_are_missing_or_of_another_type_are_refused(
    change: ChangeArtifact, make_executor: MakeExecutor
) -> None:
    artifact = change()
    tensors = load_file(artifact.path / WEIGHTS_FILE)
    name = next(name for name in tensors if "norm" in name)
    save_file({**tensors, name: tensors[name].astype(np.float16)}, artifact.path / WEIGHTS_FILE)
    with pytest.raises(ArtifactError, match=f"reads the weight '{name}' as F32, and the weights file stores it as F16"):
        make_executor(artifact=artifact)
    del tensors[name]
    save_file(tensors, artifact.path / WEIGHTS_FILE)
    with pytest.raises(ArtifactError, match="the weights file does not contain it"):
        make_executor(artifact=artifact)


IDS = [token_ids(9, 0), token_ids(6, 1), token_ids(3, 2)]
TABLES = [[7, 2, 11], [0, 9, -1], [5, -1, -1]]


def test_a_graph_is_captured_once_and_replayed(make_executor: MakeExecutor) -> None:
    device = InterpretedDevice()
    executor = make_executor(device)
    sequences = Growing(IDS, TABLES)
    executor.forward(sequences.step([4, 0, 0], "none"))
    executor.forward(sequences.step([1, 0, 0], "last"))
    executor.forward(sequences.step([1, 0, 0], "last"))
    assert (device.num_captures, device.num_replays) == (2, 3)


def test_warming_up_captures_all_parts_that_engines_run(make_executor: MakeExecutor) -> None:
    device = InterpretedDevice()
    executor = make_executor(device)
    executor.warm_up()
    assert device.num_captures == 2 * 3 + 4  # logits, greedy, draw of two buckets for decoding; body too of the third
    assert device.num_launches == 0
    executor.forward(Growing(IDS, TABLES).step([1, 0, 0], "last"))
    assert device.num_captures == 10


def test_blocking_mode_names_the_kernel_that_fails(
    make_executor: MakeExecutor, launches: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INGOT_CUDA_BLOCKING", "1")
    device = InterpretedDevice()
    executor = make_executor(device)
    device.failing = next(step.node for step in read_launches(launches).programs[-1].launches if "mlp" in step.node)
    with pytest.raises(EngineError, match=f"'{device.failing}' of the ragged bucket of 8 rows: {device.failing} broke"):
        executor.forward(Growing(IDS, TABLES).step([3, 0, 0]))
    assert device.num_captures == 0


def bound(attention: Literal["decode", "ragged"], rows: int, sequences: int) -> BoundProgram:
    program = LaunchProgram(
        rows=rows,
        sequences=sequences,
        logits_rows=sequences,
        attention=attention,
        tiles=0,
        arena_bytes=0,
        places={},
        launches=(),
        head_start=0,
    )
    return BoundProgram(program, InputLayout.of(program), InterpretedDevice(), (), (), {})


BUCKETS = [bound("ragged", 16, 4), bound("decode", 4, 4), bound("ragged", 8, 4), bound("decode", 1, 1)]


@pytest.mark.parametrize(
    ("counts", "wanted"),
    [
        ([1], "decode bucket of 1 rows"),
        ([1, 1, 1], "decode bucket of 4 rows"),
        ([2, 1], "ragged bucket of 8 rows"),
        ([6, 3], "ragged bucket of 16 rows"),
    ],
)
def test_the_smallest_bucket_that_holds_a_step_runs_it(counts: list[int], wanted: str) -> None:
    batch = Growing([token_ids(count) for count in counts], [[0]] * len(counts)).step(counts)
    assert str(choose(BUCKETS, batch)) == wanted


def test_a_step_that_no_bucket_holds_is_refused_with_their_sizes() -> None:
    with pytest.raises(EngineError, match=r"no program takes a step of 9 tokens of 1 sequences; .*rows and 4 seq"):
        choose(BUCKETS[1:], Growing([token_ids(9)], [[0]]).step([9]))


def test_sampling_without_its_kernels_is_refused() -> None:
    with pytest.raises(EngineError, match="the ragged bucket of 16 rows has no kernels that choose tokens"):
        BUCKETS[0].run("greedy", device_stream := InterpretedDevice().make_stream())
    assert not device_stream.queue


def test_a_step_of_an_engine_that_is_not_loaded_is_refused() -> None:
    buffer = BufferArgument(name="hidden", type="fp16")
    call = SegmentCall(file="a.plan", profile=0, inputs={}, outputs={"y0": buffer}, shapes={}, node="... layers.0")
    with pytest.raises(EngineError, match=r"layers.0: runs in tensorrt, which is not loaded"):
        NoBinder()(call, {})
