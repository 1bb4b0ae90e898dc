"""The executor of the native engine: serves an artifact, needs no padding, and refuses by name what it cannot run."""

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ingot.artifact import Artifact
from ingot.artifact.programs.cpu_program import OPERATIONS_FILE, WEIGHTS_FILE
from ingot.errors import ArtifactError, EngineError, UsageError
from ingot.runtime.code_version import code_version
from ingot.runtime.cpu import native_executor
from ingot.runtime.cpu.native.library import native_library
from ingot.runtime.cpu.native_executor import NativeExecutor, choose_threads
from ingot.runtime.executors import AdaptingExecutor, TieredExecutor, load_executor
from ingot.runtime.options import EngineOptions
from tests.runtime.cpu.native.low_rank_cases import random_adapter
from tests.runtime.cpu.native.tiny_program import BLOCK_TOKENS, VOCAB, random_tensors, tiny_program, write_artifact
from tests.runtime.cuda.batches import Growing, token_ids, whole_logits

pytestmark = pytest.mark.skipif(native_library() is None, reason="the library was not built")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return write_artifact(tmp_path_factory.mktemp("native") / "tiny")


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """More threads than cores only cost time: results must not depend on them."""
    monkeypatch.setattr(native_executor, "available_cores", lambda: 8)


@pytest.mark.usefixtures("many_cores")
def test_rows_have_the_same_bits_in_every_batch_without_padding(artifact: Artifact) -> None:
    ids = token_ids(100, 0, VOCAB)
    expected = whole_logits(NativeExecutor(artifact, num_blocks=40, num_threads=1), ids)
    assert expected.shape == (100, VOCAB)
    for threads in (2, 3, 4):
        executor = NativeExecutor(artifact, num_blocks=40, num_threads=threads)
        blocks = np.random.default_rng(threads).permutation(40)[:21].reshape(3, 7)
        growing = Growing([ids, ids[:30], ids[:1]], blocks.tolist())
        for counts in ([3, 20, 1], [1, 0, 0], [80, 10, 0], [16, 0, 0]):
            begin = growing.done[0]
            logits = executor.forward(growing.step(counts))
            assert logits[: counts[0]].tobytes() == expected[begin : begin + counts[0]].tobytes()


def test_the_engine_loads_it_by_its_manifest(artifact: Artifact) -> None:
    executor = load_executor(artifact, EngineOptions(kv_blocks=8, num_threads=1, max_sequences=3))
    assert isinstance(executor, NativeExecutor)
    assert isinstance(executor, TieredExecutor)
    assert (executor.num_blocks, executor.max_sequences, executor.max_batch_tokens) == (8, 3, 512)
    assert executor.device is None
    assert executor.model == artifact.manifest.model
    executor.close()


def test_logits_grow_on_demand(artifact: Artifact) -> None:
    executor = NativeExecutor(artifact, num_blocks=20, num_threads=1, max_batch_tokens=300)
    ids = token_ids(300, 1, VOCAB)
    last = executor.forward(Growing([ids], [list(range(20))]).step([300], "last")).copy()
    assert executor.forward(Growing([ids], [list(range(20))]).step([300]))[-1].tobytes() == last.tobytes()


def test_sequences_have_adapters_by_slots_until_these_are_freed(artifact: Artifact) -> None:
    ids, adapter = token_ids(20, 3, VOCAB), random_adapter(0)
    executor = load_executor(artifact, EngineOptions(kv_blocks=8, num_threads=1, max_adapters=3, max_adapter_rank=40))
    assert isinstance(executor, NativeExecutor)
    assert isinstance(executor, AdaptingExecutor)
    assert (executor.max_adapters, executor.max_adapter_rank, executor.adapter_bytes) == (3, 40, 0)
    plain = whole_logits(executor, ids)
    executor.load_adapter(2, adapter)
    assert executor.adapter_bytes >= adapter.num_bytes
    batch = Growing([ids], [[0, 1]]).step([20])
    changed = executor.forward(replace(batch, adapter_slots=np.array([2], np.int32))).copy()
    assert not np.array_equal(changed, plain)
    assert whole_logits(executor, ids).tobytes() == plain.tobytes()
    executor.unload_adapter(2)
    assert executor.adapter_bytes == 0
    with pytest.raises(EngineError, match="rank 41, and the engine takes up to 40: set max_adapter_rank"):
        executor.load_adapter(0, random_adapter(1, max_rank=41, min_rank=41))
    executor.close()
    with pytest.raises(EngineError, match="is closed"):
        executor.load_adapter(0, adapter)


def test_copied_and_restored_blocks_continue_a_sequence(artifact: Artifact) -> None:
    ids = token_ids(BLOCK_TOKENS + 4, 2, VOCAB)
    executor = NativeExecutor(artifact, num_blocks=6, num_threads=1)
    expected = whole_logits(executor, ids)[-4:]
    executor.copy_block(0, 2)
    host = executor.host_blocks(2)
    assert [thread.name for thread in host.threads] == ["ingot-kv-copy-0"]
    for transfer in (host.save(0, 1), host.restore(1, 3)):
        while not transfer.done:
            time.sleep(0.001)
    for first in (2, 3):
        growing = Growing([ids], [[first, 4]])
        growing.done[0] = BLOCK_TOKENS
        assert executor.forward(growing.step([4])).tobytes() == expected.tobytes()
    host.close()


def test_the_kernel_version_names_the_library_and_the_instruction_sets(artifact: Artifact) -> None:
    best = NativeExecutor(artifact, num_blocks=2, num_threads=1)
    portable = NativeExecutor(artifact, num_blocks=2, num_threads=1, isa="portable")
    assert best.kernel_version.startswith("ingot-cpu ")
    assert code_version(Path(native_executor.__file__).parent) in best.kernel_version
    assert "kernels portable, attention" in portable.kernel_version
    assert best.kernel_version == NativeExecutor(artifact, num_blocks=3, num_threads=1).kernel_version


def test_a_closed_executor_computes_no_more_and_its_logits_stay(artifact: Artifact) -> None:
    executor = NativeExecutor(artifact, num_blocks=4, num_threads=1)
    growing = Growing([token_ids(5, 0, VOCAB)], [[0]])
    logits = executor.forward(growing.step([4]))
    before = logits.copy()
    executor.close()
    executor.close()
    assert logits.tobytes() == before.tobytes()
    with pytest.raises(EngineError, match="the executor is closed; make another"):
        executor.forward(growing.step([1]))


def test_more_threads_than_cores_are_refused(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_executor, "available_cores", lambda: 2)
    assert choose_threads(2) == 2
    for given in (3, 0):
        with pytest.raises(UsageError, match=f"num_threads is {given}; it must be from 1 to 2, the cores"):
            NativeExecutor(artifact, num_blocks=2, num_threads=given)
    monkeypatch.setenv("INGOT_THREADS", "5")
    with pytest.raises(UsageError, match="INGOT_THREADS is 5; it must be from 1 to 2, the cores"):
        choose_threads(None)


def test_a_truncated_pack_is_named(tmp_path: Path) -> None:
    artifact = write_artifact(tmp_path / "tiny")
    damaged = Artifact(artifact.path, artifact.manifest)  # verified before, without stamps
    file = artifact.path / WEIGHTS_FILE
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ArtifactError, match=r"weights.safetensors: is truncated: .*build the artifact again"):
        NativeExecutor(damaged, num_blocks=2, num_threads=1)


def test_weights_that_cannot_be_mapped_are_named(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(native_executor, "place_weights", refuse)
    with pytest.raises(EngineError, match=r"weights.safetensors: cannot be mapped into memory: Cannot allocate memory"):
        NativeExecutor(artifact, num_blocks=2, num_threads=1)


def test_a_program_that_is_not_one_is_named(tmp_path: Path) -> None:
    artifact = write_artifact(tmp_path / "tiny")
    file = artifact.path / OPERATIONS_FILE
    file.write_text(file.read_text().replace('"kind":"attend"', '"kind":"attends"', 1))
    with pytest.raises(ArtifactError, match=r"operations.json: .*attends.*build the artifact again"):
        NativeExecutor(Artifact(artifact.path, artifact.manifest), num_blocks=2, num_threads=1)


@pytest.mark.parametrize("name", ["down1", "first1.norm", "qkv0.bias", "cos"])
def test_tensors_that_do_not_fit_the_program_are_named(tmp_path: Path, name: str) -> None:
    tensors = random_tensors(tiny_program())
    tensors[name] = tensors[name][:-1]
    artifact = write_artifact(tmp_path / "short", tensors=tensors)
    with pytest.raises(ArtifactError, match=rf"'{name}' is .*the program needs .*build the artifact again"):
        NativeExecutor(artifact, num_blocks=2, num_threads=1)
    del tensors[name]
    artifact = write_artifact(tmp_path / "missing", tensors=tensors)
    with pytest.raises(ArtifactError, match=f"holds no tensor '{name}'"):
        NativeExecutor(artifact, num_blocks=2, num_threads=1)
