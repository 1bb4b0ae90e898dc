"""Logits of models by their CPU launch programs, in numpy, and by plain onnxruntime."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.passes.manager import PassManager
from ingot.passes.registry import make_pass
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.model.importer import import_checkpoint
from ingot.pipeline.targets.cpu.lowering import Lowered, lower_to_operations
from ingot.pipeline.targets.cpu.writer import write_lowered
from ingot.pipeline.targets.table import NATIVE
from ingot.sizes import ceil_div
from tests.reference_runner import SCHEDULE, ReferenceRunner
from tests.runtime.cuda.batches import Growing
from tests.simulators.cpu_program_in_numpy import NumpyCpuProgram

LOWERING = NATIVE.lowering
PACKED = ("fold-constants", "pack-projections", "fuse-gated-activation", "clean-up")

Entry = str | tuple[str, dict[str, object]]
Floats = NDArray[np.float32]


def imported(checkpoint: Path, *passes: Entry) -> ir.Model:
    """Import a checkpoint's IR and run passes."""
    model = import_checkpoint(Checkpoint.open(checkpoint))
    made = [make_pass(one) if isinstance(one, str) else make_pass(*one) for one in passes]
    if made:
        PassManager(made).run(model)
    return model


def lowered(model: ir.Model) -> Lowered:
    """Run the passes of the target, and lower the model."""
    PassManager([make_pass(name) for name in LOWERING]).run(model)
    return lower_to_operations(model)


def tokens_of(*lengths: int) -> list[list[int]]:
    """Random token ids of three sequences, the same each time."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 60, length).tolist() for length in lengths]


def program_logits(
    folder: Path,
    sequences: Sequence[Sequence[int]],
    schedule: Sequence[Sequence[int]] = SCHEDULE,
    *,
    rounds: bool = True,
) -> list[Floats]:
    """Logits [length, vocab] of each sequence by the program in the folder, in ragged steps."""
    ids = [np.array(tokens, np.int64) for tokens in sequences]
    blocks = 1 + max(map(len, ids)) // 4
    program = NumpyCpuProgram(folder, blocks * len(ids), rounds=rounds)
    size = ceil_div(max(map(len, ids)), program.program.kv.block_tokens)
    tables = np.random.default_rng(0).permutation(len(ids) * size).reshape(len(ids), -1)
    growing, rows = Growing(ids, tables.tolist()), [[] for _ in ids]  # type: tuple[Growing, list[list[Floats]]]
    turn = 0
    while any(done < len(tokens) for done, tokens in zip(growing.done, ids, strict=True)):
        chunks = schedule[min(turn, len(schedule) - 1)]
        left = [len(tokens) - done for done, tokens in zip(growing.done, ids, strict=True)]
        counts = [min(chunk, rest) for chunk, rest in zip(chunks, left, strict=True)]
        if any(counts):
            logits = program.forward(growing.step(counts))
            for index, part in enumerate(np.split(logits, np.cumsum(counts)[:-1])):
                rows[index].append(part)
        turn += 1
    return [np.concatenate(parts) for parts in rows]


def both_logits(
    model: ir.Model, folder: Path, lengths: Sequence[int] = (13, 17, 11), *, rounds: bool = False
) -> tuple[list[Floats], list[Floats]]:
    """Logits of three sequences by the lowered program, and by the IR in plain onnxruntime."""
    sequences = tokens_of(*lengths)
    write_lowered(lowered(model.clone()), folder)
    return program_logits(folder, sequences, rounds=rounds), ReferenceRunner(model).run_ragged(sequences)
