"""Ranks that compute each step together have the bits of one process, and are replaced when one dies or hangs."""

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest

from ingot.artifact import Artifact
from ingot.artifact.programs.cpu_program import Attend, Experts
from ingot.artifact.programs.cpu_program_checks import read_operations
from ingot.errors import EngineError, UsageError
from ingot.runtime.cpu import native_executor
from ingot.runtime.cpu.native.tensor_parallel import Rank, heads_of, own_ranges, tile_bounds
from ingot.runtime.cpu.native_executor import NativeExecutor
from ingot.runtime.cpu.stages import process_stages
from ingot.runtime.cpu.stages.process_stages import ProcessStages
from ingot.runtime.executors import load_executor
from ingot.runtime.options import EngineOptions
from tests.conftest import BuildArtifact
from tests.each_case import each_case
from tests.parity import CHECKPOINTS
from tests.runtime.cpu.native.kernel_cases import needs_library
from tests.runtime.cpu.native.low_rank_cases import random_adapter
from tests.runtime.cpu.native.staged_artifacts import assert_same_bits, ragged_logits
from tests.runtime.cpu.native.tiny_program import write_artifact
from tests.runtime.cuda.batches import Growing, token_ids, whole_logits

pytestmark = [needs_library, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

IDS = token_ids(20, 3, 300)


@pytest.fixture
def divides_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks divide the small layers of tiny models, too."""
    monkeypatch.setattr(process_stages, "Rank", partial(Rank, least_multiplications=0))


@pytest.fixture(scope="module")
def demo(build_unmeasured: BuildArtifact) -> Artifact:
    return build_unmeasured("demo")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return write_artifact(tmp_path_factory.mktemp("tiny") / "artifact")


@pytest.fixture
def expected(tiny: Artifact) -> Iterator[bytes]:
    executor = NativeExecutor(tiny, num_blocks=8, num_threads=1)
    yield whole_logits(executor, IDS).tobytes()
    executor.close()


@pytest.fixture
def pair(tiny: Artifact, divides_all: None) -> Iterator[NativeExecutor]:
    executor = NativeExecutor(tiny, num_blocks=8, num_threads=1, max_adapters=2, max_adapter_rank=40, ranks=2)
    yield executor
    executor.close()


def pids(executor: NativeExecutor) -> list[int]:
    program = executor._program
    assert isinstance(program, ProcessStages)
    return [each.process.pid for each in program._processes]


# Those of .ci/proofs.toml leave to everyday tests experts on two ranks, and a tiny program with adapters and losses.
@each_case("ranks", [2, 3])
def test_the_demo_model_has_the_same_bits(demo: Artifact, ranks: int) -> None:
    assert_same_bits(ragged_logits(demo, ranks=ranks), ragged_logits(demo))


def test_stages_of_ranks_have_the_same_bits(demo: Artifact) -> None:
    assert_same_bits(ragged_logits(demo, stages=2, ranks=2), ragged_logits(demo))


def test_ranks_with_several_threads_have_the_same_bits(demo: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_executor, "available_cores", lambda: 4)
    assert_same_bits(ragged_logits(demo, ranks=2, num_threads=4), ragged_logits(demo))


# Grouped experts with a shared one and latent keys, windows with caps, recurrent layers of three kinds, sinks, and
# layers that share keys.
@each_case("name", ["deepseek_v3", "gemma2", "falcon_h1", "qwen3_next", "gpt_oss", "gemma4_text"])
def test_every_kind_of_layer_has_the_same_bits(build_unmeasured: BuildArtifact, divides_all: None, name: str) -> None:
    artifact = build_unmeasured("fp32-cpu", CHECKPOINTS / name, "cpu.engine=native")
    assert_same_bits(ragged_logits(artifact, ranks=3), ragged_logits(artifact))


@each_case("kv", ["int8", "int4"])
def test_quantized_keys_have_the_same_bits(build_unmeasured: BuildArtifact, divides_all: None, kv: str) -> None:
    artifact = build_unmeasured(
        "fp32-cpu", CHECKPOINTS / "llama", "cpu.engine=native", f"passes=[{{quantize-kv-cache: {{precision: {kv}}}}}]"
    )
    assert_same_bits(ragged_logits(artifact, ranks=2), ragged_logits(artifact))


@each_case("ranks", [2, 3])
def test_whole_experts_have_the_same_bits(build_unmeasured: BuildArtifact, divides_all: None, ranks: int) -> None:
    artifact = build_unmeasured("fp32-cpu", CHECKPOINTS / "qwen3_moe", "cpu.engine=native")
    expected = ragged_logits(artifact)
    assert_same_bits(ragged_logits(artifact, ranks=ranks, whole_experts=True), expected)
    assert_same_bits(ragged_logits(artifact, ranks=ranks), expected)


def test_two_ranks_of_whole_experts_have_the_same_bits(build_unmeasured: BuildArtifact, divides_all: None) -> None:
    artifact = build_unmeasured("fp32-cpu", CHECKPOINTS / "qwen3_moe", "cpu.engine=native")
    assert_same_bits(ragged_logits(artifact, ranks=2, whole_experts=True), ragged_logits(artifact))


def test_experts_are_divided_by_how_often_they_are_chosen(
    build_unmeasured: BuildArtifact, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    artifact = build_unmeasured("fp32-cpu", CHECKPOINTS / "qwen3_moe", "cpu.engine=native")
    nodes = {one.node: one.count for one in read_operations(artifact).operations if isinstance(one, Experts)}
    # The busiest expert has four times the share of each other one.
    shares = {node: (4 / (count + 3), *[1 / (count + 3)] * (count - 1)) for node, count in nodes.items()}
    (count,) = {*nodes.values()}
    largest = (4 + count // 2 - 1) / (count + 3)
    for counted, words in (
        (
            shares,
            f"the busiest rank of a layer has {100 * largest:.1f} % of its choices, as counted on the calibration",
        ),
        ({}, "the busiest rank of a layer has 50.0 % of its choices, if all are equally likely"),
    ):
        monkeypatch.setattr(native_executor, "read_expert_shares", lambda *_, found=counted: found)
        caplog.clear()
        with caplog.at_level("INFO"):
            NativeExecutor(artifact, num_blocks=8, num_threads=1, ranks=2, whole_experts=True).close()
        assert any(words in line and "50.0 % would be even" in line for line in caplog.messages)


def test_adapters_have_the_same_bits(pair: NativeExecutor, tiny: Artifact) -> None:
    alone = NativeExecutor(tiny, num_blocks=8, num_threads=1, max_adapters=2, max_adapter_rank=40)
    for executor in (alone, pair):
        executor.load_adapter(1, random_adapter(0))
    plain = Growing([IDS], [[0, 1]]).step([len(IDS)])
    batches = [replace(plain, adapter_slots=np.array([slot], np.int32)) for slot in (1, -1)]
    for batch in batches:
        assert pair.forward(batch).tobytes() == alone.forward(batch).tobytes()
    assert alone.forward(batches[0]).tobytes() != alone.forward(batches[1]).tobytes()
    alone.close()


@each_case("number", [0, 1])
@each_case("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_fails_its_step_by_name_and_the_next_step_has_the_same_bits(
    pair: NativeExecutor, expected: bytes, monkeypatch: pytest.MonkeyPatch, number: int, sent: signal.Signals
) -> None:
    monkeypatch.setattr(process_stages, "_HUNG_SECONDS", 1.0)
    assert whole_logits(pair, IDS).tobytes() == expected
    before, lost = pair.stages.num_restarts, pids(pair)[number]
    os.kill(lost, sent)
    with pytest.raises(EngineError, match=rf"rank {number} of 2 \(process {lost}\) (was killed|is stopped)"):
        for _ in range(100):
            whole_logits(pair, IDS)
            # The engine replaces ranks that ended while nothing was computed, without an error.
            if pair.stages.num_restarts > before:
                raise EngineError(f"rank {number} of 2 (process {lost}) was killed, and replaced")
    assert whole_logits(pair, IDS).tobytes() == expected
    assert pair.stages.num_restarts == before + 1
    assert lost not in pids(pair)


def test_a_step_that_is_out_of_range_fails_and_the_next_one_has_the_same_bits(
    pair: NativeExecutor, expected: bytes
) -> None:
    bad = Growing([IDS], [[0, 1]]).step([len(IDS)], "all")
    bad.input_ids[3] = 10**6
    with pytest.raises(EngineError, match="token id or position out of range"):
        pair.forward(bad)
    assert whole_logits(pair, IDS).tobytes() == expected
    assert pair.stages.num_restarts == 0


def test_a_rank_reads_its_own_part_of_the_weights(demo: Artifact) -> None:
    program = read_operations(demo)
    tables = {one.table for one in program.operations if one.kind == "embed"}
    whole = {name: matrix.num_bytes for name, matrix in program.matrices.items() if name not in tables}
    of_ranks = [own_ranges(program, Rank(number, 2)) for number in range(2)]
    for name, size in whole.items():
        ranges = sorted(one for own in of_ranks for one in own.get(name, []))
        assert ranges[0][0] == 0
        assert sum(length for _, length in ranges) == size
        assert all(first + length == later for (first, length), (later, _) in pairwise(ranges))
    sizes = [sum(length for name in own if name in whole for _, length in own[name]) for own in of_ranks]
    assert max(sizes) < 0.55 * sum(whole.values())


@each_case(("heads", "kv"), [(8, 8), (8, 2), (6, 3), (4, 1), (1, 1), (5, 5), (12, 4)])
@each_case("count", [1, 2, 3, 4, 5, 8, 16])
def test_each_head_is_attended_once_and_each_key_is_stored_once(heads: int, kv: int, count: int) -> None:
    attend = Attend.model_construct(num_heads=heads, num_kv_heads=kv, head_dim=4, value_dim=0)
    parts = [heads_of(attend, number, count) for number in range(count)]
    assert [head for part in parts for head in part.queries] == list(range(heads))
    assert sorted(head for part in parts if part.writes for head in part.kv) == list(range(kv))
    for part in parts:
        assert {head * kv // heads for head in part.queries} <= set(part.kv)
        assert len(part.queries) % len(part.kv) == 0


def test_columns_are_divided_in_whole_tiles() -> None:
    assert tile_bounds(100, 16, 3) == (0, 32, 64, 100)
    assert tile_bounds(16, 16, 3) == (0, 0, 0, 16)
    assert tile_bounds(7, 1, 7) == tuple(range(8))


@each_case(
    ("options", "message"),
    [
        ({"expert_parallel": True}, "expert_parallel is set without tensor_parallel"),
        ({"tensor_parallel": 2, "expert_parallel": True}, "has no experts; leave it out"),
        ({"tensor_parallel": 65}, "tensor_parallel is 65; it must be from 1 to 64"),
        ({"tensor_parallel": 2, "kv_offload": "50%"}, "tensor_parallel is 2, and kv_offload is 50%"),
        (
            {"stages": 2, "tensor_parallel": 2, "cpu_affinity": (0,)},
            "stages is 2 and tensor_parallel is 2, and cpu_aff",
        ),
    ],
)
def test_what_ranks_do_not_support_is_refused(tiny: Artifact, options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_executor(tiny, EngineOptions(kv_blocks=8, num_threads=None, **options))  # type: ignore[arg-type]


def test_a_program_for_onnxruntime_has_no_ranks(build_unmeasured: BuildArtifact) -> None:
    artifact = build_unmeasured("fp32-cpu", CHECKPOINTS / "llama", "cpu.engine=onnxruntime")
    with pytest.raises(UsageError, match="tensor_parallel is 2, and only the native CPU engine"):
        load_executor(artifact, EngineOptions(tensor_parallel=2))
