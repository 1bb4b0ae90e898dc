"""Models of which the host has first layers or experts, and the rest runs on the interpreted device."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import onnx_ir as ir

from ingot.artifact import Artifact, ArtifactWriter, KVGeometry, Program, open_artifact
from ingot.artifact.programs.cpu_program import OPERATIONS_FILE
from ingot.artifact.programs.launch_program import LAUNCHES_FILE
from ingot.artifact.programs.stages import DEVICE_WEIGHTS_FILE
from ingot.passes.manager import PassManager
from ingot.passes.model_facts import KV, MODEL
from ingot.passes.registry import make_pass
from ingot.pipeline.recipe.schema import Recipe
from ingot.pipeline.targets.cpu.lowering import lower_to_operations
from ingot.pipeline.targets.cpu.writer import write_lowered, write_stage
from ingot.pipeline.targets.cuda.host_stage import divide, shared_geometry
from ingot.pipeline.targets.cuda.lowering import lower_to_launches
from ingot.pipeline.targets.cuda.tiles import MatmulShape, Tile, TileTable
from ingot.pipeline.targets.cuda.writer import activation_type, recipe_buckets
from ingot.pipeline.targets.table import NATIVE, get_target
from ingot.sizes import next_power_of_two
from tests.runtime.cuda.artifacts import described, write_program
from tests.simulators.launch_programs import Entry, imported

PREPARED = ("fold-constants", "pack-projections", "fuse-gated-activation", "clean-up")
TARGET = get_target("cuda-sm90")
Rules = Mapping[str, str | int]
Activations = Literal["float32", "float16", "bfloat16"]


class WideTiles(TileTable):
    """Tiles that are wide: the interpreter takes as long for a small one as for a large one."""

    def choose(self, shape: MatmulShape) -> Tile:
        return Tile(rows=16, columns=min(2048, max(16, next_power_of_two(shape.n))), depth=256)


def prepared(checkpoint: Path, *quantization: Entry) -> ir.Model:
    """The IR after passes of a recipe, and those that every program with a host's stage is lowered by."""
    model = imported(checkpoint, *quantization, prepared=PREPARED)
    PassManager([make_pass(name) for name in NATIVE.lowering]).run(model)
    return model


def recipe_of(
    place: int | Rules,
    activations: Activations,
    rows: Sequence[int],
    block_tokens: int,
    stream_experts: int | str = "auto",
    **gpu: object,
) -> Recipe:
    """A recipe with buckets of these rows, the last one ragged; a number is that of the GPU's layers."""
    return Recipe.model_validate(
        {
            "name": "divided",
            "target": TARGET.name,
            "devices": ({"cuda": 1 << 40}, {"cpu": 1 << 40}),
            "place": {"gpu_layers": place} if isinstance(place, int) else place,
            "stream_experts": stream_experts,
            "gpu": {"activations": activations, "decode_rows": rows[:-1], "prefill_rows": rows[-1:], **gpu},
            "engine": {"max_batch_tokens": rows[-1], "block_tokens": block_tokens},
        }
    )


def divided_artifact(model: ir.Model, folder: Path, recipe: Recipe) -> Artifact:
    """Write and seal the model in the stages of the recipe."""
    model = model.clone()
    divided = divide(model, recipe, TARGET)
    launches = lower_to_launches(
        divided.on_gpu,
        recipe_buckets(model, recipe),
        activation_type(model, recipe),
        WideTiles(),
        batch_invariant=recipe.gpu.batch_invariant,
        streamed=divided.streamed,
    )
    with ArtifactWriter(folder) as writer:
        write_stage(divided.lowered, divided.host.program, divided.plan, writer.path)
        write_program(launches, MODEL.of(model), writer.path, described, DEVICE_WEIGHTS_FILE)
        return _sealed(writer, model, divided.cut.whole.kv, TARGET.name, recipe)


def host_artifact(model: ir.Model, folder: Path, recipe: Recipe) -> Artifact:
    """Write and seal the model for the CPU alone, with keys and values of the divided model's type."""
    model = model.clone()
    KV.record(model, shared_geometry(model, recipe))
    lowered = lower_to_operations(model)
    with ArtifactWriter(folder) as writer:
        write_lowered(lowered, writer.path)
        return _sealed(writer, model, lowered.program.kv, NATIVE.name, recipe)


def _sealed(writer: ArtifactWriter, model: ir.Model, kv: KVGeometry, target: str, recipe: Recipe) -> Artifact:
    on_host = target == NATIVE.name
    writer.describe(
        name="divided",
        model=MODEL.of(model),
        kv=kv,
        target=target,
        engine="native" if on_host else "cuda",
        program=Program(launches=OPERATIONS_FILE if on_host else LAUNCHES_FILE),
        versions={},
        max_batch_tokens=recipe.engine.max_batch_tokens,
    )
    return open_artifact(writer.seal())
