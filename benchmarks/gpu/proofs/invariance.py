"""Whether a row's logits have the same bits in all batches: the programs with keys and values of 16 bits.

One sequence is computed in several ways, and the logits of its last token are compared with those of a single step.
Batch-invariant programs must have equal bits; the figures of the others show by how much the order of sums moves them.
But the buckets that decode must have equal bits in every program: with few rows, all matmuls of a weight share one
order of sums.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from tests.runtime.cuda.batches import Growing, token_ids

from benchmarks.gpu.device import Bench, SyntheticExecutor
from benchmarks.gpu.parts import Record, Task
from benchmarks.gpu.times.steps import open_program, program_files
from ingot.runtime.forward_batch import FloatArray

_SECONDS_A_PROGRAM, _MOST_SECONDS = 10.0, 60.0  # to unpack, load and fill the largest
_TOKENS = 300  # of the sequence, if the step holds as many
_VOCABULARY = 100


def invariance(bench: Bench) -> list[Task]:
    """Every program."""
    files = (file for file in program_files(bench.programs, invariant=True) if "kv-16-bit" in file.stem)
    return [Task(file.stem, partial(_compared, bench, file), _MOST_SECONDS, _SECONDS_A_PROGRAM) for file in files]


def _compared(bench: Bench, file: Path) -> Iterator[Record]:
    """Yield for every way of computing: elements with other bits, the largest difference."""
    executor = open_program(bench, file)
    try:
        for record in _ways(executor):
            yield {"figure": "invariance", "program": file.stem, **record}
    finally:
        executor.close()


def _ways(executor: SyntheticExecutor) -> Iterator[Record]:
    tokens = min(_TOKENS, executor.max_batch_tokens, executor.model.context_tokens)
    whole = _last_logits(executor, tokens, [tokens], 0)
    alone = _last_logits(executor, tokens, [tokens - 1, 1], 0)
    must = executor.batch_invariant
    yield {"way": "decoded alone", **_difference(alone, whole, must)}
    for way, counts in {
        "in chunks": [tokens // 2, tokens - tokens // 2],
        "as speculation's rows": [tokens - 3, 3],
    }.items():
        yield {"way": way, **_difference(_last_logits(executor, tokens, counts, 0), whole, must)}
    for mates in _mates(executor):
        found = _last_logits(executor, tokens, [tokens - 1, 1], mates)
        yield {"way": f"decoded with {mates} mates", **_difference(found, whole, must)}
        yield {"way": f"decoded with {mates} mates against alone", **_difference(found, alone, must=True)}


def _difference(found: FloatArray, expected: FloatArray, must: bool) -> Record:
    """`must`: whether other bits are wrong. Numbers that are not finite always are: their bits prove nothing."""
    wrong = int((found.view(np.int32) != expected.view(np.int32)).sum())
    record = {"other_bits": wrong, "elements": found.size}
    if not np.isfinite(found).all():
        return {**record, "relative": float("inf"), "within": False}
    error = float(np.abs(found - expected).max() / np.abs(expected).max())
    return {**record, "relative": error, **({"within": wrong == 0} if must else {})}


def _mates(executor: SyntheticExecutor) -> list[int]:
    return sorted({executor.max_sequences // share - 1 for share in (8, 1)} - {0, -1})


def _last_logits(executor: SyntheticExecutor, tokens: int, counts: list[int], mates: int) -> FloatArray:
    """Logits of the sequence's last token, computed with mates of one token in the last step."""
    blocks = -(-tokens // executor.kv_geometry.block_tokens)
    ids = [token_ids(tokens, 0, _VOCABULARY), *(token_ids(1, mate + 1, _VOCABULARY) for mate in range(mates))]
    free = range(blocks, blocks + mates)
    tables = [list(range(blocks)), *([block] + [-1] * (blocks - 1) for block in free)]
    sequences = Growing(ids, tables)
    for count in counts[:-1]:
        executor.forward(sequences.step([count] + [0] * mates, "last"))
    logits: FloatArray = executor.forward(sequences.step([counts[-1]] + [1] * mates, "last"))[0].copy()
    return logits
