"""The profile of a step: every operation is in a line, and only rows that are computed count."""

import numpy as np
from benchmarks.cpu.profile_step import Step, lines_of, table

from tests.runtime.cpu.native.tiny_program import tiny_program


def test_lines_add_up_the_operations_of_one_size() -> None:
    program = tiny_program()
    batch = Step(sequences=2, tokens=5, context=3).batch(program)
    lines = lines_of(program, batch, np.arange(len(program.operations), dtype=np.float64))
    assert sum(line.count for line in lines.values()) == len(program.operations)
    assert sum(line.seconds for line in lines.values()) == sum(range(len(program.operations)))
    head = program.matrices["head"]
    line = next(line for name, line in lines.items() if name.startswith(f"linear {head.k} -> {head.n} int8"))
    assert line.operations == 2 * head.n * head.k * 2
    assert len(list(table(lines))) == len(lines) + 1


def test_a_step_has_the_last_rows_logits() -> None:
    batch = Step(sequences=3, tokens=4, context=20).batch(tiny_program())
    assert batch.logits_indices.tolist() == [3, 7, 11]
    assert batch.position_ids.tolist() == [20, 21, 22, 23] * 3
    assert sorted(batch.block_tables.reshape(-1)) == list(range(batch.block_tables.size))
    assert batch.context_lens.tolist() == [24] * 3
