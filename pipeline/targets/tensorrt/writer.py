"""IR -> program/ of an artifact with TensorRT plans: plans, launches, a table of cubins for each SM, and the weights.

    program/segment-000.plan ...        segments between attentions, for all SMs at once
    program/plans.json                  what each plan holds: SMs, bytes, operators of every profile
    program/launches.json, cubins-smXX.safetensors, weights.safetensors        as of the targets cuda-smXX

Plans built in processes of their own are the same, byte for byte, in most builds; in one of ten or so TensorRT writes a
segment's outputs in another order (docs/log.md). What comes from the cache is always the same.

Attention operands as the kernels want them: queries, keys, values in one row.

    Matched         a = ingot::PagedAttention(q, k, v, tables..; columns..)     of several values, or in another order
    Replacement     packed = Concat(q, k, v; axis=-1)                           a part of the segment, and fused there
                    a = ingot::PagedAttention(packed, packed, packed, tables..; columns 0, H * D, (H + KV) * D)

So queries and keys that are normed, or turned by the segment itself, need no kernel of their own. Refuses operands that
are a part of a wider value in another order.
"""

import json
from pathlib import Path

import onnx_ir as ir

from ingot.artifact import Program
from ingot.artifact.launch_program import LAUNCHES_FILE
from ingot.artifact.plan_facts import PLANS_FILE, PlanFacts, ProgramPlans
from ingot.errors import PassError, UsageError
from ingot.passes.rewriting import make_node, static_columns
from ingot.pipeline.recipe.schema import Recipe
from ingot.pipeline.targets.cuda.lowering import Lowered
from ingot.pipeline.targets.cuda.program_builder import Shared
from ingot.pipeline.targets.cuda.writer import activation_type, recipe_buckets, recipe_tiles, write_lowered
from ingot.pipeline.targets.segments.launches import lower_to_calls, stage_files
from ingot.pipeline.targets.segments.lowering import lower_segment
from ingot.pipeline.targets.segments.stages import ATTENTION, SegmentStage, split_stages
from ingot.pipeline.targets.table import Target
from ingot.pipeline.targets.tensorrt.library import load_library
from ingot.pipeline.targets.tensorrt.plan_request import PlanCache
from ingot.pipeline.targets.tensorrt.plans import PlanSettings, SegmentPlan, write_plans
from ingot.pipeline.targets.tensorrt.profiles import bucket_profiles
from ingot.pipeline.targets.writers import Written, kv_geometry

_NAMES = ("query_column", "key_column", "value_column")


def pack_attention_operands(graph: ir.Graph) -> None:
    """Rewrite every attention whose operands do not lie packed."""
    for node in list(graph):
        if node.op_type == ATTENTION and not _is_packed(node):
            _pack(graph, node)


def _columns(node: ir.Node) -> tuple[int, int, int]:
    heads, kv_heads, dim = (node.attributes[name].as_int() for name in ("num_heads", "num_kv_heads", "head_dim"))
    return heads * dim, kv_heads * dim, kv_heads * dim


def _is_packed(node: ir.Node) -> bool:
    query, key, _ = _columns(node)
    begins = tuple(node.attributes.get_int(name, 0) for name in _NAMES)
    return len(set(node.inputs[:3])) == 1 and begins == (0, query, query + key)


def _pack(graph: ir.Graph, node: ir.Node) -> None:
    widths, operands = _columns(node), node.inputs[:3]
    if any(value is None or static_columns(value) != width for value, width in zip(operands, widths, strict=True)):
        raise PassError(f"{node.name!r} reads parts of wider values; only queries, keys, values in one row are packed")
    concat = make_node("Concat", f"{node.name}.operands", operands, [operands[0]], axis=-1)
    packed = concat.outputs[0]
    packed.name = concat.name
    assert packed.shape is not None
    packed.shape = ir.Shape([packed.shape[0], sum(widths)])
    graph.insert_before(node, concat)
    for index in range(3):
        node.replace_input_with(index, packed)
    for name, column in zip(_NAMES, (0, widths[0], widths[0] + widths[1]), strict=True):
        node.attributes[name] = ir.AttrInt64(name, column)


TOOLS = ("triton",)


def write_tensorrt_program(model: ir.Model, folder: Path, recipe: Recipe, target: Target) -> Written:
    """A program for the SMs of the recipe's gpu.sms. See `program_writers.ProgramWriter`."""
    library, sms, compute = load_library(), recipe.gpu.sms, activation_type(model, recipe)
    if compute == "fp32":
        raise UsageError(f"target {target.name} computes in 16 bits; set gpu.activations to float16 or bfloat16")
    pack_attention_operands(model.graph)
    stages = split_stages(model.graph)
    segments = [lower_segment(stage, compute) for stage in stages if isinstance(stage, SegmentStage)]
    buckets, tiles = recipe_buckets(model, recipe), recipe_tiles(recipe, sms)
    settings = PlanSettings(library, sms, bucket_profiles(buckets), PlanCache())
    plans = write_plans(segments, settings, folder)
    _write_facts(plans, folder)
    shared = Shared.of(compute, kv_geometry(model, recipe), tiles)
    with_files = stage_files(stages, segments, [plan.facts.file for plan in plans])
    lowered = Lowered(lower_to_calls(model, with_files, buckets, shared), shared)
    write_lowered(lowered, model, folder, sms, tiles, recipe.threads)
    return Written(Program(launches=LAUNCHES_FILE), shared.kv, (*TOOLS, library.name))


def _write_facts(plans: list[SegmentPlan], folder: Path) -> None:
    distinct: dict[str, PlanFacts] = {plan.facts.file: plan.facts for plan in plans}
    facts = ProgramPlans(plans=tuple(distinct.values()))
    text = json.dumps(facts.model_dump(mode="json"), indent=1)
    (folder / PLANS_FILE).write_text(f"{text}\n", encoding="utf-8")
