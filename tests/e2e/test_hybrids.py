"""A model with recurrent layers through both CPU engines: side state changes no bit, wherever a prompt is resumed."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from benchmarks.kv.random_rollbacks import run_round
from numpy.typing import NDArray

from ingot.artifact import Artifact
from ingot.errors import UsageError
from ingot.pipeline import compile as compile_module
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.cpu.native import attention, recurrence
from ingot.runtime.engine.engine import Engine
from ingot.runtime.executors import TieredStatefulExecutor, load_executor
from ingot.runtime.forward_batch import FloatArray, ForwardBatch
from ingot.runtime.options import EngineOptions
from ingot.validation.verify import VerifyOptions, open_subject, verify
from tests.mutations.faults import FAULTS, Fault
from tests.mutations.score import score, subject_for
from tests.parity import CHECKPOINTS

BuildHybrid = Callable[..., Artifact]
ENGINES = ("native", "onnxruntime")
PAIRS = (
    "prefix-hit+chunked-prefill",
    "batch-mates+preemption",
    "swap+choices",
    "disk-restore+lookup",
    "host-restore+failed-transfers",
)
STATE_FAULTS = [fault for fault in FAULTS if fault.layout == "side state"]


@pytest.fixture(params=ENGINES)
def artifact(request: pytest.FixtureRequest, build_hybrid: BuildHybrid) -> Artifact:
    return build_hybrid("fp32-cpu", f"cpu.engine={request.param}")


def prompt_of(tokens: int, artifact: Artifact) -> list[int]:
    rng = np.random.default_rng(5)
    return [int(token) for token in rng.integers(0, artifact.manifest.model.vocab_size, tokens)]


def executor_of(artifact: Artifact, *, blocks: int, slots: int) -> TieredStatefulExecutor:
    executor = load_executor(artifact, EngineOptions(kv_blocks=blocks, state_slots=slots, max_batch_tokens=1024))
    assert isinstance(executor, TieredStatefulExecutor)
    assert executor.num_states == slots
    return executor


def step(tokens: NDArray[np.int64], start: int, slot: int, blocks: int) -> ForwardBatch:
    """One sequence's tokens from `start` on, with logits of all."""
    end = start + len(tokens)
    return ForwardBatch(
        input_ids=tokens,
        position_ids=np.arange(start, end),
        logits_indices=np.arange(len(tokens)),
        query_starts=np.array([0, len(tokens)], np.int32),
        context_lens=np.array([end], np.int32),
        block_tables=np.arange(blocks, dtype=np.int32)[None],
        state_slots=np.array([slot], np.int32),
    )


def test_a_prompt_resumes_at_every_block_boundary_with_the_same_bits(artifact: Artifact) -> None:
    tokens = np.array(prompt_of(1000, artifact))
    boundaries = range(16, 1000, 16)
    with_slots = executor_of(artifact, blocks=63, slots=2 + len(boundaries))
    whole = with_slots.forward(step(tokens, 0, 0, 63)).copy()
    assert np.isfinite(whole).all()
    for number, end in enumerate(boundaries):  # a block a step, and a copy of the state after each
        logits = with_slots.forward(step(tokens[end - 16 : end], end - 16, 1, 63))
        assert logits.tobytes() == whole[end - 16 : end].tobytes()
        with_slots.copy_state(1, 2 + number)
    for number, start in enumerate(boundaries):
        with_slots.copy_state(2 + number, 0)
        resumed = with_slots.forward(step(tokens[start : start + 64], start, 0, 63))
        assert resumed.tobytes() == whole[start : start + 64].tobytes(), start
    with_slots.copy_state(2, 0)  # the state after 16 tokens is not that after 32
    assert with_slots.forward(step(tokens[32:48], 32, 0, 63)).tobytes() != whole[32:48].tobytes()
    with_slots.close()


def test_slots_used_before_give_the_same_bits(artifact: Artifact) -> None:
    """A sequence that begins at position 0 does not see what its slot held."""
    tokens = np.array(prompt_of(40, artifact))
    executor = executor_of(artifact, blocks=63, slots=2)
    fresh = executor.forward(step(tokens, 0, 0, 3)).copy()
    executor.forward(step(tokens[::-1].copy(), 0, 1, 3))
    assert executor.forward(step(tokens, 0, 1, 3)).tobytes() == fresh.tobytes()
    executor.close()


def test_engines_agree(build_hybrid: BuildHybrid) -> None:
    one, other = (prompt_logits(build_hybrid("fp32-cpu", f"cpu.engine={name}")) for name in ENGINES)
    np.testing.assert_allclose(one, other, atol=2e-4 * np.abs(one).max())


def test_numpy_agrees_with_the_kernels(build_hybrid: BuildHybrid, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = build_hybrid("fp32-cpu", "cpu.engine=onnxruntime")
    native = prompt_logits(artifact)
    for module in (attention, recurrence):
        monkeypatch.setattr(module, "attention_backend", lambda: "numpy")
    np.testing.assert_allclose(prompt_logits(artifact), native, atol=2e-4 * np.abs(native).max())


def prompt_logits(artifact: Artifact) -> FloatArray:
    with Engine.load(artifact, kv_blocks=16) as engine:
        return engine.prompt_logits(prompt_of(100, artifact))


def test_random_rollbacks_change_no_bit(artifact: Artifact) -> None:
    done = [run_round(artifact, seed=1, number=number) for number in range(2)]
    assert sum(one.rejected for one in done) > 50


def test_few_slots_make_sequences_wait_and_change_no_answer(artifact: Artifact) -> None:
    prompts, params = (
        [prompt_of(30 + i, artifact) for i in range(6)],
        SamplingParams(max_tokens=12, temperature=1, seed=3),
    )
    with Engine.load(artifact, kv_blocks=64) as many, Engine.load(artifact, kv_blocks=64, state_slots=2) as few:
        expected = many.generate(prompts, params, keep_logits=True)
        found = few.generate(prompts, params, keep_logits=True)
        few.check()
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.logits is not None
        assert theirs.logits is not None
        assert ours.logits.tobytes() == theirs.logits.tobytes()


@pytest.mark.parametrize("engine", ENGINES)
def test_verify_finds_nothing_with_weights_of_four_bits(engine: str, build_hybrid: BuildHybrid) -> None:
    assert_verified(build_hybrid("int4-cpu", f"cpu.engine={engine}"))


@pytest.mark.parametrize(
    ("family", "recipe"), [("qwen3_next", "int4-cpu"), ("qwen3_next", "fp32-cpu"), ("lfm2", "int4-cpu")]
)
def test_verify_finds_nothing_in_a_family(family: str, recipe: str, build_unmeasured: BuildHybrid) -> None:
    assert_verified(build_unmeasured(recipe, CHECKPOINTS / family, "cpu.engine=native", "engine.block_tokens=4"))


def assert_verified(artifact: Artifact) -> None:
    found = verify(open_subject(artifact), VerifyOptions(quick=True, only=PAIRS))
    assert [cell.verdict for cell in found.cells] == ["OK"] * len(PAIRS), found


@pytest.mark.parametrize("fault", STATE_FAULTS, ids=["not-restored", "of-an-earlier-block"])
def test_verify_finds_faults_of_side_state_on_a_real_engine(
    fault: Fault, build_hybrid: BuildHybrid, tmp_path: Path
) -> None:
    subject, executor = subject_for(fault, tmp_path, build_hybrid("fp32-cpu", "cpu.engine=native"))
    assert score(fault, subject, executor, only=(fault.pair,)).is_named


@pytest.mark.parametrize("recipe", ["fp16-ort-cuda", "fp16-tensorrt"])
def test_targets_without_recurrent_kernels_refuse_by_name(recipe: str, build_hybrid: BuildHybrid) -> None:
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(
            UsageError, match=r"does not compute recurrent layers, and the model has GatedDeltaRule, S.*: bu"
        ),
    ):
        patch.setattr(compile_module, "require_packages", lambda target: None)
        build_hybrid(recipe)


def test_slots_are_refused_for_a_model_without_side_state(two_layers: Path, build_unmeasured: BuildHybrid) -> None:
    plain = build_unmeasured("fp32-cpu", two_layers, "cpu.engine=native")
    with pytest.raises(UsageError, match="state_slots is 3, but the model keeps no side state"):
        Engine.load(plain, state_slots=3)


def test_a_hybrid_is_no_draft(build_hybrid: BuildHybrid) -> None:
    artifact = build_hybrid("fp32-cpu", "cpu.engine=native")
    with pytest.raises(UsageError, match="cannot draft: its model keeps side state"):
        Engine.load(artifact, speculation=artifact.path)
