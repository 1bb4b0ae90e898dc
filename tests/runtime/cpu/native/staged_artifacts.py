"""Artifacts of the native engine with stages added, and steps that compare them with those without."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ingot.artifact import Artifact, open_artifact
from ingot.artifact.programs.cpu_program import Operation
from ingot.artifact.programs.cpu_program_checks import read_operations
from ingot.artifact.programs.stages import STAGES_FILE
from ingot.pipeline.targets.cpu.place_stages import plan_stages
from ingot.runtime.cpu.native_executor import NativeExecutor
from ingot.runtime.forward_batch import FloatArray
from tests.artifact.tiny_artifact import reseal
from tests.runtime.cuda.batches import Growing, token_ids

NAMES = ("cpu:0", "cpu:1", "cpu:2")
LENGTHS = (40, 17, 9)
SCHEDULE = ([9, 0, 3], [13, 1, 0], [1, 1, 1], [0, 15, 5], [17, 0, 0])
"""Tokens of three sequences of these lengths in each step: chunks of prompts, decoding, and both."""


def with_stages(artifact: Artifact, folder: Path, devices: Sequence[int]) -> Artifact:
    """Copy an artifact and place its operations on devices, one number for each."""
    plan = plan_stages(read_operations(artifact), devices, NAMES)
    assert plan is not None
    return with_plan(artifact, folder, plan.model_dump(mode="json"))


def with_plan(artifact: Artifact, folder: Path, plan: object) -> Artifact:
    """Copy an artifact with this program/stages.json, sealed well."""
    copy = shutil.copytree(artifact.path, folder)
    (copy / STAGES_FILE).write_text(plan if isinstance(plan, str) else json.dumps(plan))

    def list_file(raw: dict[str, Any]) -> None:
        raw["files"][STAGES_FILE] = {"bytes": 0, "sha256": "0" * 64}

    reseal(copy, list_file)
    reseal(copy)
    return open_artifact(copy)


def ragged_logits(
    artifact: Artifact,
    *,
    isa: str | None = None,
    stages: int = 1,
    ranks: int = 1,
    whole_experts: bool = False,
    num_threads: int = 1,
) -> list[FloatArray]:
    """Logits of each step of SCHEDULE, of all tokens, of the last ones, or of none; the blocks are apart.

    stages, ranks, whole_experts   of the processes that compute them
    """
    vocabulary, size = artifact.manifest.model.vocab_size, artifact.manifest.kv.block_tokens
    blocks = -(-max(LENGTHS) // size)
    ids = [token_ids(length, seed, vocabulary) for seed, length in enumerate(LENGTHS)]
    tables = np.random.default_rng(0).permutation(blocks * len(ids)).reshape(len(ids), -1)
    executor = NativeExecutor(
        artifact,
        num_blocks=blocks * len(ids),
        num_states=len(ids) if artifact.manifest.kv.state_bytes else 0,
        num_threads=num_threads,
        isa=isa,
        stages=stages,
        ranks=ranks,
        whole_experts=whole_experts,
    )
    growing = Growing(ids, tables.tolist())
    wanted = ("last", "none", "all", "last", "all")
    found = [executor.forward(growing.step(counts, rows)).copy() for counts, rows in zip(SCHEDULE, wanted, strict=True)]
    executor.close()
    return found


def assert_same_bits(found: Sequence[FloatArray], expected: Sequence[FloatArray]) -> None:
    """Each step has the same bits, and the steps have logits at all."""
    assert [one.shape for one in found] == [one.shape for one in expected]
    assert [one.tobytes() for one in found] == [one.tobytes() for one in expected]
    assert sum(len(one) for one in found) > 0


def runs_of(operations: Sequence[Operation], rng: np.random.Generator, devices: int) -> list[int]:
    """A random device for each operation, with runs of random lengths."""
    found = list[int]()
    while len(found) < len(operations):
        found += [int(rng.integers(devices))] * int(rng.integers(1, 6))
    return found[: len(operations)]
