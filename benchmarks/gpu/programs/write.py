"""Make launch programs of large models without their weights, on a machine without a GPU, and all else that travels.

    python -m benchmarks.gpu.programs            # -> benchmarks/gpu-programs/*.zip, and gpu-contact/ to be copied

A program's file holds launches, cubins, the manifest, and the names, types and shapes of the weights. packing.py
makes an artifact of it again, device.py fills its weights with random numbers on the GPU. The folder also gets small
models with weights, the demo model among them, the kernels of the tests' cases, safer variants of the programs' kernels
(ladder.py), candidates for tuning if they are asked for, and packages that the GPU's machine may lack (wheels.py).
contact.py copies all of it, and the sources, into the folder that travels.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import numpy as np
from safetensors.numpy import save

from benchmarks.gpu.parts import WHEELS
from benchmarks.gpu.programs import contact as contact_folder
from benchmarks.gpu.programs import wheels
from benchmarks.gpu.programs.models import SPECS, ProgramSpec, passes_of, recipe_of, write_hollow_checkpoint
from benchmarks.gpu.programs.packing import (
    LADDER_FILE,
    TUNE_FILE,
    UNKNOWN_DIGEST,
    WEIGHTS_TABLE,
    pack,
    pack_kernels,
    remove_unused,
)
from benchmarks.paths import GPU_CONTACT, GPU_PROGRAMS
from ingot.artifact import Manifest, ModelFacts, Program
from ingot.artifact.manifest import FileEntry
from ingot.artifact.programs.launch_program import (
    LAUNCHES_FILE,
    STORED_TYPES,
    CubinFacts,
    CudaProgram,
    Kernel,
    cubins_file,
)
from ingot.passes.manager import PassManager
from ingot.passes.model_facts import MODEL
from ingot.passes.registry import make_pass
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.model.importer import import_checkpoint
from ingot.pipeline.recipe.schema import Recipe
from ingot.pipeline.targets.cuda.cubins import Cubin, compile_kernels
from ingot.pipeline.targets.cuda.lowering import LoweredLaunches
from ingot.pipeline.targets.cuda.program_builder import Weight
from ingot.pipeline.targets.cuda.writer import lower_by_recipe, recipe_tiles
from ingot.pipeline.targets.table import get_target

_TARGET = get_target("cuda-sm90")
_ALL = ("wheels", "programs", "ladder", "demo", "check", "kernels")
_FAMILIES = 4  # weights of each model whose candidate tiles `--what tune` compiles: those that cost most


@dataclass(frozen=True)
class Prepared:
    """A lowered model, and the table of its weights."""

    spec: ProgramSpec
    recipe: Recipe
    model: ModelFacts
    lowered: LoweredLaunches
    weights: Mapping[str, dict[str, Any]]
    tuned_on: str | None

    def launches(self, cubins: Mapping[str, CubinFacts]) -> CudaProgram:
        """Content of the launches file."""
        return self.lowered.cuda_program(self.model, _TARGET.sms, {_TARGET.sms[0]: cubins}, self.tuned_on)


def prepare(spec: ProgramSpec, folder: Path, tiles: Path | None = None, target: str = _TARGET.name) -> Prepared:
    """Import, transform and lower a model of which only the shapes exist; `folder` is for its checkpoint."""
    checkpoint = write_hollow_checkpoint(spec.shape, spec.context_tokens, folder)
    recipe, facts_of_target = recipe_of(spec, checkpoint, tiles), get_target(target)
    model = import_checkpoint(Checkpoint.open(checkpoint), check_weights=False)
    PassManager([*passes_of(spec, recipe), *map(make_pass, facts_of_target.lowering)]).run(model)
    table = recipe_tiles(recipe, facts_of_target.sms)
    lowered = lower_by_recipe(model, recipe, table)
    facts = MODEL.of(model)
    return Prepared(spec, recipe, facts, lowered, weight_table(lowered.shared.weights), table.device)


def weight_table(weights: Mapping[str, Weight]) -> dict[str, dict[str, Any]]:
    """Type and shape of each weight. Those of the first layer are made once; all layers have the same."""
    shapes: dict[str, list[int]] = {}
    table = {}
    for name, weight in weights.items():
        key = re.sub(r"\.\d+\.", ".*.", name)
        if key not in shapes:
            shapes[key] = list(weight.make().shape)
        table[name] = {"dtype": STORED_TYPES[weight.type], "shape": shapes[key]}
    return table


def write_zip(prepared: Prepared, cubins: Mapping[str, Cubin], file: Path) -> None:
    """Pack everything but the weights."""
    program = prepared.launches({key: cubin.facts for key, cubin in cubins.items()})
    content = {
        LAUNCHES_FILE: json.dumps(program.model_dump(mode="json"), separators=(",", ":")).encode(),
        cubins_file(_TARGET.sms[0]): save({key: np.frombuffer(one.code, np.uint8) for key, one in cubins.items()}),
    }
    sizes = {name: len(data) for name, data in content.items()}
    content["manifest.json"] = _manifest(prepared, program, sizes).model_dump_json().encode()
    content[WEIGHTS_TABLE] = json.dumps(prepared.weights).encode()
    pack(content, file)


def _manifest(prepared: Prepared, program: CudaProgram, sizes: Mapping[str, int]) -> Manifest:
    return Manifest(
        name=prepared.spec.name,
        identity=UNKNOWN_DIGEST,
        model=prepared.model,
        kv=program.kv,
        target=_TARGET.name,
        engine=_TARGET.engine,
        max_batch_tokens=prepared.recipe.engine.max_batch_tokens,
        program=Program(launches=LAUNCHES_FILE),
        files={name: FileEntry(bytes=size, sha256=UNKNOWN_DIGEST) for name, size in sizes.items()},
        versions={},
    )


def described(kernels: Mapping[str, Kernel]) -> dict[str, Cubin]:
    """Each kernel's description in place of its cubin, for a device that interprets kernels."""
    return {
        key: Cubin(kernel.model_dump_json().encode(), CubinFacts(symbol=kernel.name, shared_bytes=0))
        for key, kernel in kernels.items()
    }


def write_programs(folder: Path, only: str = "", tiles: Path | None = None) -> None:
    """Prepare, compile and pack every model of the table whose name contains `only`."""
    for spec in (spec for spec in SPECS if only in spec.name):
        with TemporaryDirectory() as scratch:
            prepared = prepare(spec, Path(scratch), tiles)
            file = folder / f"{spec.name}.zip"
            write_zip(prepared, compile_kernels(prepared.lowered.shared.kernels, _TARGET.sms[0]), file)
        click.echo(f"{file}: {file.stat().st_size / 1e6:.1f} MB, {len(prepared.lowered.shared.kernels)} kernels")


@click.command(help=__doc__)
@click.option("--what", "chosen", multiple=True, type=click.Choice((*_ALL, "tune")), default=_ALL, show_default=True)
@click.option("--only", default="", help="Programs whose names hold this.")
@click.option("--tiles", type=click.Path(path_type=Path, exists=True), help="Table that `ingot tune` made.")
@click.option(
    "--installed",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Packages of the GPU's machine, one a line, as `pip list` prints them; default: those of usual machines.",
)
@click.option("--output", type=click.Path(path_type=Path), default=GPU_PROGRAMS, show_default=True)
@click.option(
    "--contact",
    type=click.Path(path_type=Path),
    default=GPU_CONTACT,
    show_default=True,
    help="Folder to copy to the GPU's machine.",
)
def main(
    chosen: tuple[str, ...], only: str, tiles: Path | None, installed: Path | None, output: Path, contact: Path
) -> None:
    """Pack everything that the benchmark needs on a GPU."""
    os.environ["TRITON_INTERPRET"] = "1"  # launches of cases are caught in the interpreter; cubins.py compiles anyway
    output.mkdir(parents=True, exist_ok=True)
    if "wheels" in chosen:
        _write_wheels(output / WHEELS, installed)
    if "programs" in chosen:
        write_programs(output, only, tiles)
    if "ladder" in chosen:
        ladder = import_module("benchmarks.gpu.proofs.ladder")
        kernels = ladder.rung_kernels(output)
        pack_kernels(kernels, compile_kernels(kernels, _TARGET.sms[0]), output / LADDER_FILE)
    if "tune" in chosen:
        tune = import_module("benchmarks.gpu.times.tune")
        kernels = tune.candidate_kernels(output, _TARGET.sms[0], _FAMILIES)
        pack_kernels(kernels, compile_kernels(kernels, _TARGET.sms[0]), output / TUNE_FILE)
    if "demo" in chosen:
        import_module("benchmarks.gpu.programs.cases").write_demo(output)
    if "check" in chosen:
        import_module("benchmarks.gpu.programs.cases").write_cases(output)
    if "kernels" in chosen:
        cases = import_module("benchmarks.gpu.proofs.kernel_cases")
        cases.write_kernel_cases(output / cases.FILE, _TARGET.sms[0])
    remove_unused(output)
    contact_folder.write_contact(output, contact)


def _write_wheels(folder: Path, installed: Path | None) -> None:
    """Pack and check the wheels that the GPU's machine lacks."""
    there = wheels.names_in((installed or wheels.USUAL).read_text("utf-8"))
    packed = wheels.fetch_wheels(wheels.to_carry(wheels.imported_distributions(), there), folder)
    wheels.check_wheels(packed, there)
    with TemporaryDirectory() as sources:
        contact_folder.copy_sources(Path(sources))
        wheels.check_imports(packed, there, Path(sources))
    size = sum(wheel.file.stat().st_size for wheel in packed)
    click.echo(f"{folder}: {size / 1e6:.1f} MB, {', '.join(wheel.name for wheel in packed) or 'none needed'}")


if __name__ == "__main__":
    main()
