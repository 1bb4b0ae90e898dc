"""Every kernel on the card against its reference: launch by launch, through small models of all kinds.

Tokens that two logits of nearly one size decide are the one thing that may differ: see gpu_lockstep.py for the rest.
"""

from collections.abc import Iterator
from typing import cast

import numpy as np

from benchmarks.gpu_device import Bench, Machine
from benchmarks.gpu_figures import Record
from benchmarks.gpu_lockstep import Comparison, LockstepDevice, quicken_interpreter
from benchmarks.gpu_packing import unpack_artifact
from ingot.artifact import Artifact
from ingot.runtime.batch import ForwardBatch, TokenDraws
from ingot.runtime.cuda.device import Device
from ingot.runtime.cuda.executor import CudaExecutor
from ingot.runtime.cuda.loading import read_program
from ingot.runtime.executors import ExecutorOptions

_SECONDS_A_CASE = 12.0
_BLOCKS = 96
# Tokens of each of some sequences, and where they then end: prompts, decode steps, more rows than are few.
_STEPS = (((9, 1, 4), (9, 1, 4)), ((1, 1, 1), (10, 2, 5)), ((1,), (11,)), ((20, 22, 24), (31, 24, 29)))
_DRY_STEPS = (((3, 1), (3, 1)),)


def check(bench: Bench) -> Iterator[Record]:
    """Every case in turn: the worst error of each kernel and argument."""
    quicken_interpreter()
    for file in sorted(bench.programs.glob("check-*.zip")):
        if not bench.room(_SECONDS_A_CASE):
            yield {"figure": "check", "case": file.stem, "skipped": "no time left"}
            continue
        artifact = unpack_artifact(file, bench.scratch / file.stem)
        for record in worst(compare(artifact, bench.machine)):
            yield {"figure": "check", "case": file.stem, **record}


def compare(artifact: Artifact, machine: Machine) -> list[Comparison]:
    """Run prompts, decode steps, many rows, and both ways to choose tokens; each launch twice."""
    program = read_program(artifact)
    device = LockstepDevice(machine.open(), program.activation_type)
    executor = CudaExecutor(artifact, cast(Device, device), ExecutorOptions(kv_blocks=_BLOCKS))
    try:
        vocabulary, block = executor.model.vocab_size, executor.kv_geometry.block_tokens
        tables = np.random.default_rng(1).permutation(_BLOCKS)
        rows = max(one.rows for one in program.programs if one.attention == "decode")
        steps = _DRY_STEPS if machine.is_dry else _STEPS
        few = tables[: 3 * (32 // block + 1)].reshape(3, -1).astype(np.int32)
        for counts, ends in steps:
            executor.forward(batch_of(list(counts), list(ends), few, vocabulary))
        wide = batch_of([1] * rows, [1] * rows, tables[:rows, None].astype(np.int32), vocabulary)
        executor.submit(wide, _draws(rows, 0.0), np.full(rows, -1, np.int32)).tokens()
        one = batch_of([1], [1], tables[:1, None].astype(np.int32), vocabulary)
        executor.submit(one, _draws(1, 0.8), np.zeros(1, np.int32)).tokens()
    finally:
        executor.close()
    return device.comparisons


def worst(comparisons: list[Comparison]) -> list[Record]:
    """The largest error of each kernel and argument, beside its limit."""
    by_argument: dict[tuple[str, str], list[Comparison]] = {}
    for one in comparisons:
        by_argument.setdefault((one.kernel, one.argument), []).append(one)
    records: list[Record] = []
    for (kernel, argument), found in sorted(by_argument.items()):
        largest = max(found, key=lambda one: one.error)
        records.append(
            {
                "kernel": kernel,
                "argument": argument,
                "node": largest.node,
                "launches": len(found),
                "elements": sum(one.elements for one in found),
                "error": largest.error,
                "limit": largest.limit,
                "within": largest.error <= largest.limit or argument == "tokens",
            }
        )
    return records


def batch_of(counts: list[int], ends: list[int], tables: np.ndarray, vocabulary: int) -> ForwardBatch:
    """The last `counts` tokens of sequences that reach `ends`, with random ids."""
    starts = np.concatenate([[0], np.cumsum(counts)])
    spans = [np.arange(end - count, end) for count, end in zip(counts, ends, strict=True)]
    return ForwardBatch(
        input_ids=np.random.default_rng(sum(ends)).integers(0, vocabulary, int(starts[-1])),
        position_ids=np.concatenate(spans),
        logits_indices=starts[1:] - 1,
        query_starts=starts.astype(np.int32),
        context_lens=np.array(ends, np.int32),
        block_tables=tables[: len(counts)],
    )


def _draws(rows: int, temperature: float) -> TokenDraws:
    random = np.random.default_rng(2)
    return TokenDraws(
        temperatures=np.full(rows, temperature, np.float32),
        top_ks=random.integers(0, 9, rows).astype(np.int32),
        top_ps=random.uniform(0.5, 1, rows).astype(np.float32),
        uniforms=random.uniform(0, 1, rows).astype(np.float32),
    )
