"""Models through their launch programs in the interpreter, and what plain onnxruntime says of them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.passes.calibration import CalibrationFacts
from ingot.passes.manager import PassManager
from ingot.passes.model_facts import KV, MODEL
from ingot.passes.registry import make_pass
from ingot.pipeline.calibrate import CalibrationData, CalibrationEngine
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.model.importer import import_checkpoint
from ingot.pipeline.targets.cuda.lowering import lower_to_launches
from ingot.pipeline.targets.cuda.program_builder import TILE_QUERIES, Bucket
from ingot.pipeline.targets.cuda.tiles import TileTable
from tests.data_paths import FIXTURES
from tests.simulators.interpreted_kernels import InterpretedModel

CHECKPOINTS = FIXTURES / "checkpoints"
CONTEXT = 32
ROWS = 12  # of the ragged bucket
SEQUENCES = 3
PREPARED = ("fold-constants", "pack-projections", "clean-up")
FUSED = ("fuse-residual-norm", "fuse-rotary-attention", "clean-up")

IntArray = NDArray[np.int64]


Entry = tuple[str, dict[str, object]]


def imported(checkpoint: Path, *quantization: Entry, prepared: Sequence[str] = PREPARED) -> ir.Model:
    """A checkpoint's IR, and what quantizes it."""
    model = import_checkpoint(Checkpoint.open(checkpoint))
    PassManager([*map(make_pass, prepared), *(make_pass(*entry) for entry in quantization)]).run(model)
    return model


def fused(model: ir.Model, passes: Sequence[str] = FUSED) -> ir.Model:
    """The IR as the target's passes leave it."""
    PassManager([make_pass(name) for name in passes]).run(model)
    return model


def exact_logits(model: ir.Model, ids: IntArray) -> NDArray[np.float32]:
    """[tokens, vocabulary] of one sequence, in float32 by onnxruntime."""
    facts = CalibrationFacts("ids", "", ids.size, 1, ids.size, 0)
    return np.concatenate(list(CalibrationEngine(CalibrationData(facts, ids[None])).logits(model)))


def prompts(*lengths: int) -> list[IntArray]:
    """Token ids by length, the same each time."""
    return [np.random.default_rng(seed).integers(0, 60, length) for seed, length in enumerate(lengths)]


class Sequences:
    """Token ids of some sequences, each with blocks of its own, fed step by step."""

    def __init__(self, ids: list[IntArray], block_tokens: int) -> None:
        self.ids, self.block_tokens = ids, block_tokens
        self.per_sequence = -(-CONTEXT // block_tokens)
        order = np.random.default_rng(0).permutation(len(ids) * self.per_sequence)
        self.tables = order.reshape(len(ids), -1).astype(np.int32)
        self.done = [0] * len(ids)

    def step(self, bucket: Bucket, counts: list[int]) -> dict[str, IntArray]:
        """The inputs of a step that takes so many tokens of each sequence, padded to the bucket."""
        filled: dict[str, list[int]] = {name: [] for name in ("input_ids", "position_ids", "slots")}
        tiles, last = [], []
        for sequence, count in enumerate(counts):
            for position in range(self.done[sequence], self.done[sequence] + count):
                filled["input_ids"].append(int(self.ids[sequence][position]))
                filled["position_ids"].append(position)
                block = self.tables[sequence, position // self.block_tokens]
                filled["slots"].append(int(block) * self.block_tokens + position % self.block_tokens)
            tiles += [(sequence, start) for start in range(0, count, TILE_QUERIES)]
            self.done[sequence] += count
            last.append(len(filled["slots"]) - 1)
        pad, missing = bucket.rows - len(filled["slots"]), bucket.sequences - len(counts)
        inputs = {name: np.array(values + [-1 if name == "slots" else 0] * pad) for name, values in filled.items()}
        inputs["carried"] = np.full(bucket.rows, -1)
        inputs["logits_indices"] = np.array(last + [-1] * missing)
        inputs["tables"] = np.pad(self.tables, ((0, missing), (0, 0)))
        inputs["lengths"] = np.array(self.done + [0] * missing)
        inputs["query_starts"] = np.pad(np.cumsum([0, *counts]), (0, missing), mode="edge")
        tiles += [(-1, 0)] * (bucket.tiles - len(tiles))
        columns = zip(*tiles, strict=True) if tiles else ([], [])
        inputs["tile_sequences"], inputs["tile_starts"] = (np.array(column, np.int64) for column in columns)
        return inputs


def logits_by_program(
    model: ir.Model,
    ids: list[IntArray],
    kv: str = "float32",
    runner_class: type[InterpretedModel] = InterpretedModel,
    tiles: TileTable | None = None,
) -> list[NDArray[np.float32]]:
    """Logits of the last two tokens of each prompt: all before through the ragged bucket, one through the decode's."""
    facts = MODEL.of(model)
    geometry = KV.of(model)
    KV.record(model, geometry.model_copy(update={"dtype": kv}))
    buckets = (Bucket.ragged(ROWS, CONTEXT, SEQUENCES), Bucket.decode(SEQUENCES, CONTEXT))
    lowered = lower_to_launches(model, buckets, "fp32", tiles)
    runner = runner_class(lowered, blocks=len(ids) * -(-CONTEXT // lowered.shared.kv.block_tokens))
    sequences = Sequences(ids, lowered.shared.kv.block_tokens)
    steps = [(buckets[0], [len(sequence) - 1 for sequence in ids]), (buckets[1], [1] * len(ids))]
    found = [
        runner.run(runner.programs[bucket.attention, bucket.rows], sequences.step(bucket, counts), facts.vocab_size)
        for bucket, counts in steps
    ]
    return [np.stack([rows[sequence] for rows in found]) for sequence in range(len(ids))]
