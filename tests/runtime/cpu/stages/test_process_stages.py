"""Stages in processes compute the bits of one process, and are replaced when they die or hang."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.artifact import Artifact
from ingot.artifact.programs.cpu_program import WEIGHTS_FILE
from ingot.artifact.programs.cpu_program_checks import read_operations
from ingot.errors import EngineError, UsageError
from ingot.pipeline.targets.cpu.place_rules import assign_devices
from ingot.runtime.asking.outputs import Completion
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.cpu import kv_pool
from ingot.runtime.cpu.native_executor import NativeExecutor
from ingot.runtime.cpu.stages import process_stages
from ingot.runtime.cpu.stages.process_stages import ProcessStages
from ingot.runtime.engine.engine import Engine
from ingot.runtime.executors import load_executor
from ingot.runtime.options import EngineOptions
from tests.conftest import BuildArtifact
from tests.each_case import each_case
from tests.parity import CHECKPOINTS
from tests.runtime.cpu.native.kernel_cases import needs_library
from tests.runtime.cpu.native.low_rank_cases import random_adapter
from tests.runtime.cpu.native.staged_artifacts import NAMES, assert_same_bits, ragged_logits, with_stages
from tests.runtime.cpu.native.tiny_program import write_artifact
from tests.runtime.cuda.batches import Growing, token_ids, whole_logits

pytestmark = [needs_library, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

IDS = token_ids(20, 3, 300)


@pytest.fixture(scope="module")
def demo(build_unmeasured: BuildArtifact) -> Artifact:
    return build_unmeasured("demo")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Artifact, Artifact]:
    """The tiny program in one piece, and with its layers on two devices in a row."""
    folder = tmp_path_factory.mktemp("tiny")
    artifact = write_artifact(folder / "whole")
    names = [one.node for one in read_operations(artifact).operations]
    first = max(at for at, name in enumerate(names) if name.endswith("0"))
    return artifact, with_stages(artifact, folder / "split", [int(at > first) for at in range(len(names))])


@pytest.fixture
def staged(tiny: tuple[Artifact, Artifact]) -> Iterator[NativeExecutor]:
    executor = NativeExecutor(tiny[1], num_blocks=8, num_threads=1, max_adapters=2, max_adapter_rank=40, stages=2)
    yield executor
    executor.close()


@pytest.fixture
def expected(tiny: tuple[Artifact, Artifact]) -> Iterator[bytes]:
    executor = NativeExecutor(tiny[0], num_blocks=8, num_threads=1)
    yield whole_logits(executor, IDS).tobytes()
    executor.close()


def pids(executor: NativeExecutor) -> list[int]:
    program = executor._program
    assert isinstance(program, ProcessStages)
    return [each.process.pid for each in program._processes]


def kill_idle(executor: NativeExecutor, number: int) -> None:
    """Kill a stage while it has nothing to compute."""
    os.kill(pids(executor)[number], signal.SIGKILL)
    while executor.stages.num_running == 2:
        time.sleep(0.01)


@each_case("count", [2, 4])
def test_the_demo_model_has_the_same_bits_in_processes(demo: Artifact, count: int) -> None:
    assert_same_bits(ragged_logits(demo, stages=count), ragged_logits(demo))


@each_case("name", ["qwen3_moe", "gemma2", "falcon_h1"])
def test_other_models_have_the_same_bits_in_processes(build_unmeasured: BuildArtifact, name: str) -> None:
    artifact = build_unmeasured("fp32-cpu", CHECKPOINTS / name, "cpu.engine=native")
    assert_same_bits(ragged_logits(artifact, stages=2), ragged_logits(artifact))


def test_experts_in_a_process_of_their_own_have_the_same_bits(build_unmeasured: BuildArtifact, tmp_path: Path) -> None:
    artifact = build_unmeasured("fp32-cpu", CHECKPOINTS / "qwen3_moe", "cpu.engine=native")
    devices = assign_devices(read_operations(artifact).operations, {"host": "experts"}, NAMES[:2])
    apart = with_stages(artifact, tmp_path / "apart", devices)
    assert_same_bits(ragged_logits(apart, stages=2), ragged_logits(artifact))


def test_steps_in_flight_keep_their_own_logits(tiny: tuple[Artifact, Artifact], staged: NativeExecutor) -> None:
    assert staged.num_at_once == 2
    batches = [Growing([token_ids(9, seed, 300)], [[seed]]).step([9], "all") for seed in range(2)]
    begun = [staged.begin(batch) for batch in batches]
    found = [step.logits() for step in begun]
    executor = NativeExecutor(tiny[0], num_blocks=8, num_threads=1)
    for batch, logits in zip(batches, found, strict=True):
        assert executor.forward(batch).tobytes() == logits.tobytes()
    executor.close()


def test_a_stage_that_is_killed_fails_the_step_by_name_and_the_next_step_has_the_same_bits(
    staged: NativeExecutor, expected: bytes
) -> None:
    assert whole_logits(staged, IDS).tobytes() == expected
    for number in range(2):
        killed = pids(staged)
        os.kill(killed[1 - number], signal.SIGSTOP)  # no step ends any more
        step = staged.begin(Growing([IDS], [[0, 1]]).step([20]))
        os.kill(killed[number], signal.SIGKILL)
        with pytest.raises(
            EngineError, match=rf"stage {number} of 2 \(process {killed[number]}\) was killed \(SIGKILL"
        ):
            step.logits()
        assert staged.stages.num_running == 0
        assert whole_logits(staged, IDS).tobytes() == expected
        assert staged.stages.num_running == 2
        assert staged.stages.num_restarts == number + 1
        assert not set(killed) & set(pids(staged))


def test_a_step_that_is_interrupted_when_it_begins_is_not_computed_later(
    staged: NativeExecutor, expected: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(descriptor: int, content: bytes) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            whole_logits(staged, IDS)
    assert whole_logits(staged, IDS).tobytes() == expected


def test_a_stage_that_ended_while_nothing_was_computed_fails_no_step(staged: NativeExecutor, expected: bytes) -> None:
    kill_idle(staged, 0)
    assert whole_logits(staged, IDS).tobytes() == expected
    assert staged.stages.num_restarts == 1


@each_case("number", range(2))
def test_a_stage_that_hangs_is_replaced(
    monkeypatch: pytest.MonkeyPatch, staged: NativeExecutor, expected: bytes, number: int
) -> None:
    monkeypatch.setattr(process_stages, "_HUNG_SECONDS", 0.5)
    os.kill(pids(staged)[number], signal.SIGSTOP)
    with pytest.raises(EngineError, match=rf"stage {number} of 2 .* is stopped by a signal .* started again"):
        whole_logits(staged, IDS)
    assert staged.stages.problem
    assert whole_logits(staged, IDS).tobytes() == expected
    assert not staged.stages.problem


def test_a_stage_refuses_weights_that_were_replaced_after_they_were_verified(tmp_path: Path) -> None:
    artifact = write_artifact(tmp_path / "whole")
    names = [one.node for one in read_operations(artifact).operations]
    split = with_stages(artifact, tmp_path / "split", [int(at > 3) for at in range(len(names))])
    executor = NativeExecutor(split, num_blocks=8, num_threads=1, stages=2)
    file = split.path / WEIGHTS_FILE
    other = file.with_suffix(".other")
    other.write_bytes(file.read_bytes()[::-1])
    other.replace(file)
    kill_idle(executor, 0)
    for _ in range(2):
        with pytest.raises(EngineError, match=r"stage 0 of 2 .* cannot be loaded: .*was replaced or written to after"):
            whole_logits(executor, IDS)
    executor.close()


def test_a_step_that_a_stage_cannot_compute_raises_its_error_and_no_stage_ends(
    staged: NativeExecutor, expected: bytes
) -> None:
    before, step = pids(staged), Growing([IDS], [[0, 1]]).step([20])
    with pytest.raises(EngineError, match="token id or position out of range"):
        staged.forward(replace(step, input_ids=np.full(20, 10**6)))
    assert whole_logits(staged, IDS).tobytes() == expected
    assert pids(staged) == before


def test_adapters_have_the_same_bits_and_outlive_a_stage(
    tiny: tuple[Artifact, Artifact], staged: NativeExecutor
) -> None:
    adapter, batch = random_adapter(0), Growing([IDS], [[0, 1]]).step([20])
    batch = replace(batch, adapter_slots=np.array([1], np.int32))
    whole = NativeExecutor(tiny[0], num_blocks=8, num_threads=1, max_adapters=2, max_adapter_rank=40)
    whole.load_adapter(1, adapter)
    expected = whole.forward(batch).tobytes()
    whole.close()
    staged.load_adapter(1, adapter)
    assert staged.adapter_bytes == adapter.num_bytes
    assert staged.forward(batch).tobytes() == expected
    kill_idle(staged, 1)
    assert staged.forward(batch).tobytes() == expected
    staged.unload_adapter(1)
    other = replace(adapter, changes={**adapter.changes, "elsewhere": next(iter(adapter.changes.values()))})
    with pytest.raises(EngineError, match="elsewhere"):
        staged.load_adapter(0, other)
    assert staged.adapter_bytes == 0


def test_stages_end_with_the_process_of_their_engine(tiny: tuple[Artifact, Artifact]) -> None:
    script = f"""
import time
from ingot.artifact import open_artifact
from ingot.runtime.cpu.native_executor import NativeExecutor
executor = NativeExecutor(open_artifact({str(tiny[1].path)!r}), num_blocks=8, num_threads=1, stages=2)
print(*(each.process.pid for each in executor._program._processes), flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout
        found = [int(each) for each in engine.stdout.readline().split()]
        assert len(found) == 2
        assert all(is_alive(each) for each in found)
        engine.kill()
    until = time.monotonic() + 20
    while any(map(is_alive, found)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(map(is_alive, found))


def is_alive(pid: int) -> bool:
    """Return whether a process runs: a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def test_an_engine_has_the_tokens_of_one_process_whatever_else_it_does(demo: Artifact) -> None:
    prompts = [[5 + number % 3, 7, *range(20, 20 + 9 * number)] for number in range(9)]
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=5, n=2, ignore_eos=True)
    ways: list[tuple[dict[str, Any], tuple[int | None, ...]]] = [
        ({}, (None, 2, 4)),
        ({"kv_blocks": 24, "kv_host_bytes": 1 << 22}, (None, 2)),
        ({"speculation": "lookup", "max_batch_tokens": 64}, (None, 2)),
    ]
    for options, counts in ways:
        found = []
        for stages in counts:
            with Engine.load(demo, num_threads=1, stages=stages, max_sequences=6, **options) as engine:
                completions = engine.generate(prompts, params)
                found.append([choice.token_ids for each in completions for choice in each.choices])
                metrics = engine.metrics()
                assert metrics.num_stages == (stages or 0)
                assert metrics.num_failed_steps == 0
        assert all(each == found[0] for each in found)


def test_requests_outlive_a_stage_that_is_killed_while_they_are_computed(demo: Artifact) -> None:
    prompts, params = [[number, 9, 11] for number in range(8)], SamplingParams(max_tokens=40, ignore_eos=True)
    with Engine.load(demo, num_threads=1) as engine:
        expected = [each.token_ids for each in engine.generate(prompts, params)]
    with Engine.load(demo, num_threads=1, stages=2) as engine:
        ids = [engine.add(prompt, params) for prompt in prompts]
        found: dict[int, Completion] = {}
        for number in range(10**4):
            if number in (5, 30):
                os.kill(pids(engine._executor)[number % 2], signal.SIGKILL)  # type: ignore[arg-type]
            found |= {output.request_id: output.result for output in engine.step() if output.result}
            if not engine.has_unfinished():
                break
        assert [found[each].token_ids for each in ids] == expected
        assert engine.metrics().num_stage_restarts == 2


def test_what_stages_do_not_support_is_refused_with_what_to_do(
    demo: Artifact,
    tiny: tuple[Artifact, Artifact],
    build_unmeasured: BuildArtifact,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UsageError, match="stages is 9; the model can be cut into at most 6"):
        load_executor(demo, EngineOptions(stages=9))
    shared = build_unmeasured("fp32-cpu", CHECKPOINTS / "gemma4_text", "cpu.engine=native")
    with pytest.raises(UsageError, match=r"at most 1: .* layers that share keys and values stay together"):
        load_executor(shared, EngineOptions(stages=2))
    with pytest.raises(UsageError, match=r"stages is 3, and .* was built for 2 devices"):
        load_executor(tiny[1], EngineOptions(stages=3))
    with pytest.raises(UsageError, match=r"stages is 2, and kv_offload is 200%"):
        load_executor(demo, EngineOptions(stages=2, kv_offload="200%"))
    with pytest.raises(UsageError, match=r"stages is 2, and cpu_affinity is .*; name a core or more for each"):
        load_executor(demo, EngineOptions(stages=2, cpu_affinity="0"))
    onnx = replace(demo, manifest=demo.manifest.model_copy(update={"engine": "onnxruntime"}))
    with pytest.raises(UsageError, match="only the native CPU engine computes in several processes"):
        load_executor(onnx, EngineOptions(stages=2))
    monkeypatch.setattr(kv_pool, "physical_bytes", lambda: 1 << 24)
    with pytest.raises(EngineError, match=r"needs .* and this machine has 16.8 MB; lower kv_blocks"):
        load_executor(demo, EngineOptions(stages=2, kv_blocks=10**4, max_batch_tokens=16))
