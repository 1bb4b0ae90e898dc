"""Random adapters, what they add to a matrix in float64, and the tiny program with one merged into its weights."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.artifact.programs.cpu_program import CpuProgram, Linear
from ingot.pipeline.targets.cpu.packing import MatrixArrays, pack_tiles, unpack_tiles
from ingot.runtime.adapters import Adapter, LowRankUpdate
from tests.runtime.cpu.native.kernel_cases import FLOAT_TYPES, DoubleArray
from tests.runtime.cpu.native.tiny_program import FFN, HIDDEN, KV_COLUMNS, LAYERS, VOCAB

STORED = ("float32", "float16", "bfloat16")  # forms that random matrices can have without rounding

# operation, first row, rows, columns: the checkpoint's layers in the tiny program
TARGETS: tuple[tuple[str, int, int, int], ...] = (
    *(
        target
        for layer in range(LAYERS)
        for target in (
            (f"qkv{layer}", 0, HIDDEN, HIDDEN),
            (f"qkv{layer}", HIDDEN, KV_COLUMNS, HIDDEN),
            (f"qkv{layer}", HIDDEN + KV_COLUMNS, KV_COLUMNS, HIDDEN),
            (f"o{layer}", 0, HIDDEN, HIDDEN),
            (f"gate_up{layer}", 0, FFN, HIDDEN),
            (f"gate_up{layer}", FFN, FFN, HIDDEN),
            (f"down{layer}", 0, HIDDEN, FFN),
        )
    ),
    ("head", 0, VOCAB, HIDDEN),
)


def random_change(
    rng: np.random.Generator, rank: int, rows: int, columns: int, first_row: int = 0, form: str = "float32"
) -> LowRankUpdate:
    """B A of about the size of a matrix whose rows have the length 1, in numbers that `form` holds."""
    kind = FLOAT_TYPES[form]  # type: ignore[index]
    a = (rng.standard_normal((rank, columns)) / np.sqrt(columns)).astype(kind).astype(np.float32)
    b = (rng.standard_normal((rows, rank)) / np.sqrt(rank)).astype(kind).astype(np.float32)
    return LowRankUpdate(f"rows {first_row}", first_row, a, b)


def random_adapter(seed: int, max_rank: int = 40, min_rank: int = 1) -> Adapter:
    """An adapter for the tiny program: some of its layers, each with a rank of its own."""
    rng = np.random.default_rng(seed)
    chosen = [target for target in TARGETS if rng.random() < 0.7] or [TARGETS[0]]
    form, changes = STORED[seed % len(STORED)], dict[str, list[LowRankUpdate]]()
    for node, first_row, rows, columns in chosen:
        change = random_change(rng, int(rng.integers(min_rank, max_rank + 1)), rows, columns, first_row, form)
        changes.setdefault(node, []).append(change)
    return Adapter(f"random {seed}", changes)


def added_weight(changes: Sequence[LowRankUpdate], rows: int) -> DoubleArray:
    """B A [rows, columns] of all changes."""
    total = np.zeros((rows, changes[0].a.shape[1]))
    for change in changes:
        here = slice(change.first_row, change.first_row + len(change.b))
        total[here] += change.b.astype(np.float64) @ change.a.astype(np.float64)
    return total


def merged_tensors(
    program: CpuProgram, tensors: Mapping[str, NDArray[Any]], adapter: Adapter
) -> dict[str, NDArray[Any]]:
    """The tensors of a program of floats with the adapter in its weights."""
    merged = dict(tensors)
    for operation in program.operations:
        if isinstance(operation, Linear) and operation.node in adapter.changes:
            matrix = program.matrices[operation.matrix]
            weight = unpack_tiles(matrix, tensors[operation.matrix]).codes
            total = weight + added_weight(adapter.changes[operation.node], matrix.n)
            merged[operation.matrix] = pack_tiles(matrix, MatrixArrays(total.astype(weight.dtype)))
    return merged
