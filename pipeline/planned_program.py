"""The program that a recipe would make, without its weights: bytes, arena, KV geometry and the shapes of its matmuls.

A quantizer's choice of weights and schemes is the pass's own; codes and scales are tensors that have a type and a shape
and no content. Lowering and the writer's arithmetic are those of a build. Passes that change values alone are left out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from ingot.artifact import KVGeometry, ModelFacts
from ingot.artifact.programs.stages import CutProgram, cut_program
from ingot.errors import UsageError
from ingot.passes.base import Pass
from ingot.passes.lowering.expand_experts import routing_of
from ingot.passes.manager import PassManager
from ingot.passes.model_facts import KV, MODEL
from ingot.passes.numerics.scheme import Scheme
from ingot.passes.pruning.prune_structure import PruneStructure
from ingot.passes.quantization.activation_nodes import activation_scheme
from ingot.passes.quantization.fp8 import Fp8
from ingot.passes.quantization.mixed_precision import MixedPrecision
from ingot.passes.quantization.quantize_activations import QuantizeActivations
from ingot.passes.quantization.quantize_weights import QuantizeWeights
from ingot.passes.quantization.smooth_quant import SmoothQuant
from ingot.passes.quantization.weight_nodes import FLOAT8, insert_tensors, replace_weight
from ingot.passes.registry import make_pass
from ingot.passes.rewriting import attentions
from ingot.passes.weights import WeightSite, weight_sites
from ingot.pipeline.checkpoint.safetensors_writer import streamed_bytes
from ingot.pipeline.model.importer import ModelSource, collector_paused
from ingot.pipeline.recipe.schema import Recipe
from ingot.pipeline.targets.cpu.engine_choice import choose_target
from ingot.pipeline.targets.cpu.lowering import lower_to_operations
from ingot.pipeline.targets.cpu.place_stages import cut_parts, place_program, placed_shapes
from ingot.pipeline.targets.cuda.host_stage import divide, divided_parts
from ingot.pipeline.targets.cuda.launch_sizes import launch_sizes
from ingot.pipeline.targets.segments.onnx_files import segment_weight_bytes
from ingot.pipeline.targets.table import NATIVE, Target
from ingot.pipeline.targets.writers import kv_geometry
from ingot.planning.hardware import FlopType
from ingot.planning.memory import ProgramMemory
from ingot.planning.model_shape import MatmulRole, Matmuls, ModelShape, PlacedShape
from ingot.runtime.cpu.limits import MAX_SEQUENCES

_FLOAT_BYTES = 4


@dataclass(frozen=True)
class PlannedProgram:
    """Sizes of a program that is not built.

    memory           what it takes on any machine
    left_out         passes that a plan does not run, because they change values and no size
    placed           the parts of the devices that the recipe places it on; () for one device
    """

    target: Target
    model: ModelFacts
    kv: KVGeometry
    shape: ModelShape
    memory: ProgramMemory
    left_out: tuple[str, ...]
    placed: tuple[PlacedShape, ...] = ()


@collector_paused()
def plan_program(recipe: Recipe, source: ModelSource) -> PlannedProgram:
    """Compile without weights. UsageError for a pass whose sizes follow from data."""
    model = source.copy()
    left_out = [str(made) for made in recipe.make_passes() if not _apply(made, model)]
    target = choose_target(recipe, model).target
    KV.record(model, kv_geometry(model, recipe))
    shape = model_shape(model)
    PassManager([make_pass(name) for name in target.lowering]).run(model)
    memory, kv, cut = _SIZES.get(target.engine, _launch_sizes)(model, recipe, target)
    shape = replace(shape, kv=kv)
    placed = placed_shapes(cut, recipe, shape) if cut else ()
    return PlannedProgram(target, MODEL.of(model), kv, shape, memory, tuple(left_out), placed)


def _apply(made: Pass, model: ir.Model) -> bool:
    """Give the model its sizes after the pass; False for a pass that changes values alone."""
    if isinstance(made, PruneStructure):
        raise UsageError(
            f"{made.name} chooses the channels to remove by data, so the sizes are unknown before it runs: build the"
            " recipe without evidence, or leave the pass out of the plan"
        )
    if isinstance(made, MixedPrecision):
        made.assign_without_data(model)
    elif isinstance(made, QuantizeWeights):
        for (weight, scheme), sites in made.plan(model).items():
            _quantize(model.graph, weight, sites, _code_tensors(weight, scheme), scheme.block_size)
    elif isinstance(made, SmoothQuant):
        for part in made.parts:
            _apply(part, model)
    elif isinstance(made, QuantizeActivations):
        PassManager([replace(made, mode="dynamic", outliers=0.0, outlier_threshold=0.0)]).run(model)
    elif isinstance(made, Fp8):
        for part in made.parts:
            _apply(part, model)
        for weight, sites in made.unquantized(model).items():
            _quantize(model.graph, weight, sites, _float8_tensors(weight), 0)
    elif made.needs_calibration or made.changes_weights:
        return False
    else:
        PassManager([made]).run(model)
    return True


def _quantize(
    graph: ir.Graph, weight: ir.Value, sites: list[WeightSite], tensors: list[ir.TensorProtocol], block_size: int
) -> None:
    replace_weight(graph, sites, insert_tensors(graph, weight, sites[0].node, tensors, block_size))
    for site in sites:
        if site.role == "embedding":
            site.node.outputs[0].dtype = ir.DataType.FLOAT


def _code_tensors(weight: ir.Value, scheme: Scheme) -> list[ir.TensorProtocol]:
    """Codes, scales and zero points without content."""
    rows, columns = _matrix(weight)
    scales = (rows, scheme.num_blocks(columns)) if scheme.block_size else (rows,)
    kinds = (ir.DataType.INT8, ir.DataType.INT4) if scheme.symmetric else (ir.DataType.UINT8, ir.DataType.UINT4)
    codes = kinds[0] if scheme.bits == 8 else kinds[1]
    found = [_hollow("q", codes, (rows, columns)), _hollow("scale", ir.DataType.FLOAT, scales, scheme.scale_dtype)]
    return found if scheme.symmetric else [*found, _hollow("zero_point", codes, scales)]


def _float8_tensors(weight: ir.Value) -> list[ir.TensorProtocol]:
    rows, columns = _matrix(weight)
    return [_hollow("q", FLOAT8, (rows, columns)), _hollow("scale", ir.DataType.FLOAT, (rows,))]


def _matrix(weight: ir.Value) -> tuple[int, int]:
    assert weight.const_value is not None
    rows, columns = (int(size) for size in weight.const_value.shape.numpy())
    return rows, columns


def _hollow(name: str, dtype: ir.DataType, shape: tuple[int, ...], exact: str = "float32") -> ir.TensorProtocol:
    """A tensor that is made when it is read. Lowering reads scales: it stores in 16 bits those that float16 holds."""
    value = np.float32(1.0 if exact == "float16" else 1 / 3)
    kind = np.float32 if dtype == ir.DataType.FLOAT else dtype.numpy()
    make: Callable[[], ir.Tensor[Any]] = partial(_filled, value, kind, shape, dtype)
    return ir.LazyTensor(make, dtype=dtype, shape=ir.Shape(shape), name=name)


def _filled(value: np.float32, kind: Any, shape: tuple[int, ...], dtype: ir.DataType) -> ir.Tensor[Any]:
    return ir.Tensor(np.broadcast_to(value.astype(kind), shape), dtype=dtype)


def model_shape(model: ir.Model) -> ModelShape:
    """Read the matmuls and the attention of a model, before it is lowered."""
    facts, chosen = MODEL.of(model), _experts(model.graph)
    sites = weight_sites(model)
    tables = {site.weight: _stored_bytes(site) for site in sites if site.role == "embedding"}
    shared = {site.weight for site in sites if site.role != "embedding"}
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for site in sites:
        if site.role != "embedding":
            role: MatmulRole = "expert" if site.node in chosen else site.role
            key = (role, *_matrix(site.weight), *chosen.get(site.node, (0, 0)), _inputs(site), _stored_bytes(site))
            kinds.setdefault(key, []).append(1)
    matmuls = tuple(
        Matmuls(role, rows, columns, len(found), size * len(found), experts, count, inputs)
        for (role, rows, columns, experts, count, inputs, size), found in kinds.items()
    )
    return ModelShape(
        name=facts.family,
        num_parameters=facts.num_parameters,
        num_layers=facts.num_layers,
        hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size,
        context_tokens=facts.context_tokens,
        matmuls=matmuls,
        embedding_bytes=sum(size for weight, size in tables.items() if weight not in shared),
        query_heads=tuple(node.attributes["num_heads"].as_int() for node in attentions(model.graph)),
        kv=KV.of(model),
    )


def _inputs(site: WeightSite) -> FlopType:
    """The type that a matmul's inputs are multiplied in."""
    scheme = activation_scheme(site.node)
    return "fp16" if scheme is None else "fp8" if scheme.kind == "float" else "int8"


def _stored_bytes(site: WeightSite) -> int:
    """Bytes of the weight's tensors as the IR holds them; scales that float16 holds are stored so."""
    producer = site.operand.producer()
    values = [site.weight] if producer is None else [value for value in producer.inputs if value is not None]
    return sum(value.const_value.nbytes for value in values if value.const_value is not None)


def _experts(graph: ir.Graph) -> dict[ir.Node, tuple[int, int]]:
    """Each matmul between DispatchExperts and CombineExperts -> experts of the layer, experts of a token."""
    inside: dict[ir.Value, tuple[int, int]] = {}
    found: dict[ir.Node, tuple[int, int]] = {}
    for node in graph:
        if node.op_type == "DispatchExperts":
            routes = node.inputs[1].producer() if node.inputs[1] is not None else None
            assert routes is not None
            inside |= dict.fromkeys(node.outputs, (len(node.outputs), routing_of(routes).chosen))
        elif node.op_type != "CombineExperts":
            counts = next((inside[value] for value in node.inputs if value in inside), None)
            if counts is not None:
                inside |= dict.fromkeys(node.outputs, counts)
                found[node] = counts
    return found


Sizes = tuple[ProgramMemory, KVGeometry, CutProgram | None]
"""Bytes, a block, and the parts of devices that the recipe places the program on"""


def _native_sizes(model: ir.Model, recipe: Recipe, target: Target) -> Sizes:
    lowered = lower_to_operations(model, recipe.cpu.attention)
    read = set(lowered.program.tensors())
    matrices = {name: stored.matrix.num_bytes for name, stored in lowered.stored.items()}
    vectors = {name: make().size * _FLOAT_BYTES for name, make in lowered.vectors.items() if name in read}
    plan = None if recipe.place is None else place_program(lowered.program, recipe)
    cut = None if plan is None else cut_program(lowered.program, plan)
    parts = cut_parts(cut, recipe.engine.max_batch_tokens) if cut else ()
    arena = lowered.program.arena_floats * _FLOAT_BYTES * recipe.engine.max_batch_tokens
    arena = sum(part.arena for part in parts) or arena
    memory = _on_cpu(streamed_bytes({**matrices, **vectors}), arena, recipe)
    return replace(memory, parts=parts), lowered.program.kv, cut


def _segment_sizes(model: ir.Model, recipe: Recipe, target: Target) -> Sizes:
    """onnxruntime plans the memory of its segments when it runs them: none is counted."""
    return _on_cpu(segment_weight_bytes(model), 0, recipe), KV.of(model), None


def _on_cpu(weights: int, arena: int, recipe: Recipe) -> ProgramMemory:
    return ProgramMemory(weights, arena, recipe.engine.max_batch_tokens, MAX_SEQUENCES, on_cpu=True)


def _launch_sizes(model: ir.Model, recipe: Recipe, target: Target) -> Sizes:
    """Sizes of a program for GPUs, all of it or with its first layers on the host."""
    if recipe.place is None:
        return (*launch_sizes(model, recipe, target), None)
    divided = divide(model, recipe, target)
    parts, memory = divided_parts(divided, recipe, target)
    host = parts[1]
    whole = replace(
        memory,
        weight_bytes=memory.weight_bytes + host.weights,
        arena_bytes=memory.arena_bytes + host.arena,
        parts=parts,
    )
    return whole, divided.cut.whole.kv, divided.cut


_SIZES: Mapping[str, Callable[[ir.Model, Recipe, Target], Sizes]] = {
    NATIVE.engine: _native_sizes,
    "onnxruntime": _segment_sizes,
}
