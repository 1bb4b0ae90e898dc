"""`place: auto` is the fastest placement that fits, by predicted times; its units are the program's operations."""

import itertools
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from ingot.artifact.programs.cpu_program import CpuProgram, Experts
from ingot.artifact.programs.expert_choices import (
    ExpertChoices,
    LayerChoices,
    Reach,
    even_reach,
    read_expert_choices,
)
from ingot.artifact.programs.stages import STAGES_FILE, cut_program
from ingot.errors import UsageError
from ingot.passes.numerics.chain_placement import Chain, bytes_of, place_chain, seconds_of
from ingot.pipeline.planned_program import model_shape
from ingot.pipeline.recipe.schema import Recipe
from ingot.pipeline.recipe.sections import DeviceShare
from ingot.pipeline.targets.cpu.lowering import lower_to_operations
from ingot.pipeline.targets.cpu.place_auto import (
    PlaceDevice,
    PlaceSteps,
    PlaceUnit,
    chain_of,
    choose_devices,
    least_streamed_rows,
    rank_splits,
    units_of,
)
from ingot.pipeline.targets.cpu.place_stages import (
    parts_of,
    place_program,
    placed_devices,
    placed_shapes,
    plan_stages,
)
from ingot.planning.hardware import find_hardware
from ingot.planning.roofline import placed_steps
from ingot.planning.step_model import StepShape
from ingot.progress import NOTES
from ingot.runtime import Engine, SamplingParams
from tests.conftest import BuildArtifact
from tests.each_case import each_case
from tests.parity import CHECKPOINTS
from tests.pipeline.targets.cpu.placed_shapes import (
    GPU,
    MIXTURES,
    fit_devices,
    gpu_and_host,
    layers_devices,
    random_units,
    units_of_mixture,
)
from tests.simulators.cpu_programs import LOWERING, PACKED, imported, lowered

ROWS = ("rtx-4090", "h100", "epyc-9654", "xeon-8592", "grace")


def program_of(name: str) -> CpuProgram:
    return lowered(imported(CHECKPOINTS / name, *PACKED)).program


def fits(chain: Chain, devices: tuple[int, ...]) -> bool:
    return all(used <= memory for used, memory in zip(bytes_of(chain, devices), chain.memory, strict=True))


@each_case("seed", range(50))
def test_small_models_are_placed_as_well_as_by_trying_all(seed: int) -> None:
    units = random_units(seed)
    total = sum(unit.size for unit in units)
    first, second = ROWS[seed % 5], ROWS[(seed // 5 + 1 + seed) % 5]
    share = 0.1 + 0.8 * (seed % 7) / 7
    devices = [
        PlaceDevice("a", int(total * share), find_hardware(first)),
        PlaceDevice("b", int(total * (1.3 - share)), find_hardware(second)),
    ]
    chain = chain_of(units, devices, 4096, 0)
    possible = (one for one in itertools.product((0, 1), repeat=len(units)) if fits(chain, one))
    best = min((seconds_of(chain, one) for one in possible), default=None)
    found = place_chain(chain)
    if best is None:
        assert found is None
        return
    assert found is not None
    assert fits(chain, found.devices)
    assert best / found.seconds >= 0.95
    assert found.is_exact


BUCKETS = (32, 128, 512, 2048, 8192)


def least_rows(mixture: str, host: str, flops: float = 0.0, link: float = 1.0) -> int | None:
    """The bucket from which on experts stream: of a host with so many flops, and a link so many times as fast."""
    gpu, cpu = gpu_and_host(1 << 34, host=host)
    if flops:
        cpu = replace(cpu, hardware=cpu.hardware.model_copy(update={"flops": {"fp16": flops}}))
    faster = gpu.hardware.model_copy(update={"host_link": gpu.hardware.host_link * link})
    return least_streamed_rows(units_of_mixture(MIXTURES[mixture], 8192), [replace(gpu, hardware=faster), cpu], BUCKETS)


@each_case(
    ("mixture", "host", "flops", "rows"),
    [
        ("Mixtral-8x7B", "xeon-8592", 0.0, None),
        ("Mixtral-8x7B", "epyc-9654", 0.0, 2048),
        ("Mixtral-8x7B", "epyc-9654", 2e12, 512),
        ("Qwen3-30B-A3B", "epyc-9654", 2e12, 2048),
        ("Qwen3-30B-A3B", "epyc-9654", 1e11, 128),
    ],
)
def test_experts_stream_from_the_bucket_on_that_pays(mixture: str, host: str, flops: float, rows: int | None) -> None:
    assert least_rows(mixture, host, flops) == rows


def test_a_faster_link_streams_smaller_steps() -> None:
    found = [least_rows("Mixtral-8x7B", "epyc-9654", 2e12, link) for link in (0.25, 1, 4)]
    assert found == [2048, 512, 128]


@each_case(("name", "gigabytes", "context"), list(itertools.product(MIXTURES, (6, 12, 24), (8192, 131072))))
def test_no_rule_by_memory_alone_is_faster_for_mixtures(name: str, gigabytes: int, context: int) -> None:
    units, memory = units_of_mixture(MIXTURES[name], context), gigabytes * 10**9
    chain = chain_of(units, gpu_and_host(memory), context // 2, 0)
    found = place_chain(chain)
    assert found is not None
    assert found.is_exact
    assert fits(chain, found.devices)
    for rule in (fit_devices, layers_devices):
        other = rule(units, memory)
        assert fits(chain, other)
        assert GPU in other
        assert seconds_of(chain, other) >= found.seconds * (1 - 1e-9)


@each_case("name", ["llama", "qwen3_moe", "gemma4_text", "qwen3_next", "gpt2", "falcon_h1"])
def test_units_are_all_operations_in_order_with_all_bytes(name: str) -> None:
    program = program_of(name)
    units, together, shared = units_of(program)
    assert sum(unit.operations for unit in units) == len(program.operations)
    recipe = recipe_of(1 << 40, 1 << 40)
    (whole,) = parts_of(program, None, 0, recipe)
    counted = sum(unit.size for unit in units) - sum(size for _, _, size in shared)
    assert whole.weights + whole.kv <= counted <= 1.05 * (whole.weights + whole.kv)
    kinds = {one.kind for one in program.operations}
    assert any(unit.expert_layers for unit in units) == ("experts" in kinds)
    assert all(unit.entry_bytes > 0 for unit in units[1:])
    assert (len(together) > 0) == any(layer.source != at for at, layer in enumerate(program.kv.layers))


def recipe_of(*memory: int, hardware: tuple[str, ...] = ("h100", "epyc-9654")) -> Recipe:
    devices = tuple(DeviceShare(cpu=size, hardware=row) for size, row in zip(memory, hardware, strict=True))
    return Recipe.model_validate({"name": "t", "place": "auto", "devices": devices})


def unit(name: str, megabytes: int, experts: Reach = ()) -> PlaceUnit:
    """Weights that every step reads, or experts."""
    size = megabytes * 10**6
    read, own = (0.0, ((float(size), experts),)) if experts else (float(size), ())
    return PlaceUnit(name, 1, size, read, expert_layers=bool(experts), experts=own)


@each_case(
    ("rows", "reach", "on_gpu"),
    [
        (1, even_reach(16, 1), "dense"),
        (16, even_reach(16, 1), "experts"),
        (16, ((1, 1 / 16), (16, 1 / 8)), "dense"),
    ],
)
def test_what_rows_reach_decides_what_is_on_the_faster_device(rows: int, reach: Reach, on_gpu: str) -> None:
    units = [unit("dense", 400), unit("experts", 1000, reach)]
    found = place_chain(chain_of(units, gpu_and_host(1000 * 10**6), 4096, 0, rows=rows))
    assert found is not None
    assert [one.name for one, device in zip(units, found.devices, strict=True) if device == GPU] == [on_gpu]


@each_case("name", MIXTURES)
def test_many_sequences_are_placed_otherwise_than_one(name: str) -> None:
    units = units_of_mixture(MIXTURES[name], 8192)
    one, many = (chain_of(units, gpu_and_host(8 * 10**9), 4096, 0, rows=rows) for rows in (1, 16))
    of_one, of_many = place_chain(one), place_chain(many)
    assert of_one is not None
    assert of_many is not None
    assert seconds_of(many, of_one.devices) > 1.02 * of_many.seconds
    assert seconds_of(one, of_many.devices) > 1.02 * of_one.seconds


@each_case("name", ["llama", "qwen3_next"])
def test_a_row_more_reads_the_weights_no_more(name: str) -> None:
    units, *_ = units_of(program_of(name))
    row = find_hardware("epyc-9654")
    dense = [one for one in units if not one.experts and one.name.startswith("layers.")]
    for one in dense:
        first, second, third = (one.seconds(row, 64, rows) for rows in (1, 2, 3))
        assert first <= second <= 2 * first
        assert third - second == pytest.approx(second - first, abs=1e-12)


@each_case("name", ["llama", "qwen3_moe", "gpt_oss"])
def test_changes_of_device_take_the_time_that_a_plan_predicts(name: str) -> None:
    rows, program = 3, program_of(name)
    units, *_ = units_of(program)
    hardware = ("xeon-8592", "epyc-9654")
    recipe = recipe_of(1 << 40, 1 << 40, hardware=hardware)
    split = [int(one.name.startswith("layers.1.")) for one in units]
    chain = chain_of(units, placed_devices(recipe), 64, 0, rows=rows)
    changes = sum(chain.crossings[at, before, now] for at, (before, now) in enumerate(itertools.pairwise(split), 1))
    devices = [device for one, device in zip(units, split, strict=True) for _ in range(one.operations)]
    plan = plan_stages(program, devices, ("cpu:0", "cpu:1"))
    assert plan is not None
    whole = model_shape(imported(CHECKPOINTS / name, *PACKED))
    steps = placed_steps(placed_shapes(cut_program(program, plan), recipe, whole), find_hardware(hardware[0]))
    terms = steps.terms(StepShape(decode_rows=rows, context_tokens=64 * rows, num_sequences=rows))
    assert changes > 0
    assert sum(one.seconds for one in terms if one.name.startswith(("entries of", "copies to"))) == pytest.approx(
        changes
    )


def test_counts_of_experts_replace_equal_likelihood() -> None:
    program, row = program_of("qwen3_moe"), find_hardware("epyc-9654")
    layer = LayerChoices(chosen=3, counts=(10, 10, 10, 0, 0, 0), consecutive=(3.0,), concurrent=(3.0,) * 5)
    choices = ExpertChoices(text="t", sha256="0" * 64, tokens=10, layers={"layers.0.mlp.combine": layer})
    (even,) = (one for one in units_of(program)[0] if one.experts)
    (counted,) = (one for one in units_of(program, PlaceSteps(16, choices))[0] if one.experts)
    assert even.experts[0][1] == ((1, 3 / 6),)
    assert counted.experts[0] == (even.experts[0][0], layer.reach)
    assert counted.seconds(row, 64) == pytest.approx(even.seconds(row, 64))
    assert counted.seconds(row, 64, 16) < even.seconds(row, 64, 16)


def test_a_placement_for_several_sequences_says_how_experts_were_taken(
    build_unmeasured: BuildArtifact, upcycled: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = f"calibration={{text: {upcycled / 'heldout.txt'}, sequences: 4, sequence_tokens: 64}}"
    devices = "devices=[{cpu: 6MB, hardware: epyc-9654}, {cpu: 60MB, hardware: xeon-8592}]"
    with caplog.at_level(logging.INFO, NOTES):
        split = build_unmeasured("int8-cpu", upcycled, devices, "place={auto: 16}", text)
        build_unmeasured("int8-cpu", upcycled, devices, "place={auto: 16}")
    assert split.has(STAGES_FILE)
    assert read_expert_choices(split) is not None
    notes = [record.getMessage() for record in caplog.records if "place: auto" in record.getMessage()]
    for note, taken in zip(notes, ("counted on 256 tokens of heldout.txt", "equally likely"), strict=True):
        assert "Predicted time of a step of 16 sequences by tokens of context: " in note
        assert f" Experts are taken as {taken}. By comparison, " in note


def test_a_model_that_fits_the_faster_device_is_placed_there() -> None:
    program = program_of("llama")
    assert place_program(program, recipe_of(1 << 40, 1 << 40, hardware=("xeon-8592", "epyc-9654"))) is None
    devices = [PlaceDevice(name, 1 << 40, find_hardware(row)) for name, row in (("a", ROWS[3]), ("b", ROWS[2]))]
    chosen = choose_devices(program, devices, 0)
    assert chosen is not None
    assert set(chosen.devices) == {1}


def test_layers_that_share_keys_and_values_are_placed_together() -> None:
    program = program_of("gemma4_text")
    (whole,) = parts_of(program, None, 0, recipe_of(1, 1))
    size = whole.arena + (whole.weights + whole.kv) * 2 // 3
    plan = place_program(program, recipe_of(size, size))
    assert plan is not None
    assert len(plan.devices) == 2


def test_devices_too_small_for_any_placement_are_refused_with_what_is_needed() -> None:
    program = program_of("llama")
    with pytest.raises(
        UsageError, match=r"no placement fits the devices. The model needs .* {gpu_layers: \d} lacks le"
    ):
        place_program(program, recipe_of(1000, 1000))


def test_the_split_is_told_with_predictions_and_reasons_and_has_the_same_bits(
    build_unmeasured: BuildArtifact, two_layers: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = build_unmeasured("int8-cpu", two_layers)
    devices = "devices=[{cpu: 6MB, hardware: epyc-9654}, {cpu: 6MB, hardware: xeon-8592}]"
    with caplog.at_level(logging.INFO, NOTES):
        split = build_unmeasured("int8-cpu", two_layers, devices, "place=auto")
    assert split.has(STAGES_FILE)
    (note,) = (record.getMessage() for record in caplog.records if "place: auto" in record.getMessage())
    for part in (
        "cpu:0 has ",
        "; cpu:1 has ",
        "Predicted TPOT by tokens of context: ",
        "By comparison, all on cpu:0: ",
    ):
        assert part in note
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    with Engine.load(split, kv_blocks=16) as one, Engine.load(whole, kv_blocks=16) as other:
        found, expected = (engine.generate([5, 7, 9], params, keep_logits=True) for engine in (one, other))
    assert found.logits is not None
    assert expected.logits is not None
    assert found.logits.tobytes() == expected.logits.tobytes()


def test_splits_of_a_gpu_and_the_host_are_by_layers_or_of_experts_alone() -> None:
    program = lower_to_operations(imported(CHECKPOINTS / "gpt_oss", *PACKED, *LOWERING), experts_apart=True).program
    devices = [PlaceDevice(name, 1 << 40, find_hardware(name)) for name in ("h100", "epyc-9654")]
    chosen = list(rank_splits(program, devices))
    experts = [at for at, one in enumerate(program.operations) if isinstance(one, Experts)]
    on_host = {tuple(at for at, device in enumerate(one.devices) if device) for one in chosen}
    assert on_host == {(0,), tuple(range(8)), tuple(experts[:1]), tuple(experts)}
    seconds = [float(one.reason.partition("context: ")[2].split(" ms")[0]) for one in chosen]
    assert seconds == sorted(seconds)
