"""Side state on the device: kept, copied, moved to host memory and restored, it changes no bit."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import onnx_ir as ir
import pytest

from ingot.artifact import Artifact
from ingot.errors import EngineError
from ingot.passes.model_facts import KV, MODEL
from ingot.pipeline.targets.cuda.program_builder import Bucket
from ingot.pipeline.targets.recurrent_layers import with_states
from ingot.runtime import Engine, SamplingParams
from ingot.runtime.cuda.executor import CudaExecutor
from ingot.runtime.engine.open_tiers import open_tiers
from ingot.runtime.executors import PipelinedExecutor, TieredStatefulExecutor
from ingot.runtime.options import EngineOptions
from tests.runtime.cuda.artifacts import write_artifact
from tests.runtime.cuda.batches import Growing, token_ids
from tests.simulators.interpreted_device import InterpretedDevice
from tests.simulators.launch_programs import CHECKPOINTS, exact_logits, fused, imported

BLOCK_TOKENS, SLOTS = 4, 5
PARAMS = SamplingParams(max_tokens=5, ignore_eos=True)
COMMON = token_ids(8, 7, 60).tolist()
PROMPTS: list[list[int]] = [
    [*COMMON, *token_ids(3, 8, 60).tolist()],
    token_ids(5, 9, 60).tolist(),
    [*COMMON, *token_ids(4, 10, 60).tolist()],
]
Make = Callable[..., CudaExecutor]


@pytest.fixture(scope="module")
def model() -> ir.Model:
    """Three delta rules with convolutions, and a layer with attention."""
    made = fused(imported(CHECKPOINTS / "qwen3_5_text"))
    KV.record(made, KV.of(made).model_copy(update={"block_tokens": BLOCK_TOKENS}))
    return made


@pytest.fixture(scope="module")
def hybrid(model: ir.Model, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    context = MODEL.of(model).context_tokens
    buckets = (Bucket.decode(1, context), Bucket.decode(4, context), Bucket.ragged(16, context, 4))
    return write_artifact(model, tmp_path_factory.mktemp("hybrid") / "artifact", buckets)


@pytest.fixture
def make(hybrid: Artifact) -> Iterator[Make]:
    """make(device=None, **options) -> CudaExecutor, closed after the test."""
    made: list[CudaExecutor] = []

    def one(device: InterpretedDevice | None = None, **options: object) -> CudaExecutor:
        given = EngineOptions(**{"kv_blocks": 24, "state_slots": SLOTS, **options})  # type: ignore[arg-type]
        made.append(CudaExecutor(hybrid, device or InterpretedDevice(), given))
        return made[-1]

    yield one
    for executor in made:
        executor.close()


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    """Greedy tokens of PROMPTS by the IR, with numpy's recurrences."""
    plain = imported(CHECKPOINTS / "qwen3_5_text")
    found = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(PARAMS.max_tokens or 0):
            tokens.append(int(exact_logits(plain, np.array(tokens))[-1].argmax()))
        found.append(tokens[len(prompt) :])
    return found


def test_the_executor_keeps_states_and_moves_them(make: Make) -> None:
    executor = make()
    assert isinstance(executor, TieredStatefulExecutor)
    assert isinstance(executor, PipelinedExecutor)
    assert executor.num_states == SLOTS
    assert executor.kv_geometry.state_bytes == sum(part.bytes for part in executor.kv_geometry.state)
    with pytest.raises(EngineError, match="state slot 5 does not exist: the pool has 5"):
        executor.copy_state(0, SLOTS)


def test_a_copied_state_resumes_and_a_rejected_draft_is_undone(make: Make) -> None:
    executor, ids = make(), token_ids(14, 3, 60)
    sequence = Growing([ids], [range(4)])
    executor.forward(sequence.step([8]))
    plain = executor.forward(sequence.step([6])).copy()
    sequence.done = [0]
    executor.forward(sequence.step([8]))
    executor.copy_state(0, 3)  # a snapshot at a block's end
    executor.forward(sequence.step([3]))  # drafts, of which all are rejected
    executor.copy_state(3, 0)
    sequence.done = [8]
    resumed = executor.forward(sequence.step([6])).copy()
    np.testing.assert_array_equal(resumed, plain)
    sequence.done = [8]
    wrong = executor.forward(sequence.step([6])).copy()  # without the copy, the state is one of 14 tokens
    assert np.abs(wrong - plain).max() > 1e-3


def test_a_new_sequence_does_not_see_what_its_slot_held(make: Make) -> None:
    executor, ids = make(), token_ids(6, 4, 60)
    fresh = executor.forward(Growing([ids], [range(2)]).step([6])).copy()
    executor.forward(Growing([token_ids(9, 5, 60)], [range(4, 7)]).step([9]))
    np.testing.assert_array_equal(executor.forward(Growing([ids], [range(2)]).step([6])), fresh)


def test_states_come_back_from_host_memory_as_they_were(make: Make) -> None:
    """The save waits for the step before it, and the restore for the one that replaces the state."""
    device = InterpretedDevice()
    executor, ids = make(device), token_ids(9, 6, 60)
    host = executor.host_states(2)
    sequence = Growing([ids], [range(3)])
    executor.forward(sequence.step([8], "none"))
    saved = host.save(0, 1)
    while not saved.done:
        pass
    expected = executor.forward(sequence.step([1])).copy()
    restored = host.restore(1, 0)
    while not restored.done:
        pass
    sequence.done = [8]
    np.testing.assert_array_equal(executor.forward(sequence.step([1])), expected)


def engine_of(executor: CudaExecutor, **options: object) -> Engine:
    given = EngineOptions(**options)  # type: ignore[arg-type]
    tiers = partial(open_tiers, options=given) if options else None
    return Engine(executor, max_sequences=executor.max_sequences, tiers=tiers)


def tokens_of(engine: Engine, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [list(one.token_ids) for one in engine.generate(prompts, PARAMS)]


def test_an_engine_samples_the_tokens_of_the_ir_also_from_the_prefix_cache(make: Make, wanted: list[list[int]]) -> None:
    with engine_of(make(kv_blocks=40, state_slots=12)) as engine:
        assert tokens_of(engine) == wanted
        assert tokens_of(engine) == wanted
        assert engine.metrics().prefix_hit_tokens > 0
        engine.check()


def test_few_slots_and_blocks_change_no_token(make: Make, wanted: list[list[int]]) -> None:
    with engine_of(make(kv_blocks=8, state_slots=2)) as engine:
        assert tokens_of(engine) == wanted
        engine.check()


def test_states_move_through_the_tiers(make: Make, wanted: list[list[int]]) -> None:
    executor = make(kv_blocks=8, state_slots=3)
    with engine_of(executor, kv_host_bytes=1 << 22) as engine:
        for _ in range(2):
            for prompt, tokens in zip(PROMPTS, wanted, strict=True):
                assert tokens_of(engine, [prompt]) == [tokens]
        engine.check()


def test_the_state_of_a_program_is_that_of_its_graph(model: ir.Model, hybrid: Artifact) -> None:
    kept = hybrid.manifest.kv.state
    assert kept == with_states(KV.of(model), model.graph).state
    assert {part.kind for part in kept} == {"convolution", "delta-rule"}
