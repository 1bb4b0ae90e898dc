"""Sizes of a launch program that is not built."""

from collections import Counter

import onnx_ir as ir

from ingot.artifact import KVGeometry
from ingot.pipeline.checkpoint.safetensors_writer import streamed_bytes
from ingot.pipeline.recipe.schema import Recipe
from ingot.pipeline.targets.cuda.lowering import StreamedExperts, lower_to_launches
from ingot.pipeline.targets.cuda.writer import activation_type, recipe_buckets, recipe_tiles
from ingot.pipeline.targets.table import Target
from ingot.planning.memory import ProgramMemory
from ingot.runtime.cuda.loading import GRAPH_CAPTURES


def launch_sizes(
    model: ir.Model, recipe: Recipe, target: Target, streamed: StreamedExperts | None = None
) -> tuple[ProgramMemory, KVGeometry]:
    """Sizes of a program for GPUs: codes as they are, scales in 16 bits, floats in the activations' type.

    One bucket of each kind is lowered: the largest, which has the largest arena. All of a kind have as many launches.
    """
    compute, buckets = activation_type(model, recipe), recipe_buckets(model, recipe)
    float_bytes = 4 if compute == "fp32" else 2
    sizes = {}
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is not None and value.uses():
            is_float = tensor.dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
            sizes[name] = tensor.size * float_bytes if is_float else tensor.nbytes
    largest = {bucket.attention: bucket for bucket in buckets}
    kinds = Counter(bucket.attention for bucket in buckets)
    lowered = lower_to_launches(
        model,
        tuple(largest.values()),
        compute,
        recipe_tiles(recipe, target.sms),
        batch_invariant=recipe.gpu.batch_invariant,
        adapters=recipe.gpu.adapters,
        streamed=streamed,
    )
    pinned = {name: layer.num_bytes for name, layer in lowered.shared.streamed.items()}
    nodes = sum(kinds[one.attention] * (len(one.launches) + len(one.samplers)) for one in lowered.all_programs)
    memory = ProgramMemory(
        weight_bytes=streamed_bytes(sizes),
        arena_bytes=max(one.arena_bytes for one in lowered.all_programs),
        max_batch_tokens=max(bucket.rows for bucket in buckets),
        max_sequences=max(bucket.sequences for bucket in buckets),
        on_cpu=False,
        graph_nodes=GRAPH_CAPTURES * nodes,
        pinned_bytes=streamed_bytes(pinned) if pinned else 0,
    )
    return memory, lowered.shared.kv
