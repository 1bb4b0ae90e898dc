"""A model on the host and a GPU: first layers and experts are stages of the CPU engine, the rest a launch program.

    host    operations and stages as those of several devices of the CPU (cpu/place_stages.py)
    GPU     a model of its own, with copies to and from the host where a stage of the host is (lower/host_copies.py)

In steps of many rows the GPU computes the host's experts too: a second model of its own has them, with weights that are
copied to it from pinned memory (program_builder.py).

Both keep keys and values in one type, so that a block has one geometry.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from ingot.artifact import KVGeometry, Program
from ingot.artifact.programs.cpu_program import CpuProgram, Experts, Operation
from ingot.artifact.programs.expert_choices import ExpertChoices
from ingot.artifact.programs.launch_program import LAUNCHES_FILE
from ingot.artifact.programs.operation_row import View
from ingot.artifact.programs.stages import (
    DEVICE_WEIGHTS_FILE,
    Crossing,
    CutProgram,
    DeviceProgram,
    StagePlan,
    cut_program,
    spans_of_stages,
)
from ingot.errors import PassError, UsageError, shown
from ingot.passes.lowering.expand_experts import DISPATCH
from ingot.passes.manager import PassManager
from ingot.passes.model_facts import EXPERT_CHOICES, KV
from ingot.passes.registry import make_pass
from ingot.passes.rewriting import attentions, make_node, replace_nodes, row_columns
from ingot.pipeline.recipe.schema import Recipe
from ingot.pipeline.recipe.sections import AUTO, GPU_LAYERS
from ingot.pipeline.targets.cpu.lowering import Lowered, lower_to_operations
from ingot.pipeline.targets.cpu.place_auto import PlaceSteps, least_streamed_rows, units_of
from ingot.pipeline.targets.cpu.place_rules import layer_in, layer_of, name_of, split_by_layers
from ingot.pipeline.targets.cpu.place_stages import missing_in_words, part_of, parts_of, place_program, placed_devices
from ingot.pipeline.targets.cpu.writer import write_stage
from ingot.pipeline.targets.cuda.launch_sizes import launch_sizes
from ingot.pipeline.targets.cuda.lower.experts import STREAMED_STAGE
from ingot.pipeline.targets.cuda.lower.host_copies import RECEIVE, SEND
from ingot.pipeline.targets.cuda.lowering import StreamedExperts
from ingot.pipeline.targets.cuda.program_builder import FLOAT_KV
from ingot.pipeline.targets.cuda.writer import TOOLS, activation_type, lower_launches, recipe_tiles, write_lowered
from ingot.pipeline.targets.table import Target
from ingot.pipeline.targets.writers import Written, kv_geometry
from ingot.planning.memory import DevicePart, ProgramMemory
from ingot.progress import note

_GPU, _HOST = 0, 1
"""Indices among the devices."""
_LOWERING = ("clean-up", "fuse-residual-norm", "clean-up")
"""Passes of the GPU's layers, after those of both devices."""


@dataclass(frozen=True)
class DividedModel:
    """The operations of the whole model, the stages, and the GPU's part as a model of its own.

    streamed   the GPU's part in steps of many rows, in which it computes the host's experts too
    """

    lowered: Lowered
    plan: StagePlan
    cut: CutProgram
    on_gpu: ir.Model
    streamed: StreamedExperts | None = None

    @property
    def host(self) -> DeviceProgram:
        """The host's program."""
        return self.cut.devices[_HOST]


def write_divided_program(model: ir.Model, folder: Path, recipe: Recipe, target: Target) -> Written:
    """Write the programs of host and GPU. See `ProgramWriter`."""
    divided, tiles = divide(model, recipe, target), recipe_tiles(recipe, target.sms)
    write_stage(divided.lowered, divided.host.program, divided.plan, folder)
    launches = lower_launches(divided.on_gpu, recipe, tiles, divided.streamed)
    write_lowered(launches, divided.on_gpu, folder, target.sms, tiles, recipe.threads, DEVICE_WEIGHTS_FILE)
    return Written(Program(launches=LAUNCHES_FILE), divided.cut.whole.kv, TOOLS)


def divide(model: ir.Model, recipe: Recipe, target: Target) -> DividedModel:
    """Place the model by the recipe.

    UsageError for parts that do not fit their devices or are not the host's to have, PassError for layers that cannot
    be apart.
    """
    KV.record(model, shared_geometry(model, recipe))
    # Other rules may place experts alone, whose values then cross as they are.
    by_layers = isinstance(recipe.place, Mapping) and GPU_LAYERS in recipe.place
    lowered = lower_to_operations(model, recipe.cpu.attention, experts_apart=not by_layers)
    program, choices, last = lowered.program, EXPERT_CHOICES.find(model), list[_Measured]()
    rows, reason = _least_streamed_rows(program, recipe, choices)

    def measure(plan: StagePlan | None, alone: int) -> tuple[DevicePart, ...]:
        if plan is None:
            return parts_of(program, None, alone, recipe)
        cut = cut_program(program, plan)
        divided = DividedModel(lowered, plan, cut, gpu_part(model, plan, cut))
        last[:] = [_measured(divided, model, rows if _has_experts_apart(cut) else None, recipe, target)]
        return last[0].parts

    if place_program(program, recipe, measure, choices) is None:
        raise UsageError(
            f"place: all operations are on one device; leave place out, with the target cpu or {target.name}, or name"
            " the experts or first layers that the host has"
        )
    # The plan that is chosen is measured last.
    _note_streamed(last[0], reason, recipe)
    return last[0].divided


@dataclass(frozen=True)
class _Measured:
    """A divided model with its parts, and why the GPU computes none of the host's experts."""

    divided: DividedModel
    parts: tuple[DevicePart, ...]
    reason: str = ""


def _measured(divided: DividedModel, model: ir.Model, rows: int | None, recipe: Recipe, target: Target) -> _Measured:
    """Measure the parts; with the host's experts on the GPU in steps of so many rows, where kernels and memory allow.

    PassError where the recipe gives the rows, and the GPU has no kernel.
    """
    reason = ""
    if rows is not None:
        experts = gpu_part(model, divided.plan, divided.cut, streams=True)
        streamed = replace(divided, streamed=StreamedExperts(experts, rows))
        try:
            parts = divided_parts(streamed, recipe, target)[0]
        except PassError as error:
            if recipe.stream_experts != AUTO:
                raise
            reason = str(error)
        else:
            reason = missing_in_words(parts, recipe)
            if not reason or recipe.stream_experts != AUTO:
                return _Measured(streamed, parts)
    return _Measured(divided, divided_parts(divided, recipe, target)[0], reason)


def _has_experts_apart(cut: CutProgram) -> bool:
    """Report if the host has experts of layers of the GPU's."""
    return any(run.device == _HOST and run.crossings for run in cut.runs)


def _least_streamed_rows(program: CpuProgram, recipe: Recipe, choices: ExpertChoices | None) -> tuple[int | None, str]:
    """Return the rows of the recipe's `stream_experts`; None with the reason where no step has enough.

    UsageError for more rows than those of the largest step.
    """
    given, buckets = recipe.stream_experts, recipe.gpu.ragged_rows(recipe.engine.max_batch_tokens)
    if given == 0:
        return None, ""
    if given != AUTO:
        if given > buckets[-1]:
            raise UsageError(
                f"stream_experts is {given}, and a step has at most {buckets[-1]} rows (engine.max_batch_tokens); lower"
                " it, or set it to 0"
            )
        return given, ""
    if recipe.gpu.batch_invariant:
        return None, "gpu.batch_invariant needs one device for the experts of all steps"
    devices = placed_devices(recipe)
    if len(devices) == len(recipe.devices):
        units, *_ = units_of(program, PlaceSteps(choices=choices))
        return least_streamed_rows(units, devices, buckets), "it is predicted to be faster"
    return None, "whether copying their weights pays is predicted where all devices name their hardware"


def _note_streamed(measured: _Measured, reason: str, recipe: Recipe) -> None:
    """Say which steps compute the host's experts on the GPU. UsageError for rows without experts on the host."""
    streamed, given = measured.divided.streamed, recipe.stream_experts
    if streamed is not None:
        note(f"stream_experts: the GPU computes the host's experts in steps of {streamed.least_rows} rows and more")
    elif not _has_experts_apart(measured.divided.cut):
        if given not in (AUTO, 0) and isinstance(recipe.place, Mapping) and AUTO not in recipe.place:
            raise UsageError(
                f"stream_experts is {given}, and the host has no experts of layers on the GPU; place some there, such"
                " as {host: experts}, or remove it"
            )
    elif given != 0:
        note(f"stream_experts: the host computes its experts in all steps: {measured.reason or reason}")


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
    memory, kv = launch_sizes(divided.on_gpu, recipe, target, divided.streamed)
    gpu, tokens = divided.cut.devices[0].name, divided.cut.whole.context_tokens
    part = DevicePart.of(gpu, memory.weight_bytes, memory.arena_bytes, kv, tokens)
    host = part_of(divided.host.name, divided.host.program, recipe.engine.max_batch_tokens)
    return (part, replace(host, weights=host.weights + memory.pinned_bytes)), memory


def gpu_part(model: ir.Model, plan: StagePlan, cut: CutProgram, *, streams: bool = False) -> ir.Model:
    """Return the GPU's part as a model of its own, with a copy node where a stage of the host begins or ends.

    streams   the GPU computes the host's experts, with weights that are copied to it

    UsageError for a placement other than first layers and experts on the host. PassError for a model that passes more
    than one value on from its first layers, and for a GPU without attention.
    """
    _check_places(plan, cut)
    copy, device, first = model.clone(), cut.devices[_GPU], layer_of(cut.whole.operations[plan.stages[0].end])
    if not device.layers:
        raise PassError(
            f"place: the layers from {first} on have no attention; a GPU needs one such layer: place more there"
        )
    for number, run in enumerate(cut.runs):
        if run.device == _HOST and not run.crossings:
            assert first is not None
            _receive_hidden(copy.graph, first, cut)
        elif run.device == _HOST and streams:
            _stream_experts(copy.graph, number, cut)
        elif run.device == _HOST:
            _exchange_experts(copy.graph, number, cut)
    # Layers before its own are removed as dead nodes.
    for node in attentions(copy.graph):
        layer = node.attributes["layer"].as_int()
        if layer in device.layers:
            node.attributes["layer"] = ir.AttrInt64("layer", device.layers.index(layer))
    KV.record(copy, device.program.kv)
    PassManager([make_pass(name) for name in _LOWERING]).run(copy)
    _order_around_host(copy.graph)
    return copy


def _check_places(plan: StagePlan, cut: CutProgram) -> None:
    """Raise UsageError for the first operation on the host that is neither of the first layers nor experts."""
    operations, names = cut.whole.operations, [device.name for device in cut.devices]
    for stage, span in zip(plan.stages, spans_of_stages(plan.stages), strict=True):
        first_on_gpu = layer_of(operations[span.stop]) if span.start == 0 and span.stop < len(operations) else None
        own = [operations[at] for at in span] if stage.device == _HOST else []
        wrong = next((one for one in own if not _may_be_on_host(one, first_on_gpu)), None)
        if wrong is not None:
            raise UsageError(
                f"place: {shown('.'.join(name_of(wrong)))} is on {names[_HOST]}, and layers before or after it on"
                f" {names[_GPU]}; the host may have the embedding with the first layers, and experts of any layer: such"
                " as {gpu_layers: 20}, {host: experts}, or {embed_tokens: cpu, layers.0-3: cpu, layers.*.mlp.experts:"
                " cpu}"
            )


def _may_be_on_host(operation: Operation, first_on_gpu: int | None) -> bool:
    """Return True for experts, and for what is before the GPU's first layer; None: the stage has no first layers."""
    if first_on_gpu is None:
        return isinstance(operation, Experts)
    layer = layer_of(operation)
    return layer is None or layer < first_on_gpu


def _receive_hidden(graph: ir.Graph, first: int, cut: CutProgram) -> None:
    """Let the GPU's first layer read what the host's first stage made."""
    nodes = list(graph)
    places = split_by_layers((layer_in((node.name or "").split(".")) for node in nodes), first, _HOST)
    ours = [node for node, place in zip(nodes, places, strict=True) if place != _HOST]
    hidden = _crossing(graph, ours, cut.runs[1].crossings, cut)
    receive = _receive("hidden", 0, [], hidden, View(buffer=cut.runs[1].crossings[0].buffer))
    graph.insert_before(nodes[0], receive)
    for node in ours:
        for at, value in enumerate(node.inputs):
            if value is hidden:
                node.replace_input_with(at, receive.outputs[0])


def _crossing(graph: ir.Graph, ours: Sequence[ir.Node], crossings: Sequence[Crossing], cut: CutProgram) -> ir.Value:
    """The one value of the host's layers that the GPU's nodes read. Rotary tables and the like are computed on both."""
    of_tokens = {value for value in graph.inputs if value.name == "input_ids"}
    for node in graph:
        if any(value in of_tokens for value in node.inputs):
            of_tokens |= set(node.outputs)
    own = {value for node in ours for value in node.outputs}
    read = dict.fromkeys(value for node in ours for value in node.inputs if value in of_tokens and value not in own)
    found = [value for value in read if value is not None]
    columns = cut.whole.buffers[crossings[0].buffer].columns
    if len(found) != 1 or len(crossings) != 1 or row_columns(found[0]) != columns:
        names = ", ".join(value.name or "" for value in found) or "none"
        raise PassError(
            f"place: a GPU takes one value from the host's layers, and this model passes {len(found)} ({names}); place"
            " it on one device"
        )
    return found[0]


def _exchange_experts(graph: ir.Graph, number: int, cut: CutProgram) -> None:
    """Let the host compute a layer's experts: send it their input and the router's logits, and receive their sum."""
    run = cut.runs[number]
    first, *others = (cut.devices[_HOST].program.operations[at] for at in run.operations)
    assert isinstance(first, Experts)
    crossing = {one.buffer for one in run.crossings}
    if others or first.norm is not None or first.adds or crossing != {first.input.buffer, first.logits.buffer}:
        raise PassError(f"place: the experts {first.node!r} cannot be apart from what is around them; leave them there")
    combine = next(node for node in graph if node.name == first.node)
    route = combine.inputs[0].producer() if combine.inputs[0] is not None else None
    assert route is not None
    dispatch = next(node for node in route.outputs[0].consumers() if node.op_type == DISPATCH)
    sent = {first.input: dispatch.inputs[0], first.logits: route.inputs[0]}
    attributes = {"stage": number, **_host_columns(list(sent))}
    send = make_node(SEND, f"{first.node}.send", list(sent.values()), [combine.outputs[0]], "ingot", **attributes)
    receive = _receive(f"{first.node}.receive", number, send.outputs, combine.outputs[0], first.output)
    replace_nodes(graph, combine, [combine], [send, receive], {combine.outputs[0]: receive.outputs[0]})


def _stream_experts(graph: ir.Graph, number: int, cut: CutProgram) -> None:
    """Let the GPU compute a layer's experts with weights of the host's stage of that number."""
    run = cut.runs[number]
    combined = {cut.devices[_HOST].program.operations[at].node for at in run.operations}
    for node in graph:
        if node.name in combined:
            node.attributes[STREAMED_STAGE] = ir.AttrInt64(STREAMED_STAGE, number)


def _receive(name: str, stage: int, sent: Sequence[ir.Value], like: ir.Value, view: View) -> ir.Node:
    return make_node(RECEIVE, name, sent, [like], "ingot", stage=stage, **_host_columns([view]))


def _host_columns(views: Sequence[View]) -> dict[str, list[str] | list[int]]:
    """Attributes of a copy node: the host's buffers, and the first column in each."""
    return {"buffers": [view.buffer for view in views], "columns": [view.column for view in views]}


def _order_around_host(graph: ir.Graph) -> None:
    """Send to the host as early as possible and receive as late, so that the GPU computes shared experts meanwhile.

    First come nodes that a copy to the host needs, then all that do not need the host's result.
    """
    waiting, ordered = list(graph), list[ir.Node]()
    for receive in [node for node in waiting if node.op_type == RECEIVE and node.inputs]:
        assert receive.inputs[0] is not None
        send = receive.inputs[0].producer()
        assert send is not None
        for first in (_before(waiting, send), set(waiting) - _after(waiting, receive)):
            ordered += [node for node in waiting if node in first]
            waiting = [node for node in waiting if node not in first]
    for node in (*ordered, *waiting):
        graph.append(node)  # moves it to the end


def _before(nodes: Sequence[ir.Node], last: ir.Node) -> set[ir.Node]:
    """The node, and those that it needs."""
    found = {last}
    for node in reversed(nodes):
        if node not in found and any(one in found for value in node.outputs for one in value.consumers()):
            found.add(node)
    return found


def _after(nodes: Sequence[ir.Node], first: ir.Node) -> set[ir.Node]:
    """The node, and those that need it."""
    found = {first}
    for node in nodes:
        if any(value is not None and value.producer() in found for value in node.inputs):
            found.add(node)
    return found
