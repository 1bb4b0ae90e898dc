"""Logits of models by their launch programs on the interpreted device, and by plain onnxruntime."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.artifact.kv_geometry import KVType
from ingot.artifact.programs.launch_program import ActivationType
from ingot.passes.calibration import CalibrationFacts
from ingot.passes.manager import PassManager
from ingot.passes.model_facts import KV, MODEL
from ingot.passes.registry import make_pass
from ingot.pipeline.calibrate import CalibrationData, CalibrationEngine
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.model.importer import import_checkpoint
from ingot.pipeline.targets.cuda.program_builder import Bucket
from ingot.pipeline.targets.cuda.tiles import MatmulShape, Tile, TileTable
from ingot.pipeline.targets.table import get_target
from ingot.runtime.cuda.executor import CudaExecutor
from ingot.runtime.options import EngineOptions
from ingot.sizes import ceil_div
from tests.data_paths import FIXTURES
from tests.runtime.cuda.artifacts import write_artifact
from tests.runtime.cuda.batches import Growing
from tests.simulators.interpreted_device import InterpretedDevice

CHECKPOINTS = FIXTURES / "checkpoints"
CONTEXT = 32
ROWS = 12  # of the ragged bucket
SEQUENCES = 3
PREPARED = ("fold-constants", "pack-projections", "clean-up")
FUSED = get_target("cuda-sm80").lowering

IntArray = NDArray[np.int64]


Entry = tuple[str, dict[str, object]]
FLOATS: dict[str, object] = {"lm_head": "none", "embedding": "none"}  # of a pass: what stays in floats
INT4: Entry = ("quantize-weights", {"block_size": 32, **FLOATS})
INT8: Entry = ("quantize-weights", {"bits": 8, "block_size": "channel", "symmetric": True, **FLOATS})


class AlwaysWide(TileTable):
    """Wide tiles wherever their kernel fits, also for weights that are too small for them to pay."""

    def choose(self, shape: MatmulShape) -> Tile:
        return Tile.of_wide(16) if shape.fits_wide else super().choose(shape)

    def choose_invariant(self, shape: MatmulShape) -> Tile:
        return self.choose(shape) if shape.fits_wide else super().choose_invariant(shape)


def imported(checkpoint: Path, *quantization: Entry, prepared: Sequence[str] = PREPARED) -> ir.Model:
    """Import a checkpoint's IR and run passes that prepare and quantize it."""
    model = import_checkpoint(Checkpoint.open(checkpoint))
    PassManager([*map(make_pass, prepared), *(make_pass(*entry) for entry in quantization)]).run(model)
    return model


def fused(model: ir.Model, passes: Sequence[str] = FUSED) -> ir.Model:
    """Run the target's passes."""
    PassManager([make_pass(name) for name in passes]).run(model)
    return model


def set_block_size(model: ir.Model, node: str, size: int) -> None:
    """Let the quantized weight of a Gemm have blocks of another size than it was packed in."""
    gemm = next(each for each in model.graph if each.name == node)
    dequantize = gemm.inputs[1].producer() if gemm.inputs[1] is not None else None
    assert dequantize is not None
    dequantize.attributes["block_size"] = ir.AttrInt64("block_size", size)


def exact_logits(model: ir.Model, ids: IntArray) -> NDArray[np.float32]:
    """Logits [tokens, vocabulary] of one sequence, in float32 by onnxruntime."""
    facts = CalibrationFacts("ids", "", ids.size, 1, ids.size, 0)
    return np.concatenate(list(CalibrationEngine(CalibrationData(facts, ids[None])).logits(model)))


def prompts(*lengths: int) -> list[IntArray]:
    """Random token ids of the given lengths, the same each time."""
    return [np.random.default_rng(seed).integers(0, 60, length) for seed, length in enumerate(lengths)]


def error_of_program(
    checkpoint: Path, *quantization: Entry, activations: ActivationType = "fp32", kv: KVType = "float32"
) -> float:
    """The largest difference between a program's logits and onnxruntime's in float32, over the largest logit."""
    ids = prompts(10, 3)
    model = imported(checkpoint, *quantization)
    wanted = [exact_logits(model, sequence)[-2:] for sequence in ids]
    found = logits_by_program(fused(model), ids, kv, activations=activations)
    return max(float(np.abs(one - exact).max() / np.abs(exact).max()) for one, exact in zip(found, wanted, strict=True))


def logits_by_program(
    model: ir.Model,
    ids: list[IntArray],
    kv: KVType = "float32",
    device: InterpretedDevice | None = None,
    tiles: TileTable | None = None,
    activations: ActivationType = "fp32",
) -> list[NDArray[np.float32]]:
    """Logits of the last two tokens of each prompt: one ragged step of all tokens but the last, then a decode step."""
    device = device or InterpretedDevice()
    geometry, context = KV.of(model), MODEL.of(model).context_tokens
    KV.record(model, geometry.model_copy(update={"dtype": kv}))
    buckets = (Bucket.ragged(ROWS, context, SEQUENCES), Bucket.decode(SEQUENCES, context))
    blocks = ceil_div(max(map(len, ids)), geometry.block_tokens)  # of a sequence
    tables = np.random.default_rng(0).permutation(len(ids) * blocks).reshape(len(ids), -1)
    sequences = Growing(ids, tables.tolist())
    with TemporaryDirectory() as folder:
        artifact = write_artifact(model, Path(folder) / "artifact", buckets, activations, tiles=tiles)
        options = EngineOptions(kv_blocks=len(ids) * blocks)
        executor = CudaExecutor(artifact, device, options, open_matmuls=device.open_matmuls)
        steps = ([len(sequence) - 1 for sequence in ids], [1] * len(ids))
        found = [executor.forward(sequences.step(counts, "last")).copy() for counts in steps]
        executor.close()
    return [np.stack([rows[sequence] for rows in found]) for sequence in range(len(ids))]
