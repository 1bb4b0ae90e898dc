"""Whether a row's logits have the same bits in all batches: the programs with keys and values of 16 bits.

One sequence is computed in several ways, and the logits of its last token are compared with those of a single step.
Batch-invariant programs must have equal bits; the figures of the others show by how much the order of sums moves them.
"""

from collections.abc import Iterator

import numpy as np
from tests.runtime.cuda.batches import Growing, token_ids

from benchmarks.gpu.device import Bench, SyntheticExecutor
from benchmarks.gpu.figures import Record
from benchmarks.gpu.steps import open_program, program_files
from ingot.runtime.steps.batch import FloatArray

_SECONDS_A_PROGRAM = 20.0  # to unpack, load and fill the largest
_TOKENS = 300  # of the sequence, if the step holds as many
_VOCABULARY = 100


def invariance(bench: Bench) -> Iterator[Record]:
    """Yield for every program and way of computing: elements with other bits, the largest difference."""
    for file in program_files(bench.programs, invariant=True):
        if "kv-16-bit" not in file.stem:
            continue
        if not bench.room(_SECONDS_A_PROGRAM):
            yield {"figure": "invariance", "program": file.stem, "skipped": "no time left"}
            continue
        executor = open_program(bench, file)
        try:
            for record in _compare(executor):
                yield {"figure": "invariance", "program": file.stem, **record}
        finally:
            executor.close()


def _compare(executor: SyntheticExecutor) -> Iterator[Record]:
    tokens = min(_TOKENS, executor.max_batch_tokens, executor.model.context_tokens)
    whole = _last_logits(executor, tokens, [tokens], 0)
    ways = {
        "decoded alone": ([tokens - 1, 1], 0),
        "in chunks": ([tokens // 2, tokens - tokens // 2], 0),
        "as speculation's rows": ([tokens - 3, 3], 0),
        **{f"decoded with {mates} mates": ([tokens - 1, 1], mates) for mates in _mates(executor)},
    }
    for way, (counts, mates) in ways.items():
        found = _last_logits(executor, tokens, counts, mates)
        wrong = int((found.view(np.int32) != whole.view(np.int32)).sum())
        error = float(np.abs(found - whole).max() / np.abs(whole).max())
        must = {"within": wrong == 0} if executor.batch_invariant else {}
        yield {"way": way, "other_bits": wrong, "elements": whole.size, "relative": error, **must}


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
