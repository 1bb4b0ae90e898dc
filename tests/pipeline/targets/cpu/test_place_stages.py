"""`place` gives each operation a device; an impossible placement is refused with what is missing."""

from typing import Any

import pytest

from ingot.artifact.programs.cpu_program import CpuProgram
from ingot.artifact.programs.stages import cut_program
from ingot.errors import UsageError
from ingot.pipeline.recipe.schema import Recipe
from ingot.pipeline.recipe.sections import DeviceShare, Place, PlaceRules
from ingot.pipeline.targets.cpu.place_rules import assign_devices, name_of
from ingot.pipeline.targets.cpu.place_stages import parts_of, place_program, plan_stages
from tests.each_case import each_case
from tests.parity import CHECKPOINTS
from tests.runtime.cpu.native.tiny_program import tiny_program
from tests.simulators.cpu_programs import PACKED, imported, lowered

NAMES = ("cpu:0", "cpu:1")


@pytest.fixture(scope="module")
def llama() -> CpuProgram:
    """Three layers."""
    return lowered(imported(CHECKPOINTS / "llama", *PACKED)).program


@pytest.fixture(scope="module")
def mixture() -> CpuProgram:
    return lowered(imported(CHECKPOINTS / "qwen3_moe", *PACKED)).program


def recipe_of(place: Place, *memory: int, **fields: Any) -> Recipe:
    devices = tuple(DeviceShare(cpu=size) for size in memory)
    return Recipe.model_validate({"name": "t", "place": place, "devices": devices, **fields})


def on_second(program: CpuProgram, place: PlaceRules) -> list[str]:
    """Nodes of the operations on the second device."""
    devices = assign_devices(program.operations, place, NAMES)
    return [".".join(name_of(one)) for one, device in zip(program.operations, devices, strict=True) if device]


@each_case(
    ("place", "beginnings"),
    [
        ({"layers.1": "cpu:1"}, ["layers.1."]),
        ({"layers.0-1": "cpu:1"}, ["layers.0.", "layers.1."]),
        ({"layers.*.mlp": "cpu:1"}, ["layers.0.mlp.", "layers.1.mlp.", "layers.2.mlp."]),
        ({"*": "cpu:1", "layers.0-2": "cpu:0"}, ["embed_tokens", "lm_head"]),
        ({"layers.2.self_attn.attention": "cpu:1"}, ["layers.2.self_attn.attention"]),
        ({"gpu_layers": 1}, ["embed_tokens", "layers.0.", "layers.1."]),
        ({"gpu_layers": 3}, ["embed_tokens"]),
    ],
)
def test_patterns_choose_the_operations_whose_names_begin_so(
    llama: CpuProgram, place: PlaceRules, beginnings: list[str]
) -> None:
    found = on_second(llama, place)
    expected = [name for one in llama.operations if (name := ".".join(name_of(one))).startswith(tuple(beginnings))]
    assert found == expected
    assert all(any(name.startswith(beginning) for name in found) for beginning in beginnings)


def test_no_layer_on_the_gpu_leaves_all_to_the_host(llama: CpuProgram) -> None:
    assert len(on_second(llama, {"gpu_layers": 0})) == len(llama.operations)
    assert place_program(llama, recipe_of({"gpu_layers": 0}, 1 << 30, 1 << 30)) is None


def test_experts_go_to_the_last_device_and_nothing_else_does(mixture: CpuProgram) -> None:
    found = on_second(mixture, {"host": "experts"})
    assert found == [".".join(name_of(one)) for one in mixture.operations if one.kind == "experts"]
    assert all(name.endswith(".mlp.experts") for name in found)


def test_the_devices_of_a_split_have_all_weights_and_keys_once(llama: CpuProgram) -> None:
    devices = assign_devices(llama.operations, {"gpu_layers": 1}, NAMES)
    plan = plan_stages(llama, devices, NAMES)
    recipe = recipe_of({"gpu_layers": 1}, 1, 1)
    (whole,) = parts_of(llama, None, 0, recipe)
    parts = parts_of(llama, plan, 0, recipe)
    assert [part.name for part in parts] == ["cpu:0", "cpu:1"]
    assert sum(part.kv for part in parts) == whole.kv
    assert sum(part.weights for part in parts) == whole.weights
    assert all(0 < part.arena <= whole.arena for part in parts)


def test_the_value_that_crosses_between_layers_is_the_residual_alone(llama: CpuProgram) -> None:
    plan = plan_stages(llama, assign_devices(llama.operations, {"gpu_layers": 2}, NAMES), NAMES)
    assert plan is not None
    crossings = [run.crossings for run in cut_program(llama, plan).runs]
    assert [len(one) for one in crossings] == [0, 1]
    assert crossings[1][0].source == plan.stages[0].device


@each_case(
    ("place", "message"),
    [
        (
            {"layers.7": "cpu:1"},
            r"'layers.7' matches no operation of the model. .*; the names are embed_tokens, layers.0-2.self_attn",
        ),
        ({"gpu_layers": 4}, "gpu_layers is 4; the model has 3 layers: set it to that or less"),
        ({"host": "experts"}, "the model has no experts, so {host: experts} places nothing; leave place out"),
    ],
)
def test_a_placement_that_places_nothing_is_refused(llama: CpuProgram, place: Place, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        place_program(llama, recipe_of(place, 1 << 30, 1 << 30))


def test_a_split_that_fits_nowhere_says_how_many_bytes_are_missing_and_what_fits(llama: CpuProgram) -> None:
    plan = plan_stages(llama, assign_devices(llama.operations, {"gpu_layers": 2}, NAMES), NAMES)
    first, second = (need.total for need in parts_of(llama, plan, 0, recipe_of({"gpu_layers": 2}, 1, 1)))
    with pytest.raises(UsageError) as caught:
        place_program(llama, recipe_of({"gpu_layers": 3}, first, 1 << 40))
    assert "bytes are missing" in str(caught.value)
    assert str(caught.value).endswith("The nearest split by layers that fits is {gpu_layers: 2}")
    place_program(llama, recipe_of({"gpu_layers": 2}, first, second))
    with pytest.raises(UsageError, match=r": 1 bytes are missing. No split by layers fits; {gpu_layers: 2}"):
        place_program(llama, recipe_of({"gpu_layers": 2}, first, second - 1))


def test_layers_that_share_keys_and_values_stay_together() -> None:
    program = lowered(imported(CHECKPOINTS / "gemma4_text", *PACKED)).program
    shared = next(number for number, layer in enumerate(program.kv.layers) if layer.source != number)
    source = program.kv.layers[shared].source
    with pytest.raises(UsageError, match=rf"layer {shared} is on cpu:1 and .* of layer {source}, which is on"):
        place_program(program, recipe_of({f"layers.{shared}": "cpu:1"}, 1 << 30, 1 << 30))


def test_the_logits_are_computed_on_one_device() -> None:
    with pytest.raises(UsageError, match="head on cpu:0 and cap on cpu:1 both compute the logits; place them on one"):
        place_program(tiny_program(), recipe_of({"cap": "cpu:1"}, 1 << 30, 1 << 30))


def test_a_sealed_recipe_has_place_and_devices_only_where_it_was_placed() -> None:
    placed = recipe_of({"gpu_layers": 1}, 1, 2)
    assert "place:\n  gpu_layers: 1\n" in placed.resolved_yaml()
    plain = placed.model_copy(update={"place": None}).resolved_yaml()
    assert "place" not in plain
    assert "devices" not in plain
