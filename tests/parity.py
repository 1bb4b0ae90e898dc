"""How far ours are from transformers' logits on committed fixtures: the IR in plain onnxruntime, and the engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.artifact import Artifact
from ingot.passes.recurrent_ops import recurrent_nodes
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.model.importer import import_checkpoint
from ingot.runtime import Engine
from tests.data_paths import FIXTURES
from tests.oracle.cases import Case
from tests.reference_runner import ReferenceRunner
from tests.simulators.float64_ir import Float64Runner
from tests.tolerances import tolerance

CHECKPOINTS = FIXTURES / "checkpoints"
LOGITS = "logits.npz"
MTP_CHECKPOINTS, MTP_LOGITS = CHECKPOINTS.with_name("mtp"), "mtp.npz"
DIGESTS = "digests.json"
LOGIT_TOLERANCE = tolerance("parity.float32")  # where the largest logit is above LARGE_LOGIT the limit grows with it
LARGE_LOGIT = 4.0


@dataclass(frozen=True)
class Parity:
    """Largest absolute difference of the logits, the largest logit, and the limit for the difference."""

    worst: float
    largest: float

    @property
    def limit(self) -> float:
        """LOGIT_TOLERANCE, more where the largest logit is above LARGE_LOGIT."""
        return LOGIT_TOLERANCE * max(1.0, self.largest / LARGE_LOGIT)


def load_logits(file: Path) -> tuple[list[list[int]], list[NDArray[np.float32]]]:
    """Prompts and their reference logits, [length, vocab] each."""
    with np.load(file) as arrays:
        count = sum(name.startswith("tokens_") for name in arrays)
        tokens = [arrays[f"tokens_{index}"].tolist() for index in range(count)]
        return tokens, [arrays[f"logits_{index}"] for index in range(count)]


def measure(case: Case, folder: Path | None = None) -> Parity:
    """Run the case's prompts as one ragged batch and compare every row."""
    place = folder or CHECKPOINTS / case.name
    tokens, expected = load_logits(place / LOGITS)
    return compare(
        runner_of(import_checkpoint(Checkpoint.open(place), case.context_tokens)).run_ragged(tokens), expected
    )


def runner_of(model: ir.Model, seed: int = 0) -> ReferenceRunner | Float64Runner:
    """What runs the whole model: plain onnxruntime, or numpy where it has recurrent layers."""
    return Float64Runner(model) if recurrent_nodes(model.graph) else ReferenceRunner(model, seed=seed)


def settings_of(case: Case) -> list[str]:
    """What a recipe must set for the case, besides the checkpoint."""
    return [] if case.context_tokens is None else [f"context_tokens={case.context_tokens}"]


def engine_logits(artifact: Artifact, prompts: Sequence[list[int]], max_batch_tokens: int) -> list[NDArray[np.float32]]:
    """Logits [length, vocab] of each prompt from the engine: several prompts to a step, each in several chunks."""
    rows: list[list[NDArray[np.float32]]] = [[] for _ in prompts]
    with Engine.load(artifact, kv_blocks=32, max_batch_tokens=max_batch_tokens) as engine:
        for part in engine.iterate_prompt_logits(prompts):
            rows[part.prompt_index].append(part.logits.copy())
    return [np.concatenate(parts) for parts in rows]


def compare(measured: list[NDArray[np.float32]], expected: list[NDArray[np.float32]]) -> Parity:
    """Worst difference over all rows of all prompts."""
    worst = max(float(np.abs(ours - theirs).max()) for ours, theirs in zip(measured, expected, strict=True))
    return Parity(worst, max(float(np.abs(rows).max()) for rows in expected))
