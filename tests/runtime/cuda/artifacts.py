"""Artifacts of launch programs for the interpreted device: a compiled kernel is its own description."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
from safetensors.numpy import save_file

from ingot.artifact import Artifact, ArtifactWriter, EngineKind, ModelFacts, Program, open_artifact
from ingot.artifact.kv_geometry import KVType
from ingot.artifact.programs.launch_program import (
    LAUNCHES_FILE,
    WEIGHTS_FILE,
    ActivationType,
    CubinFacts,
    Kernel,
    cubins_file,
)
from ingot.passes.manager import PassManager
from ingot.passes.model_facts import KV, MODEL
from ingot.passes.registry import make_pass
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.model.importer import import_checkpoint
from ingot.pipeline.targets.cuda.lowering import LoweredLaunches, lower_to_launches
from ingot.pipeline.targets.cuda.program_builder import Bucket
from ingot.pipeline.targets.cuda.tiles import MatmulShape, Tile, TileTable
from ingot.pipeline.targets.cuda.writer import write_launch_weights, write_lowered
from tests.data_paths import ROOT

LLAMA = ROOT / "tests" / "fixtures" / "checkpoints" / "llama"
CONTEXT = 64  # of the fixture
SM = 90  # of the interpreted device
PASSES = (
    "fold-constants",
    "pack-projections",
    "clean-up",
    "fuse-residual-norm",
    "fuse-rotary-attention",
    "clean-up",
)


class LibraryTiles(TileTable):
    """Chooses cuBLASLt for every matmul that it supports."""

    def choose(self, shape: MatmulShape) -> Tile:
        is_plain = shape.kernel == "matmul" and shape.bits == 16
        return super().choose(shape).model_copy(update={"library": "cublaslt" if is_plain else None})


def buckets(decode: Sequence[int] = (1, 4), ragged: int = 16, sequences: int = 4) -> tuple[Bucket, ...]:
    return (*(Bucket.decode(rows, CONTEXT) for rows in decode), Bucket.ragged(ragged, CONTEXT, sequences))


def model_of(checkpoint: Path = LLAMA, kv: KVType | None = None, block_tokens: int | None = None) -> ir.Model:
    model = import_checkpoint(Checkpoint.open(checkpoint))
    PassManager([make_pass(name) for name in PASSES]).run(model)
    changed = {"dtype": kv, "block_tokens": block_tokens}
    geometry = KV.of(model)
    geometry = geometry.model_copy(update={key: value for key, value in changed.items() if value is not None})
    KV.record(model, geometry)
    return model


def described(kernel: Kernel) -> bytes:
    """The compiled kernel of the interpreted device: its description."""
    return kernel.model_dump_json().encode()


def write_artifact(
    model: ir.Model,
    folder: Path,
    given: Sequence[Bucket],
    activation_type: ActivationType = "fp32",
    compiled: Callable[[Kernel], bytes] = described,
    tiles: TileTable | None = None,
    *,
    batch_invariant: bool = False,
    adapters: bool = False,
) -> Artifact:
    lowered = lower_to_launches(
        model, given, activation_type, tiles, batch_invariant=batch_invariant, adapters=adapters
    )
    with ArtifactWriter(folder) as writer:
        (writer.path / "program").mkdir()
        return seal_program(writer, lowered, MODEL.of(model), "cuda-sm90", "cuda", compiled)


def seal_compiled(folder: Path, lowered: LoweredLaunches, model: ir.Model, sm: int) -> Artifact:
    """Compile the kernels of a launch program for a GPU, and seal it."""
    with ArtifactWriter(folder) as writer:
        write_lowered(lowered, model, writer.path, (sm,), TileTable(), None)
        writer.describe(
            name="tiny",
            model=MODEL.of(model),
            kv=lowered.shared.kv,
            target=f"cuda-sm{sm}",
            program=Program(launches=LAUNCHES_FILE),
            versions={},
            engine="cuda",
        )
        return open_artifact(writer.seal())


def seal_program(
    writer: ArtifactWriter,
    lowered: LoweredLaunches,
    facts: ModelFacts,
    target: str,
    engine: EngineKind,
    compiled: Callable[[Kernel], bytes] = described,
) -> Artifact:
    """Write a launch program to the staged artifact, and seal it."""
    write_program(lowered, facts, writer.path, compiled)
    program = Program(launches=LAUNCHES_FILE)
    kv = lowered.shared.kv
    writer.describe(name=engine, model=facts, kv=kv, target=target, program=program, versions={}, engine=engine)
    return open_artifact(writer.seal())


def write_program(
    lowered: LoweredLaunches,
    facts: ModelFacts,
    folder: Path,
    compiled: Callable[[Kernel], bytes],
    weights_file: str = WEIGHTS_FILE,
) -> None:
    kernels = lowered.shared.kernels
    cubins = {key: CubinFacts(symbol=kernel.name, shared_bytes=0) for key, kernel in kernels.items()}
    program = lowered.cuda_program(facts, (SM,), {SM: cubins})
    (folder / LAUNCHES_FILE).write_text(json.dumps(program.model_dump(mode="json")))
    codes = {key: np.frombuffer(compiled(kernel), np.uint8) for key, kernel in kernels.items()}
    save_file(codes, folder / cubins_file(SM))
    write_launch_weights(lowered.shared, folder, weights_file)
