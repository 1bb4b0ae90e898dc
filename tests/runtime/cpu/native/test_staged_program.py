"""A program in stages computes the bits of one in one piece, wherever it is cut."""

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ingot.artifact import Artifact
from ingot.artifact.programs.cpu_program import Attend, CpuProgram
from ingot.artifact.programs.cpu_program_checks import read_operations
from ingot.artifact.programs.stage_checks import read_stages
from ingot.artifact.programs.stages import LOGITS
from ingot.errors import EngineError
from ingot.pipeline.targets.cpu.place_rules import assign_devices
from ingot.runtime.cpu.native_executor import NativeExecutor
from tests.conftest import BuildArtifact
from tests.each_case import each_case
from tests.parity import CHECKPOINTS
from tests.runtime.cpu.native.kernel_cases import needs_library
from tests.runtime.cpu.native.low_rank_cases import random_adapter
from tests.runtime.cpu.native.staged_artifacts import (
    NAMES,
    assert_same_bits,
    ragged_logits,
    runs_of,
    with_stages,
)
from tests.runtime.cpu.native.tiny_program import gathered_early, write_artifact
from tests.runtime.cuda.batches import Growing, token_ids, whole_logits

pytestmark = needs_library

MIXTURES = ("qwen3_moe", "qwen2_moe", "deepseek_v3", "gpt_oss")
OTHERS = ("gemma4_text", "falcon_h1", "qwen3_next", "lfm2", "gpt2", "gemma2")
"""Models with shared keys and values, recurrent layers, tables of positions, and windows."""


@pytest.fixture(scope="module")
def demo(build_unmeasured: BuildArtifact) -> Artifact:
    return build_unmeasured("demo")


def test_the_demo_model_has_the_same_bits_split_after_every_number_of_layers(demo: Artifact, tmp_path: Path) -> None:
    expected, operations = ragged_logits(demo), read_operations(demo).operations
    assert set(assign_devices(operations, {"gpu_layers": 0}, NAMES[:2])) == {1}
    for layers in range(1, demo.manifest.model.num_layers + 1):
        devices = assign_devices(operations, {"gpu_layers": layers}, NAMES[:2])
        split = with_stages(demo, tmp_path / str(layers), devices)
        runs = read_stages(split).runs
        assert [run.device for run in runs] == [1, 0]
        assert [len(run.crossings) for run in runs] == [0, 1]
        assert_same_bits(ragged_logits(split), expected)


@each_case("name", [*MIXTURES, *OTHERS])
def test_other_models_have_the_same_bits_split_by_layers_experts_and_at_random(
    build_unmeasured: BuildArtifact, tmp_path: Path, name: str
) -> None:
    artifact = build_unmeasured("fp32-cpu", CHECKPOINTS / name, "cpu.engine=native")
    program, expected, rng = read_operations(artifact), ragged_logits(artifact), np.random.default_rng(len(name))
    places = [{"gpu_layers": number} for number in range(1, artifact.manifest.model.num_layers + 1)]
    placed = [assign_devices(program.operations, place, NAMES[:2]) for place in places]
    if name in MIXTURES:
        placed.append(assign_devices(program.operations, {"host": "experts"}, NAMES[:2]))
        assert len(list(groups(placed[-1]))) == 1 + 2 * sum(one.kind == "experts" for one in program.operations)
    placed += [runs_of(program.operations, rng, 3) for _ in range(4)]
    for number, devices in enumerate(together(program, each) for each in placed):
        assert_same_bits(ragged_logits(with_stages(artifact, tmp_path / str(number), devices)), expected)


def groups(devices: list[int]) -> list[int]:
    """The devices of the stages."""
    return [device for at, device in enumerate(devices) if at == 0 or devices[at - 1] != device]


def together(program: CpuProgram, devices: list[int]) -> list[int]:
    """Move operations that need one device: layers that share keys and values, and all that makes the logits."""
    made, own = list(devices), dict[int, int]()
    last = next(at for at, one in enumerate(program.operations) if any(view.buffer == LOGITS for view in one.views))
    for at, one in enumerate(program.operations):
        if isinstance(one, Attend):
            source = program.kv.layers[one.layer].source
            made[at] = own.setdefault(source, made[at])
        elif at > last and any(view.buffer == LOGITS for view in one.views):
            made[at] = made[last]
    return made


@each_case("seed", range(12))
def test_every_cut_of_the_tiny_program_has_the_same_bits(tmp_path: Path, seed: int) -> None:
    program, rng = gathered_early(), np.random.default_rng(seed)
    artifact = write_artifact(tmp_path / "whole", program)
    devices = rng.integers(0, 3, len(program.operations)).tolist()
    split = with_stages(artifact, tmp_path / "split", together(program, devices))
    for isa in (None, "portable"):
        assert_same_bits(ragged_logits(split, isa=isa), ragged_logits(artifact, isa=isa))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Artifact, Artifact]:
    """The tiny program in one piece, and with its first layer on the second device."""
    folder = tmp_path_factory.mktemp("tiny")
    artifact = write_artifact(folder / "whole")
    devices = [int(one.node.endswith("0")) for one in read_operations(artifact).operations]
    return artifact, with_stages(artifact, folder / "split", devices)


def test_each_device_keeps_the_layers_of_its_attention_and_its_own_matrices(tiny: tuple[Artifact, Artifact]) -> None:
    whole, cut = read_operations(tiny[0]), read_stages(tiny[1])
    assert [device.layers for device in cut.devices] == [(1,), (0,)]
    names = [device.program.matrices.keys() for device in cut.devices]
    assert names[0] | names[1] == whole.matrices.keys()
    assert not names[0] & names[1]
    sizes = [device.program.kv.block_bytes for device in cut.devices]
    assert sizes == [whole.kv.block_bytes // 2] * 2
    runs = sorted(run.whole for device in cut.devices for run in device.block_runs(whole.kv))
    assert runs == [0, whole.kv.block_bytes // 2]


def test_adapters_change_the_layers_of_both_devices(tiny: tuple[Artifact, Artifact]) -> None:
    ids, adapter = token_ids(20, 3, 300), random_adapter(0)
    found = []
    for artifact in tiny:
        executor = NativeExecutor(artifact, num_blocks=8, num_threads=1, max_adapters=2, max_adapter_rank=40)
        plain = whole_logits(executor, ids)
        executor.load_adapter(1, adapter)
        assert executor.adapter_bytes >= adapter.num_bytes
        batch = replace(Growing([ids], [[0, 1]]).step([20]), adapter_slots=np.array([1], np.int32))
        found.append(executor.forward(batch).copy())
        assert not np.array_equal(found[-1], plain)
        executor.unload_adapter(1)
        assert executor.adapter_bytes == 0
        assert whole_logits(executor, ids).tobytes() == plain.tobytes()
        executor.close()
    assert found[0].tobytes() == found[1].tobytes()


def test_an_adapter_of_other_layers_is_refused_by_name_and_its_slot_stays_free(
    tiny: tuple[Artifact, Artifact],
) -> None:
    adapter = random_adapter(0)
    other = replace(adapter, changes={**adapter.changes, "elsewhere": next(iter(adapter.changes.values()))})
    executor = NativeExecutor(tiny[1], num_blocks=8, num_threads=1, max_adapter_rank=40)
    with pytest.raises(EngineError, match="elsewhere"):
        executor.load_adapter(0, other)
    assert executor.adapter_bytes == 0
    executor.close()


def test_blocks_move_with_both_parts_within_the_pool_and_to_the_host(tiny: tuple[Artifact, Artifact]) -> None:
    artifact, split = tiny
    size = artifact.manifest.kv.block_tokens
    ids = token_ids(size + 4, 2, 300)
    executor = NativeExecutor(artifact, num_blocks=6, num_threads=1)
    expected = whole_logits(executor, ids)[-4:]
    slot = saved(executor)
    executor.close()
    executor = NativeExecutor(split, num_blocks=6, num_threads=1)
    whole_logits(executor, ids)
    executor.copy_block(0, 2)
    host = executor.host_blocks(2)
    for transfer in (host.save(0, 1), host.restore(1, 3)):
        while not transfer.done:
            time.sleep(0.001)
        assert transfer.error is None
    assert bytes(host.view(1)) == slot
    for first in (2, 3):
        growing = Growing([ids], [[first, 4]])
        growing.done[0] = size
        assert executor.forward(growing.step([4])).tobytes() == expected.tobytes()
    host.close()
    executor.close()


def saved(executor: NativeExecutor) -> bytes:
    """The bytes of block 0 in host memory."""
    host = executor.host_blocks(1)
    transfer = host.save(0, 0)
    while not transfer.done:
        time.sleep(0.001)
    found = bytes(host.view(0))
    host.close()
    return found


def test_a_closed_executor_of_stages_computes_no_more_and_its_logits_stay(tiny: tuple[Artifact, Artifact]) -> None:
    executor = NativeExecutor(tiny[1], num_blocks=4, num_threads=1)
    growing = Growing([token_ids(5, 0, 300)], [[0]])
    logits = executor.forward(growing.step([4]))
    before = logits.copy()
    assert not executor.is_computing
    executor.close()
    executor.close()
    assert logits.tobytes() == before.tobytes()
    with pytest.raises(EngineError, match="the executor is closed; make another"):
        executor.forward(growing.step([1]))
