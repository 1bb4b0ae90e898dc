"""The lowered IR -> the program in the artifact, by the writer in the target's row."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, cast

import onnx_ir as ir

from ingot.artifact import KVGeometry, Program
from ingot.errors import BuildError
from ingot.passes.model_facts import KV
from ingot.pipeline.recipe.schema import Recipe
from ingot.pipeline.targets.cpu.draft_head import HeadModel
from ingot.pipeline.targets.recurrent_layers import with_states
from ingot.pipeline.targets.segments.onnx_files import write_program
from ingot.pipeline.targets.segments.weight_operands import weight_bytes
from ingot.pipeline.targets.table import Target
from ingot.version import install_command


@dataclass(frozen=True)
class Written:
    """A program on disk.

    program         as the manifest shows it
    kv              geometry of the KV pool that it reads
    tools           packages that made it, in addition to compile.TOOLS
    weight_bytes    name of a weight's codes or floats -> bytes; empty where the writer does not count them
    """

    program: Program
    kv: KVGeometry
    tools: tuple[str, ...] = ()
    weight_bytes: Mapping[str, int] = field(default_factory=dict)


class ProgramWriter(Protocol):
    """Writes folder/program. Raises PassError for what the target cannot run, BuildError for what does not compile.

    A target that has heads takes one after the others.
    """

    def __call__(self, model: ir.Model, folder: Path, recipe: Recipe, target: Target, *heads: HeadModel) -> Written: ...


def require_packages(target: Target) -> None:
    """Raise BuildError with the extra to install if the writer lacks a package: now, not after hours of passes."""
    for alternatives in target.packages:
        if not any(find_spec(name) for name in alternatives):
            raise BuildError(
                f"target {target.name} is built with {' or '.join(alternatives)}, which is not installed: "
                f"{install_command(target.extra)}"
            )


def program_writer(target: Target) -> ProgramWriter:
    """The target's writer, imported on use: each needs packages that the others do not."""
    module, _, function = target.writer.partition(":")
    return cast(ProgramWriter, getattr(import_module(module), function))


def write_segments(model: ir.Model, folder: Path, recipe: Recipe, target: Target) -> Written:
    """Segments as ONNX files."""
    program, segments = write_program(model, folder)
    return Written(program, kv_geometry(model, recipe), weight_bytes=weight_bytes(segments))


def kv_geometry(model: ir.Model, recipe: Recipe) -> KVGeometry:
    """The model's geometry in blocks of the recipe's size, with the side state of its recurrent ops."""
    geometry = with_states(KV.of(model), model.graph)
    return geometry.model_copy(update={"block_tokens": recipe.engine.block_tokens})
