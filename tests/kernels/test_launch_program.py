"""A model through its launch program, in the interpreter, against the calibration engine's plain onnxruntime."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from numpy.typing import NDArray

from ingot.artifact import KVGeometry, ModelFacts
from ingot.artifact.launch_program import Launch, LaunchProgram, Step
from ingot.errors import PassError
from ingot.passes.calibration import CalibrationFacts
from ingot.passes.manager import PassManager
from ingot.passes.registry import make_pass
from ingot.pipeline.calibrate import CalibrationData, CalibrationEngine
from ingot.pipeline.checkpoint import Checkpoint
from ingot.pipeline.cuda.arena import least_bytes, lifetimes
from ingot.pipeline.cuda.lowering import lower_to_launches
from ingot.pipeline.cuda.program_builder import TILE_QUERIES, Bucket
from ingot.pipeline.importer import import_checkpoint
from tests.data_paths import ROOT
from tests.kernels.interpreted import InterpretedModel

LLAMA = ROOT / "tests" / "fixtures" / "checkpoints" / "llama"
CONTEXT = 32
ROWS = 16  # of the ragged bucket
PREPARED = ("fold-constants", "pack-projections", "clean-up")
FUSED = ("fuse-residual-norm", "fuse-rotary-attention", "clean-up")


def imported(checkpoint: Path, *quantization: tuple[str, dict[str, object]]) -> ir.Model:
    model = import_checkpoint(Checkpoint.open(checkpoint))
    PassManager([*map(make_pass, PREPARED), *(make_pass(*entry) for entry in quantization)]).run(model)
    return model


def fused(model: ir.Model) -> ir.Model:
    PassManager([make_pass(name) for name in FUSED]).run(model)
    return model


def vocabulary(model: ir.Model) -> int:
    return ModelFacts.model_validate_json(model.metadata_props["ingot.model"]).vocab_size


def exact_logits(model: ir.Model, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """[tokens, vocabulary] of one sequence, in float32 by onnxruntime."""
    facts = CalibrationFacts("ids", "", ids.size, 1, ids.size, 0)
    return np.concatenate(list(CalibrationEngine(CalibrationData(facts, ids[None])).logits(model)))


class Sequences:
    """Token ids of some sequences, each with blocks of its own, fed step by step."""

    def __init__(self, ids: list[NDArray[np.int64]], block_tokens: int) -> None:
        self.ids, self.block_tokens = ids, block_tokens
        self.per_sequence = -(-CONTEXT // block_tokens)
        order = np.random.default_rng(0).permutation(len(ids) * self.per_sequence)
        self.tables = order.reshape(len(ids), -1).astype(np.int32)
        self.done = [0] * len(ids)

    def step(self, rows: int, counts: list[int]) -> dict[str, NDArray[np.int64]]:
        """The inputs of a step that takes so many tokens of each sequence, padded to the bucket."""
        filled: dict[str, list[int]] = {name: [] for name in ("input_ids", "position_ids", "slots")}
        tiles = []
        for sequence, count in enumerate(counts):
            for position in range(self.done[sequence], self.done[sequence] + count):
                filled["input_ids"].append(int(self.ids[sequence][position]))
                filled["position_ids"].append(position)
                block = self.tables[sequence, position // self.block_tokens]
                filled["slots"].append(int(block) * self.block_tokens + position % self.block_tokens)
            tiles += [(sequence, start) for start in range(0, count, TILE_QUERIES)]
            self.done[sequence] += count
        starts = np.cumsum([0, *counts])
        pad = rows - len(filled["slots"])
        inputs = {name: np.array(values + [-1 if name == "slots" else 0] * pad) for name, values in filled.items()}
        inputs["carried"] = np.full(rows, -1)
        inputs["logits_indices"] = np.array([*range(rows - pad), *[-1] * pad])
        inputs["tables"] = np.pad(self.tables, ((0, rows - len(counts)), (0, 0)))
        inputs["lengths"] = np.array(self.done + [0] * (rows - len(counts)))
        inputs["query_starts"] = np.pad(starts, (0, rows - len(counts)), mode="edge")
        tiles += [(-1, 0)] * (rows // TILE_QUERIES + rows - len(tiles))
        inputs["tile_sequences"], inputs["tile_starts"] = (np.array(column) for column in zip(*tiles, strict=True))
        return inputs


def logits_by_program(
    model: ir.Model,
    ids: list[NDArray[np.int64]],
    kv: str = "float32",
    runner_class: type[InterpretedModel] = InterpretedModel,
) -> list[NDArray[np.float32]]:
    """Prompts through the ragged bucket but for the last two tokens of each, those through the decode bucket."""
    geometry = KVGeometry.model_validate_json(model.metadata_props["ingot.kv"])
    model.metadata_props["ingot.kv"] = geometry.model_copy(update={"dtype": kv}).model_dump_json()
    buckets = (Bucket.ragged(ROWS, CONTEXT, ROWS), Bucket.decode(4, CONTEXT))
    lowered = lower_to_launches(model, buckets, "fp32")
    runner = runner_class(lowered, blocks=len(ids) * (CONTEXT // lowered.shared.kv.block_tokens))
    sequences = Sequences(ids, lowered.shared.kv.block_tokens)
    size = vocabulary(model)
    found: list[list[NDArray[np.float32]]] = [[] for _ in ids]
    counts = [len(sequence) - 2 for sequence in ids]
    for program, taken in [
        (runner.programs["ragged", ROWS], counts),
        *[(runner.programs["decode", 4], [1] * len(ids))] * 2,
    ]:
        rows = runner.run(program, sequences.step(program.rows, taken), size)
        start = 0
        for sequence, count in enumerate(taken):
            found[sequence].append(rows[start : start + count])
            start += count
    return [np.concatenate(parts) for parts in found]


QUANTIZED: dict[str, object] = {"bits": 4, "block_size": 32, "lm_head": 8, "embedding": 8}
FORMS: dict[str, list[tuple[str, dict[str, object]]]] = {
    "float": [],
    "4 bits": [("quantize-weights", QUANTIZED)],
    "4 bits symmetric per channel": [
        ("quantize-weights", {**QUANTIZED, "block_size": "channel", "symmetric": True, "lm_head": "none"})
    ],
}


@pytest.mark.parametrize("form", FORMS)
def test_logits_of_ragged_and_decode_steps_equal_onnxruntimes(form: str) -> None:
    ids = [np.random.default_rng(seed).integers(0, 60, length) for seed, length in ((0, 12), (1, 5), (2, 3))]
    model = imported(LLAMA, *FORMS[form])
    wanted = [exact_logits(model, sequence) for sequence in ids]
    found = logits_by_program(fused(model), ids)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5 * np.abs(other).max())


class RoundedPool(InterpretedModel):
    """A pool of floats whose every vector is rounded, after each write, to what another precision would hold."""

    precision = "int8"

    def _launch(self, program: LaunchProgram, launch: Step, external: Mapping[str, torch.Tensor]) -> None:
        super()._launch(program, launch, external)
        if isinstance(launch, Launch) and launch.kernel.startswith("rotary_kv_write"):
            vectors = self._pool.reshape(-1, self.kv.head_dim)
            largest = vectors.abs().max(dim=1, keepdim=True).values
            limit = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}[self.precision]
            scale = (largest / limit).to(torch.float16).to(torch.float32)
            scale[scale == 0] = 1.0
            codes = (vectors / scale).clamp(-limit, limit)
            rounded = codes.to(torch.float8_e4m3fn) if self.precision == "fp8" else codes.round()
            vectors.copy_(rounded.to(torch.float32) * scale)


@pytest.mark.parametrize("precision", ["fp8", "int8", "int4"])
def test_a_quantized_pool_gives_the_bits_of_one_with_rounded_vectors(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [np.random.default_rng(3).integers(0, 60, 9)]
    model = fused(imported(LLAMA))
    found = logits_by_program(model, ids, precision)[0]
    monkeypatch.setattr(RoundedPool, "precision", precision)
    wanted = logits_by_program(model, ids, runner_class=RoundedPool)[0]
    np.testing.assert_array_equal(found, wanted)


def test_a_program_is_data_and_its_arena_is_close_to_the_bound() -> None:
    lowered = lower_to_launches(fused(imported(LLAMA)), (Bucket.decode(8, CONTEXT),))
    (program,) = lowered.programs
    assert LaunchProgram.model_validate_json(program.model_dump_json()) == program
    sizes = {name: place.bytes for name, place in program.places.items()}
    least = least_bytes(
        lifetimes([launch.buffers for launch in program.launches], sizes)
    )  # but for what the head keeps
    assert least <= program.arena_bytes <= 1.25 * least


def test_an_operator_without_a_kernel_is_refused_by_name() -> None:
    model = imported(ROOT / "tests" / "fixtures" / "checkpoints" / "granite")
    with pytest.raises(PassError, match=r"\(Mul\) has no CUDA kernel; there are kernels for Add, Gather, Gemm"):
        lower_to_launches(fused(model), (Bucket.decode(4, CONTEXT),))
