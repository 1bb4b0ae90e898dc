"""Logits have the same bits in steps of any number of rows, on any number of threads, with each instruction set.

The reference decodes every sequence alone, a token a step, on one thread. The instruction sets are those of the matmuls
and of the operations on rows; test_program.py has those of attention.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from ingot.artifact.programs.cpu_program import CpuProgram, Linear, Rounding
from ingot.artifact.programs.operation_row import Form, Matrix
from ingot.artifact.safetensors import MappedTensors
from ingot.runtime.cpu.kv_pool import KVPool
from ingot.runtime.cpu.native.program import NativeProgram
from tests.each_case import each_case
from tests.runtime.cpu.native.kernel_cases import FORMS, INTEGERS, SETS, needs_library
from tests.runtime.cpu.native.tiny_program import (
    BLOCK_TOKENS,
    VOCAB,
    random_tensors,
    tiny_program,
    write_weights,
)
from tests.runtime.cuda.batches import Growing, token_ids

pytestmark = needs_library

THREADS = (1, 2, 3, 4)
BUSY = 3  # threads of every instruction set but the first, which runs with each number
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 64, 512)
SHARING = 8  # sequences that share a step's rows
LENGTHS = (512, *[512 // SHARING] * SHARING)  # a prompt that has steps of its own, then those

Plan = list[list[int]]  # tokens of each sequence, step by step


def all_plans() -> dict[str, Plan]:
    """Steps of each number of rows: of the prompt, and of the sequences that share a step."""
    found = {}
    for rows in ROWS:
        steps = min(4, max(1, 64 // rows))
        shares = [rows // SHARING + (index < rows % SHARING) for index in range(SHARING)]
        found[f"{rows} rows of one sequence"] = [[rows] + [0] * SHARING] * steps
        found[f"{rows} rows of several"] = [[0, *shares]] * steps
    return found


def in_form(program: CpuProgram, form: Form) -> CpuProgram:
    """The program with all matrices in that form; integers have a scale per row in the second layer, else per block."""
    matrices = {name: _matrix(one, form, per_row=name.endswith("1")) for name, one in program.matrices.items()}
    operations = [
        one.model_copy(update={"rounding": _rounding(matrices[one.matrix])}) if isinstance(one, Linear) else one
        for one in program.operations
    ]
    return program.model_copy(update={"matrices": matrices, "operations": tuple(operations)})


def _matrix(like: Matrix, form: Form, per_row: bool) -> Matrix:
    if form in INTEGERS:
        return Matrix(
            n=like.n, k=like.k, form=form, pairs=like.pairs, block=like.block or 32, per_row=per_row, scale_bytes=2,
            has_zeros=form in ("int2", "int4"),
        )  # fmt: skip
    scaled = form == "float8"
    return Matrix(n=like.n, k=like.k, form=form, pairs=like.pairs, per_row=scaled, scale_bytes=4 if scaled else 0)


def _rounding(matrix: Matrix) -> Rounding:
    if not matrix.is_integer:
        return "none"
    return "token" if matrix.per_row else "block"


def logits(program: CpuProgram, weights: Path, isa: str, threads: int, plans: Iterable[Plan]) -> Iterator[list[bytes]]:
    """The bits of each sequence's logits [tokens, vocabulary], plan by plan; each begins at the first tokens."""
    blocks = max(LENGTHS) // BLOCK_TOKENS
    tables = np.arange(len(LENGTHS) * blocks).reshape(-1, blocks).tolist()
    pool = KVPool(program.kv, len(LENGTHS) * blocks)
    native = NativeProgram(
        program, MappedTensors(weights), pool, max_batch_tokens=max(ROWS), num_threads=threads, isa=isa
    )  # fmt: skip
    for steps in plans:
        pool.blocks[:] = 0xFF  # NaN: memory that was not written must not be read
        growing = Growing([token_ids(length, seed, VOCAB) for seed, length in enumerate(LENGTHS)], tables)
        found = [b""] * len(LENGTHS)
        for counts in steps:
            result = native.step(growing.step(counts))
            assert len(result) == sum(counts)
            for index, rows in enumerate(np.split(result, np.cumsum(counts)[:-1])):
                found[index] += rows.tobytes()
        yield found
    native.close()


@each_case("form", FORMS)
def test_bits_depend_on_no_number_of_rows_or_threads_and_on_no_instruction_set(form: Form, tmp_path: Path) -> None:
    program, steps = in_form(tiny_program(), form), all_plans()
    weights = write_weights(tmp_path / "weights.safetensors", random_tensors(program))
    token_by_token = np.repeat(np.eye(len(LENGTHS), dtype=int), LENGTHS, axis=0).tolist()
    (alone,) = logits(program, weights, SETS[0], 1, [token_by_token])
    for bits, length in zip(alone, LENGTHS, strict=True):
        rows = np.frombuffer(bits, np.float32).reshape(length, VOCAB)
        assert np.isfinite(rows).all()
        assert rows.std() > 0.1
    for isa in SETS:
        for threads in THREADS if isa == SETS[0] else (BUSY,):
            found = logits(program, weights, isa, threads, steps.values())
            for name, together in zip(steps, found, strict=True):
                same = [theirs.startswith(ours) for ours, theirs in zip(together, alone, strict=True)]
                assert all(same), f"{name}, {isa}, {threads} threads: other bits than those of each row alone"
