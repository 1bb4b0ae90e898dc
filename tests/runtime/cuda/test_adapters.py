"""LoRA adapters on the interpreted device: near the CPU engine and merged weights, and no other row's bits change."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from ingot.artifact import Artifact
from ingot.artifact.programs.launch_checks import read_launches
from ingot.artifact.programs.launch_program import ActivationType, AdaptedLayer
from ingot.artifact.programs.projections import Projection
from ingot.errors import AdapterError, EngineError, PassError
from ingot.passes.manager import PassManager
from ingot.passes.registry import make_pass
from ingot.pipeline.model.importer import import_checkpoint
from ingot.pipeline.targets.cuda.lowering import lower_to_launches
from ingot.pipeline.targets.cuda.program_builder import Bucket
from ingot.runtime import Engine, RequestOptions, SamplingParams
from ingot.runtime.adapters import Adapter, LowRankUpdate, read_adapter
from ingot.runtime.cpu.native.library import native_library
from ingot.runtime.cpu.native_executor import NativeExecutor
from ingot.runtime.cuda.adapters import AdapterPool, pack_layer
from ingot.runtime.cuda.executor import CudaExecutor
from ingot.runtime.cuda.step_inputs import adapter_units
from ingot.runtime.executors import AdaptingExecutor
from ingot.runtime.forward_batch import FloatArray
from ingot.runtime.options import EngineOptions
from tests.conftest import BuildArtifact
from tests.each_case import each_case
from tests.parity import CHECKPOINTS
from tests.runtime.cpu.native.test_low_rank_parity import in_float32, write_adapter
from tests.runtime.cuda.artifacts import CONTEXT, buckets, model_of, write_artifact
from tests.runtime.cuda.batches import Growing, greedy, token_ids
from tests.runtime.cuda.conftest import MakeExecutor
from tests.simulators.interpreted_device import InterpretedDevice
from tests.simulators.launch_programs import INT4, INT8, PREPARED, Entry, exact_logits, fused, imported
from tests.simulators.triton_interpreter import use_ordered_dots
from tests.tolerances import within

Rng = np.random.Generator
LENGTHS = (7, 5, 4)
TABLES = ((0, 1), (2, 3), (4, 5))
STEPS = ((4, 3, 2), (1, 1, 1), (2, 1, 1))
# Norms of heads, softcaps, multipliers, transposed weights, packed layers, latents, experts.
FAMILIES = ("llama", "gemma2-tight-softcaps", "gpt2", "granite", "mixtral", "phi3", "qwen3", "youtu")


def random_adapter(seed: int, projections: Sequence[Projection], most: int = 40, share: float = 0.8) -> Adapter:
    """An adapter of some projections, each with a rank of its own, about as large as the weights."""
    rng, changes = np.random.default_rng(seed), dict[str, list[LowRankUpdate]]()
    chosen = [one for one in projections if rng.random() < share] or [projections[0]]
    for one in chosen:
        rank = int(rng.integers(1, most + 1))
        a = (rng.standard_normal((rank, one.columns)) / np.sqrt(one.columns)).astype(np.float32)
        b = (rng.standard_normal((one.rows, rank)) / np.sqrt(10 * rank)).astype(np.float32)
        changes.setdefault(one.node, []).append(LowRankUpdate(one.module, one.first_row, a, b))
    return Adapter(f"random {seed}", changes)


@pytest.fixture(scope="session")
def adaptable(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """The program of `launches`, with programs for adapters."""
    folder = tmp_path_factory.mktemp("adaptable") / "artifact"
    return write_artifact(model_of(checkpoint, block_tokens=4), folder, buckets(ragged=16), adapters=True)


@pytest.fixture(scope="session")
def on_cpu(checkpoint: Path, build_unmeasured: BuildArtifact) -> Artifact:
    """The same model in float32 for the native CPU engine."""
    return build_unmeasured("fp32-cpu", checkpoint, "cpu.engine=native", "engine.block_tokens=4")


def projections_of(artifact: Artifact) -> tuple[Projection, ...]:
    adapters = read_launches(artifact).adapters
    assert adapters is not None
    return adapters.projections


def results(
    executor: CudaExecutor | NativeExecutor,
    slots: Sequence[int] | None,
    steps: Sequence[Sequence[int]] = STEPS,
    wanted: str = "all",
) -> list[list[FloatArray]]:
    """Logits of each sequence in each step."""
    growing = Growing([token_ids(length, seed) for seed, length in enumerate(LENGTHS)], TABLES)
    found = []
    for counts in steps:
        batch = replace(growing.step(counts, wanted), state_slots=None)
        if slots is not None:
            own = [slot for slot, count in zip(slots, counts, strict=True) if count]
            batch = replace(batch, adapter_slots=np.array(own, np.int32) if max(own) >= 0 else None)
        rows = executor.forward(batch).copy()
        bounds = np.searchsorted(batch.logits_indices, batch.query_starts)
        found.append([rows[begin:end] for begin, end in pairwise(bounds)])
    return found


def bits(rows: FloatArray) -> bytes:
    return rows.tobytes()


# ---- packing


@each_case("seed", range(40))
def test_packed_matrices_multiply_to_the_changes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    outputs, columns, tile, multiple = int(rng.integers(1, 200)), int(rng.integers(1, 30)), 16, int(rng.choice([4, 16]))
    bounds = sorted({0, outputs, *rng.integers(0, outputs + 1, 3).tolist()})
    changes: list[LowRankUpdate] = []
    for first, end in pairwise(bounds):
        if rng.random() < 0.7 or not changes:
            rank = int(rng.integers(1, 20))
            parts = rng.standard_normal((rank, columns)), rng.standard_normal((end - first, rank))
            changes.append(LowRankUpdate("module", first, *(part.astype(np.float32) for part in parts)))
    packed = pack_layer(AdaptedLayer(node="a", outputs=outputs, columns=columns), changes, tile, multiple)
    assert not packed.spans.reshape(-1).any() or (packed.spans % multiple == 0).all()
    found, wanted = np.zeros((outputs, columns)), np.zeros((outputs, columns))
    for row in range(outputs):
        first, count = packed.spans[row // tile]
        found[row] = packed.b[row, :count].astype(np.float64) @ packed.a[first : first + count]
    for change in changes:
        wanted[change.first_row : change.first_row + len(change.b)] += change.b.astype(np.float64) @ change.a
    np.testing.assert_allclose(found, wanted, atol=1e-12)


def test_a_change_that_does_not_fit_its_layer_is_refused() -> None:
    layer = AdaptedLayer(node="layer", outputs=8, columns=4)
    for first, columns in ((1, 4), (0, 5)):
        change = LowRankUpdate("q", first, np.zeros((2, columns), np.float32), np.zeros((8, 2), np.float32))
        with pytest.raises(EngineError, match="'q' does not fit the layer 'layer' of the program"):
            pack_layer(layer, [change], 16, 16)


@each_case("seed", range(20))
def test_places_of_the_pool_never_overlap_and_all_of_it_can_be_taken_again(seed: int) -> None:
    rng, pool, taken = random.Random(seed), AdapterPool(1000), dict[int, int]()
    for _ in range(300):
        if taken and rng.random() < 0.5:
            begin = rng.choice([*taken])
            pool.free(begin, taken.pop(begin))
        else:
            size = rng.randint(1, 200)
            found = pool.take(size)
            if found is not None:
                assert all(found + size <= begin or begin + other <= found for begin, other in taken.items())
                assert 0 <= found <= 1000 - size
                taken[found] = size
        assert pool.free_bytes == 1000 - sum(taken.values())
    for begin, size in taken.items():
        pool.free(begin, size)
    assert pool.take(1000) == 0
    assert pool.take(1) is None


@each_case("seed", range(40))
def test_units_hold_every_row_that_has_an_adapter_once_and_with_its_own(seed: int) -> None:
    rng = np.random.default_rng(seed)
    slots = rng.integers(-1, int(rng.integers(1, 6)), int(rng.integers(1, 90))).astype(np.int32)
    most = int(rng.choice([1, 4, 16]))
    units, order = adapter_units(slots, most)
    assert sorted(order) == np.flatnonzero(slots >= 0).tolist()
    places = [place for _, first, count in units.tolist() for place in range(first, first + count)]
    assert sorted(places) == [*range(len(order))]
    assert all((slots[order[first : first + count]] == slot).all() for slot, first, count in units.tolist())
    assert units[:, 2].max(initial=0) <= most


# ---- steps


@pytest.mark.skipif(native_library() is None, reason="the library was not built")
@each_case("seed", range(6))
def test_rows_are_those_of_the_cpu_engine(
    seed: int, adaptable: Artifact, on_cpu: Artifact, make_executor: MakeExecutor
) -> None:
    rng = np.random.default_rng(seed)
    slots = [[2, -1, 0], [0, 0, -1], [-1, 1, 1], [1, 2, 0], [-1, -1, 2], [0, 1, 0]][seed]
    gpu = make_executor(artifact=adaptable, max_adapters=3, adapter_bytes=2**20)
    cpu = NativeExecutor(on_cpu, num_blocks=24, num_threads=1, max_adapters=3)
    for slot in range(3):
        adapter = random_adapter(10 * seed + slot, gpu.projections, most=int(rng.choice([4, 16, 40])))
        gpu.load_adapter(slot, adapter)
        cpu.load_adapter(slot, adapter)
    found, wanted, bare = (
        np.concatenate([rows for step in results(*each) for rows in step])
        for each in ((gpu, slots), (cpu, slots), (gpu, None))
    )
    cpu.close()
    largest = float(np.abs(wanted).max())
    assert np.abs(bare - wanted).max() > 0.01 * largest
    assert within("adapters.merged", float(np.abs(found - wanted).max()) / largest, f"seed {seed}")


@each_case(("form", "activations"), [((), "fp16"), ((INT4,), "fp32"), ((INT8,), "fp16")])
@each_case("invariant", [False, True])
def test_rows_without_an_adapter_have_the_bits_of_a_program_without(
    form: tuple[Entry, ...], activations: ActivationType, invariant: bool, tmp_path: Path
) -> None:
    model = fused(imported(CHECKPOINTS / "llama", *form))
    sizes = (Bucket.ragged(4, CONTEXT, 4), Bucket.ragged(16, CONTEXT, 4)) if invariant else buckets(ragged=16)
    plain = write_artifact(model, tmp_path / "plain", sizes, activations, batch_invariant=invariant)
    adaptable = write_artifact(model, tmp_path / "own", sizes, activations, batch_invariant=invariant, adapters=True)
    options = EngineOptions(kv_blocks=6, max_adapters=3, adapter_bytes=2**21)
    gpu, usual = (CudaExecutor(one, InterpretedDevice(), options) for one in (adaptable, plain))
    for slot in (0, 2):
        gpu.load_adapter(slot, random_adapter(slot, gpu.projections))
    bare, mixed = results(usual, None), results(gpu, [2, -1, 0])
    assert [bits(step[1]) for step in mixed] == [bits(step[1]) for step in bare]
    assert all(
        bits(one) != bits(other)
        for step, of_step in zip(mixed, bare, strict=True)
        for one, other in ((step[0], of_step[0]), (step[2], of_step[2]))
    )
    again = results(gpu, None)
    assert [[bits(rows) for rows in step] for step in again] == [[bits(rows) for rows in step] for step in bare]
    gpu.close()
    usual.close()


@each_case(("index", "family"), list(enumerate(FAMILIES)))
def test_an_adapter_of_every_layer_equals_the_merged_checkpoint(index: int, family: str, tmp_path: Path) -> None:
    checkpoint = in_float32(CHECKPOINTS / family, tmp_path / "checkpoint")
    model = fused(imported(tmp_path / "checkpoint"))
    artifact = write_artifact(model, tmp_path / "artifact", (Bucket.ragged(16, CONTEXT, 2),), adapters=True)
    projections = projections_of(artifact)
    folder = write_adapter(tmp_path / "adapter", projections, is_transposed=family == "gpt2")
    merged = import_checkpoint(checkpoint.with_adapter(folder))
    PassManager([make_pass(name) for name in PREPARED]).run(merged)
    ids = token_ids(14, index, 48)
    wanted = exact_logits(merged, ids)
    executor = CudaExecutor(artifact, InterpretedDevice(), EngineOptions(kv_blocks=4, max_adapters=2))
    executor.load_adapter(1, read_adapter(family, folder, projections))
    growing = Growing([ids], [[0, 1, 2, 3]])
    steps = [replace(growing.step([count]), adapter_slots=np.array([1], np.int32)) for count in (11, 1, 2)]
    found = np.concatenate([executor.forward(step).copy() for step in steps])
    executor.close()
    largest = float(np.abs(wanted).max())
    assert within("adapters.merged", float(np.abs(found - wanted).max()) / largest, family)


def test_a_row_has_the_same_bits_in_every_batch_and_chunk_of_a_batch_invariant_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_ordered_dots(monkeypatch)
    model = fused(imported(CHECKPOINTS / "llama", INT4))
    sizes = tuple(Bucket.ragged(rows, CONTEXT, 3) for rows in (1, 4, 72))
    artifact = write_artifact(model, tmp_path / "artifact", sizes, batch_invariant=True, adapters=True)
    executor = CudaExecutor(
        artifact, InterpretedDevice(), EngineOptions(kv_blocks=6, max_adapters=3, adapter_bytes=2**21)
    )
    for slot in range(3):
        executor.load_adapter(slot, random_adapter(slot, executor.projections))
    together = [np.concatenate(rows) for rows in zip(*results(executor, [1, 2, 1], [(7, 5, 4)]), strict=True)]
    for sequence, slot in enumerate([1, 2, 1]):
        counts = [[0] * 3 for _ in range(LENGTHS[sequence] - 1)]
        for one, count in zip(counts, [2, *[1] * len(counts)], strict=False):
            one[sequence] = count
        slots = [-1] * 3
        slots[sequence] = slot
        apart = np.concatenate([step[0] for step in results(executor, slots, counts)])
        assert bits(apart) == bits(together[sequence])
    executor.close()


def test_more_rows_of_logits_than_the_head_has_are_computed_with_their_adapters(
    adaptable: Artifact, make_executor: MakeExecutor
) -> None:
    executor = make_executor(artifact=adaptable, max_adapters=2)
    head = next(one for one in executor.projections if one.module == "lm_head")
    adapter = random_adapter(3, [head])
    executor.load_adapter(1, adapter)
    steps = [(7, 5, 4)]  # 16 rows of logits, of which the head computes 4 at a time
    (bare,), (found,) = results(executor, None, steps), results(executor, [-1, 1, -1], steps)
    assert bits(found[0]) == bits(bare[0])
    assert bits(found[2]) == bits(bare[2])
    (last,) = results(executor, [-1, 1, -1], steps, "last")
    np.testing.assert_allclose(found[1][-1:], last[1], rtol=1e-5, atol=1e-5)
    assert np.abs(found[1] - bare[1]).min(axis=1).max() > 0


# ---- loading


def test_an_adapter_can_be_replaced_while_steps_are_queued(adaptable: Artifact, make_executor: MakeExecutor) -> None:
    """Streams run as late as they may: a copy that overtook a step would change its tokens."""
    executor = make_executor(artifact=adaptable, max_adapters=2)
    first, second = (random_adapter(seed, executor.projections, share=1.0) for seed in (1, 2))

    def tokens(adapters: Sequence[Adapter]) -> list[list[int]]:
        growing, steps = Growing([token_ids(6)], [[0, 1]]), []
        for adapter in adapters:
            executor.load_adapter(1, adapter)
            batch = replace(growing.step([2], "last"), adapter_slots=np.array([1], np.int32))
            steps.append(executor.submit(batch, greedy(1), np.full(2, -1, np.int32)))
            executor.unload_adapter(1)
        return [step.tokens().tolist() for step in steps]

    def one_by_one(adapters: Sequence[Adapter]) -> list[list[int]]:
        growing, found = Growing([token_ids(6)], [[0, 1]]), []
        for adapter in adapters:
            executor.load_adapter(0, adapter)
            batch = replace(growing.step([2], "last"), adapter_slots=np.array([0], np.int32))
            found.append(executor.forward(batch).argmax(axis=1).tolist())
        return found

    order = [first, second, first]
    assert tokens(order) == one_by_one(order)


def test_an_adapter_without_room_is_refused_and_leaves_the_slots_as_they_were(
    adaptable: Artifact, make_executor: MakeExecutor
) -> None:
    executor = make_executor(artifact=adaptable, max_adapters=2, adapter_bytes=24 * 1024)
    small = random_adapter(1, executor.projections[:1], most=4)
    large = random_adapter(2, executor.projections, share=1.0)
    executor.load_adapter(0, small)
    before = results(executor, [0, -1, -1])
    with pytest.raises(EngineError, match=r"adapter 'random 2' finds no room: .* raise adapter_bytes"):
        executor.load_adapter(1, large)
    assert [list(map(bits, step)) for step in results(executor, [0, -1, -1])] == [
        list(map(bits, step)) for step in before
    ]
    executor.load_adapter(1, small)  # what was taken for the other is free again


def test_ranks_layers_and_numbers_that_the_program_cannot_compute_are_refused(
    adaptable: Artifact, make_executor: MakeExecutor, tmp_path: Path
) -> None:
    executor = make_executor(artifact=adaptable, max_adapter_rank=8)
    with pytest.raises(EngineError, match="takes up to 8: set max_adapter_rank"):
        executor.load_adapter(0, random_adapter(1, executor.projections, share=1.0))
    changes = next(iter(random_adapter(1, executor.projections[:1], 4).changes.values()))
    other = Adapter("other", {"no_layer": changes})
    with pytest.raises(EngineError, match="changes 'no_layer', which is not a layer of the program that adapters can"):
        executor.load_adapter(0, other)
    halves = write_artifact(model_of(), tmp_path / "artifact", buckets((1,)), "fp16", adapters=True)
    in_halves = make_executor(artifact=halves)
    projection = in_halves.projections[0]
    huge = LowRankUpdate("q", 0, np.full((1, projection.columns), 7e4, np.float32), np.ones((4, 1), np.float32))
    with pytest.raises(EngineError, match=r"'huge' has numbers above 65504.*gpu\.activations: bfloat16"):
        in_halves.load_adapter(0, Adapter("huge", {projection.node: [huge]}))


def test_a_program_without_adapters_says_how_to_build_one(launches: Artifact, adaptable: Artifact) -> None:
    for artifact, slots in ((launches, 16), (adaptable, 0)):
        executor = CudaExecutor(artifact, InterpretedDevice(), EngineOptions(kv_blocks=8, max_adapters=slots))
        assert isinstance(executor, AdaptingExecutor)
        with Engine(executor) as engine, pytest.raises(AdapterError, match=r"computes none.*gpu\.adapters: true"):
            engine.load_adapter("a", Path("folder"))


def test_a_model_whose_layers_adapters_cannot_change_is_refused() -> None:
    model = model_of()
    for node in model.graph:
        node.metadata_props.pop("ingot.projections", None)
    with pytest.raises(PassError, match=r"gpu\.adapters is true, and adapters can change no layer of this model"):
        lower_to_launches(model, buckets((1,)), "fp32", adapters=True)


# ---- the engine


@pytest.fixture
def engine(adaptable: Artifact, tmp_path: Path) -> Iterator[Engine]:
    executor = CudaExecutor(adaptable, InterpretedDevice(), EngineOptions(kv_blocks=24, max_adapters=2))
    with Engine(executor, max_sequences=executor.max_sequences) as made:
        for seed in (1, 2, 3):
            made.register_adapter(random_adapter(seed, executor.projections, share=1.0), tmp_path)
        yield made


def test_requests_of_one_batch_get_what_they_get_alone(engine: Engine) -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    prompt, names = token_ids(9, 5).tolist(), [None, "random 1", "random 2", "random 3", "random 1"]
    options = [RequestOptions(adapter=name) for name in names]
    expected = [engine.generate(prompt, params, options=one).token_ids for one in options]
    hits = engine.metrics().prefix_hit_tokens
    assert hits > 0  # the second request with the first adapter finds the blocks of the first one
    together = engine.generate([prompt] * len(names), params, options=options)
    assert [each.token_ids for each in together] == expected
    assert len({*expected}) == 4
    assert engine.metrics().num_adapter_loads > 3  # three share two slots
    engine.unload_adapter("random 2")
    with pytest.raises(AdapterError, match="unknown adapter 'random 2'"):
        engine.generate(prompt, params, options=options[2])
    assert engine.generate(prompt, params, options=options[1]).token_ids == expected[1]
