"""Programs of models of which only the shapes exist equal those of the models themselves."""

from pathlib import Path

import numpy as np
import pytest
from benchmarks.gpu.programs.models import DRY_SPECS, ProgramSpec, passes_of, recipe_of, shape_only
from benchmarks.gpu.programs.packing import unpack
from benchmarks.gpu.programs.write import described, prepare, write_zip
from benchmarks.synthetic import write_checkpoint

from ingot.artifact.programs.launch_checks import read_launches
from ingot.artifact.programs.launch_program import WEIGHTS_FILE
from ingot.artifact.safetensors import MappedTensors
from ingot.passes.manager import PassManager
from ingot.passes.model_facts import KV
from ingot.passes.registry import make_pass
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.model.importer import import_checkpoint
from ingot.pipeline.targets.cuda.lowering import LoweredLaunches, lower_to_launches
from ingot.pipeline.targets.cuda.writer import activation_type, recipe_buckets, recipe_tiles
from ingot.pipeline.targets.table import get_target
from ingot.pipeline.targets.writers import kv_geometry


def lowered_with_weights(spec: ProgramSpec, folder: Path) -> LoweredLaunches:
    """The same model by the real passes over real weights."""
    checkpoint = write_checkpoint(spec.shape, folder)
    recipe = recipe_of(spec, checkpoint, None)
    model = import_checkpoint(Checkpoint.open(checkpoint), spec.context_tokens)
    shapes = passes_of(spec, recipe)
    real = [*recipe.make_passes(), *shapes[len(recipe.passes) :]]
    PassManager([*real, *map(make_pass, get_target(recipe.target).lowering)]).run(model)
    KV.record(model, kv_geometry(model, recipe))
    buckets, compute = recipe_buckets(model, recipe), activation_type(model, recipe)
    tiles = recipe_tiles(recipe, get_target(recipe.target).sms)
    gpu = recipe.gpu
    return lower_to_launches(
        model, buckets, compute, tiles, batch_invariant=gpu.batch_invariant, dependent=gpu.dependent_launches
    )


@pytest.mark.parametrize("spec", DRY_SPECS, ids=lambda spec: spec.name)
def test_launches_and_weights_are_those_of_the_model_with_weights(spec: ProgramSpec, tmp_path: Path) -> None:
    prepared = prepare(spec, tmp_path / "hollow")
    wanted = lowered_with_weights(spec, tmp_path / "whole")
    assert prepared.lowered.programs == wanted.programs
    shapes = {name: (weight.type, list(weight.make().shape)) for name, weight in wanted.shared.weights.items()}
    words = {"fp32": "F32", "fp16": "F16", "u8": "U8", "i8": "I8"}
    assert prepared.weights == {name: {"dtype": words[kind], "shape": shape} for name, (kind, shape) in shapes.items()}


def test_an_unpacked_program_is_an_artifact_with_a_hole_for_weights(tmp_path: Path) -> None:
    prepared = prepare(DRY_SPECS[0], tmp_path / "hollow")
    write_zip(prepared, described(prepared.lowered.shared.kernels), tmp_path / "one.zip")
    artifact = unpack(tmp_path / "one.zip", tmp_path / "artifact")
    assert read_launches(artifact).programs == prepared.lowered.programs
    weights = MappedTensors(artifact.file(WEIGHTS_FILE))
    assert weights.tensors.keys() == prepared.weights.keys()
    sizes = {name: int(np.prod(entry["shape"])) for name, entry in prepared.weights.items()}
    assert all(stored.num_bytes % sizes[name] == 0 for name, stored in weights.tensors.items())


def test_only_the_quantization_of_weights_is_replaced_by_shapes() -> None:
    assert shape_only(make_pass("clean-up")) == make_pass("clean-up")
    replaced = shape_only(make_pass("quantize-weights", {"bits": 8, "block_size": 64}))
    assert (type(replaced).__name__, str(replaced)) == (
        "ShapeOnlyQuantization",
        str(make_pass("quantize-weights", {"bits": 8, "block_size": 64})),
    )
