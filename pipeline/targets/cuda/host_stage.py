"""A model on the host and a GPU: its first layers are a stage of the CPU engine, its last ones a launch program.

    first layers    operations and stages as those of several devices of the CPU (cpu/place_stages.py)
    last layers     a model of their own, whose input `hidden` takes the rows that the host's stage made

Both keep keys and values in one type, so that a block has one geometry.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from ingot.artifact import KVGeometry, Program
from ingot.artifact.programs.launch_program import LAUNCHES_FILE
from ingot.artifact.programs.stages import DEVICE_WEIGHTS_FILE, CutProgram, DeviceProgram, StagePlan, cut_program
from ingot.errors import PassError
from ingot.passes.manager import PassManager
from ingot.passes.model_facts import EXPERT_CHOICES, KV
from ingot.passes.registry import make_pass
from ingot.passes.rewriting import attentions, row_columns
from ingot.pipeline.recipe.schema import Recipe
from ingot.pipeline.targets.cpu.lowering import Lowered, lower_to_operations
from ingot.pipeline.targets.cpu.place_rules import layer_in, layer_of, split_by_layers
from ingot.pipeline.targets.cpu.place_stages import parts_of, place_program
from ingot.pipeline.targets.cpu.writer import write_stage
from ingot.pipeline.targets.cuda.launch_sizes import launch_sizes
from ingot.pipeline.targets.cuda.lowering import HIDDEN_INPUT
from ingot.pipeline.targets.cuda.program_builder import FLOAT_KV
from ingot.pipeline.targets.cuda.writer import TOOLS, activation_type, lower_launches, recipe_tiles, write_lowered
from ingot.pipeline.targets.table import Target
from ingot.pipeline.targets.writers import Written, kv_geometry
from ingot.planning.memory import DevicePart, ProgramMemory

_HOST = 1
"""Index of the host among the devices."""
_LOWERING = ("clean-up", "fuse-residual-norm", "clean-up")
"""Passes of the GPU's layers, after those of both devices."""


@dataclass(frozen=True)
class DividedModel:
    """The operations of the whole model, the stages, and the GPU's layers as a model of their own."""

    lowered: Lowered
    plan: StagePlan
    cut: CutProgram
    on_gpu: ir.Model

    @property
    def host(self) -> DeviceProgram:
        """The host's program."""
        return self.cut.devices[_HOST]


def write_divided_program(model: ir.Model, folder: Path, recipe: Recipe, target: Target) -> Written:
    """Write the programs of host and GPU. See `ProgramWriter`."""
    divided, tiles = divide(model, recipe, target), recipe_tiles(recipe, target.sms)
    write_stage(divided.lowered, divided.host.program, divided.plan, folder)
    launches = lower_launches(divided.on_gpu, recipe, tiles)
    write_lowered(launches, divided.on_gpu, folder, target.sms, tiles, recipe.threads, DEVICE_WEIGHTS_FILE)
    return Written(Program(launches=LAUNCHES_FILE), divided.cut.whole.kv, TOOLS)


def divide(model: ir.Model, recipe: Recipe, target: Target) -> DividedModel:
    """Place the model by the recipe.

    UsageError for parts that do not fit their devices, PassError for layers that cannot be apart.
    """
    KV.record(model, shared_geometry(model, recipe))
    lowered = lower_to_operations(model, recipe.cpu.attention)
    program = lowered.program

    def measure(plan: StagePlan | None, alone: int) -> tuple[DevicePart, ...]:
        if plan is None:
            return parts_of(program, None, alone, recipe)
        cut = cut_program(program, plan)
        return divided_parts(DividedModel(lowered, plan, cut, gpu_layers(model, plan, cut)), recipe, target)[0]

    plan = place_program(program, recipe, measure, EXPERT_CHOICES.find(model))
    assert plan is not None  # all layers on the host are a program of the CPU (engine_choice.py)
    cut = cut_program(program, plan)
    return DividedModel(lowered, plan, cut, gpu_layers(model, plan, cut))


def shared_geometry(model: ir.Model, recipe: Recipe) -> KVGeometry:
    """The geometry of a block: keys and values in the GPU's type on both devices."""
    geometry = kv_geometry(model, recipe)
    if geometry.is_quantized:
        return geometry
    return geometry.model_copy(update={"dtype": FLOAT_KV[activation_type(model, recipe)]})


def divided_parts(
    divided: DividedModel, recipe: Recipe, target: Target
) -> tuple[tuple[DevicePart, ...], ProgramMemory]:
    """Return the part of each device, the GPU first, and the sizes of the GPU's program."""
    memory, kv = launch_sizes(divided.on_gpu, recipe, target)
    gpu, tokens = divided.cut.devices[0].name, divided.cut.whole.context_tokens
    part = DevicePart.of(gpu, memory.weight_bytes, memory.arena_bytes, kv, tokens)
    host = next(part for part in parts_of(divided.cut.whole, divided.plan, _HOST, recipe) if part.name != gpu)
    return (part, host), memory


def gpu_layers(model: ir.Model, plan: StagePlan, cut: CutProgram) -> ir.Model:
    """The layers of the last stage as a model of their own. PassError where more than one value crosses to them."""
    copy = model.clone()
    first = layer_of(cut.whole.operations[plan.stages[0].end])
    assert first is not None
    nodes = list(copy.graph)
    places = split_by_layers((layer_in((node.name or "").split(".")) for node in nodes), first, _HOST)
    ours = [node for node, place in zip(nodes, places, strict=True) if place != _HOST]
    hidden = _crossing(copy.graph, ours, cut)
    taken = ir.Value(name=HIDDEN_INPUT, shape=hidden.shape, type=hidden.type)
    for node in ours:
        for at, value in enumerate(node.inputs):
            if value is hidden:
                node.replace_input_with(at, taken)
    copy.graph.inputs.append(taken)
    device = cut.devices[cut.runs[-1].device]
    if not device.layers:
        raise PassError(
            f"place: the layers from {first} on have no attention; a GPU needs one such layer: place more there"
        )
    # Layers before its own are removed as dead nodes.
    for node in attentions(copy.graph):
        layer = node.attributes["layer"].as_int()
        if layer in device.layers:
            node.attributes["layer"] = ir.AttrInt64("layer", device.layers.index(layer))
    KV.record(copy, device.program.kv)
    PassManager([make_pass(name) for name in _LOWERING]).run(copy)
    return copy


def _crossing(graph: ir.Graph, ours: Sequence[ir.Node], cut: CutProgram) -> ir.Value:
    """The one value of the host's layers that the GPU's nodes read. Rotary tables and the like are computed on both."""
    of_tokens = {value for value in graph.inputs if value.name == "input_ids"}
    for node in graph:
        if any(value in of_tokens for value in node.inputs):
            of_tokens |= set(node.outputs)
    own = {value for node in ours for value in node.outputs}
    read = dict.fromkeys(value for node in ours for value in node.inputs if value in of_tokens and value not in own)
    crossings = cut.runs[-1].crossings
    found = [value for value in read if value is not None]
    if len(found) != 1 or len(crossings) != 1 or row_columns(found[0]) != cut.hidden_columns:
        names = ", ".join(value.name or "" for value in found) or "none"
        raise PassError(
            f"place: a GPU takes one value from the host's layers, and this model passes {len(found)} ({names}); place"
            " it on one device"
        )
    return found[0]
