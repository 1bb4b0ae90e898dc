"""Batch-invariant programs: a node's kernel and numbers are the same in all buckets, and a row's bits in all batches.

The programs run in the interpreter, whose matmul adds up every row in one order, as a GPU's does. It cannot show that
a compiled kernel is the same for all rows: the first tests compare what kernels are compiled for, which is their key.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from numpy.typing import NDArray

from ingot.artifact.programs.launch_program import Launch, LaunchProgram
from ingot.pipeline.targets.cuda.kernel_signatures import SIGNATURES
from ingot.pipeline.targets.cuda.lower import fixed_splits
from ingot.pipeline.targets.cuda.lower.fixed_splits import FixedSplits
from ingot.pipeline.targets.cuda.lowering import LoweredLaunches, lower_to_launches
from ingot.pipeline.targets.cuda.program_builder import Bucket
from ingot.pipeline.targets.cuda.tiles import FEW_ROWS, MatmulKernel, MatmulShape, TileTable
from ingot.runtime.cuda.executor import CudaExecutor
from ingot.runtime.options import EngineOptions
from tests.each_case import each_case
from tests.runtime.cuda.artifacts import CONTEXT, LibraryTiles, write_artifact
from tests.runtime.cuda.batches import Growing, token_ids
from tests.simulators.interpreted_device import InterpretedDevice
from tests.simulators.launch_programs import CHECKPOINTS, FLOATS, INT4, AlwaysWide, Entry, fused, imported
from tests.simulators.triton_interpreter import use_ordered_dots

FORMS: dict[str, tuple[Entry, ...]] = {"floats": (), "4 bits": (INT4,)}
SEQUENCES, MANY = 3, FEW_ROWS + 8
INVARIANT = tuple(Bucket.ragged(rows, CONTEXT, SEQUENCES) for rows in (1, 2, 8, MANY))
USUAL = (Bucket.decode(1, CONTEXT), Bucket.decode(SEQUENCES, CONTEXT), *INVARIANT[2:])
OF_ROWS = (
    *("rows", "num_pairs", "num_tiles"),
    *("part_stride", "gate_part_stride", "up_part_stride", "left_part_stride"),
)
JOINS = "join_fixed_splits"  # only buckets whose programs share splits have it


@pytest.fixture(autouse=True)
def _two_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fixtures' contexts are shorter than one split of a real model."""
    monkeypatch.setattr(fixed_splits, "_LEAST_SPLIT", CONTEXT // 2)


def lowered(
    name: str, *quantization: Entry, invariant: bool = True, buckets: Iterable[Bucket] = INVARIANT
) -> LoweredLaunches:
    model = fused(imported(CHECKPOINTS / name, *quantization))
    return lower_to_launches(model, tuple(buckets), "fp32", LibraryTiles(), batch_invariant=invariant)


def what_rows_meet(found: LoweredLaunches, program: LaunchProgram) -> list[tuple[object, ...]]:
    """Each launch without what depends on the bucket: its grid, rows, places of buffers, strides between partials."""
    seen: list[tuple[object, ...]] = []
    for launch in program.launches:
        assert isinstance(launch, Launch)
        name = found.shared.kernels[launch.kernel].name
        if name != JOINS:
            arguments = zip(SIGNATURES[name].arguments, launch.arguments, strict=True)
            numbers = [(key, one.value) for key, one in arguments if one.kind == "number" and key not in OF_ROWS]
            seen.append((launch.node, launch.kernel, *numbers))
    return seen


@each_case("quantization", FORMS.values(), ids=FORMS)
@each_case("name", ["llama", "qwen3", "gemma2", "qwen3_moe", "gemma4_text", "qwen3_5_text"])
def test_every_bucket_runs_the_same_compiled_kernels_with_the_same_numbers(
    name: str, quantization: tuple[Entry, ...]
) -> None:
    found = lowered(name, *quantization)
    assert found.shared.batch_invariant
    kernels = found.shared.kernels.values()
    has_partials = any(kernel.constants.get("FOLDS") for kernel in kernels)
    assert has_partials == (not quantization)  # of the tiny model's weights, which are one step of 4-bit codes wide
    assert any(kernel.name == JOINS for kernel in kernels)
    first, *others = (what_rows_meet(found, program) for program in found.programs)
    for other in others:
        assert other == first


def test_a_weight_of_four_bits_has_one_direct_kernel_for_all_buckets() -> None:
    model = fused(imported(CHECKPOINTS / "llama", INT4))
    found = lower_to_launches(model, INVARIANT, "fp16", batch_invariant=True)
    first, *others = (what_rows_meet(found, program) for program in found.programs)
    assert any(found.shared.kernels[str(kernel)].name == "matmul_int4" for _, kernel, *_ in first)
    assert all(other == first for other in others)


def test_a_weight_of_four_bits_has_one_wide_kernel_for_all_buckets_of_sm_90() -> None:
    model = fused(imported(CHECKPOINTS / "llama", ("quantize-weights", {"block_size": "channel", **FLOATS})))
    found = lower_to_launches(model, INVARIANT, "fp16", AlwaysWide(sm=90), batch_invariant=True)
    first, *others = (what_rows_meet(found, program) for program in found.programs)
    assert any(found.shared.kernels[str(kernel)].name == "matmul_int4_wide" for _, kernel, *_ in first)
    assert all(other == first for other in others)


def test_usual_buckets_do_not() -> None:
    model = fused(imported(CHECKPOINTS / "llama", INT4))
    found = lower_to_launches(model, USUAL, "fp16")
    kernels = [{kernel for _, kernel, *_ in what_rows_meet(found, program)} for program in found.programs]
    assert kernels[0] != kernels[-1]


def test_no_matmul_is_left_to_a_library_or_dequantized_first() -> None:
    for quantization in FORMS.values():
        found = lowered("llama", *quantization)
        assert not any(program.library_matmuls for program in found.programs)
        assert not any(kernel.name == "dequantize_nbits" for kernel in found.shared.kernels.values())
    assert any(program.library_matmuls for program in lowered("llama", invariant=False).programs)


@each_case("bits", [4, 8, 16])
@each_case(("n", "columns"), [(4096, 14336), (6144, 4096), (28672, 4096), (96, 64)])
def test_a_tile_is_a_function_of_the_weight(bits: int, n: int, columns: int) -> None:
    kernel: MatmulKernel = "matmul_nbits" if bits == 4 else "matmul"
    shape = MatmulShape(kernel=kernel, rows=1, n=n, columns=columns, bits=bits, group=128 if bits == 4 else 0)
    for sm in (80, 90):
        table = TileTable(sm=sm)
        tiles = {table.choose_invariant(shape.model_copy(update={"rows": rows})) for rows in (1, 16, 64, 65, 4096)}
        assert [tile.wide for tile in tiles] == [sm == 90 and bits == 4 and n > 96]


def test_splits_of_attention_are_a_function_of_the_models_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert FixedSplits.of(2048) == FixedSplits(256, 8)
    assert FixedSplits.of(131072) == FixedSplits(1024, 128)
    assert FixedSplits.of(100_000) == FixedSplits(1024, 98)
    splits = FixedSplits.of(32768)
    assert [splits.programs(rows, 8) for rows in (1, 8, 64, 65, 4096)] == [128, 16, 2, 1, 1]


IDS = [token_ids(length, seed) for seed, length in enumerate((36, 16, 32))]
STEPS: dict[str, list[tuple[int, int, int]]] = {  # new tokens of each sequence in each step
    "alone, at once": [(36, 0, 0)],
    "alone, token by token": [(1, 0, 0), (27, 0, 0), *[(1, 0, 0)] * 8],  # across the border of the splits, 32
    "in chunks": [(31, 0, 0), (2, 0, 0), (3, 0, 0)],
    "with mates, in many rows": [(5, 1, 1), (31, 13, 25)],
    "decoding with mates, then several rows as speculation has": [(31, 9, 4), (1, 1, 1), (2, 3, 1), (1, 1, 3)],
}


def logits_under_all_steps(
    load: Callable[[], CudaExecutor], names: Iterable[str] = STEPS
) -> dict[str, NDArray[np.float32]]:
    """Logits [36, vocabulary] of the first sequence under those STEPS, each in an executor of its own of 24 blocks."""
    found = {}
    for name in names:
        steps = STEPS[name]
        executor = load()
        blocks = -(-max(map(len, IDS)) // executor.kv_geometry.block_tokens)
        tables = np.random.default_rng(len(name)).permutation(24)[: len(IDS) * blocks].reshape(len(IDS), -1)
        sequences = Growing(IDS, tables.tolist())
        rows = [executor.forward(sequences.step(counts)).copy()[: counts[0]] for counts in steps]
        executor.close()
        found[name] = np.concatenate(rows)
    return found


def logits_of(
    quantization: tuple[Entry, ...], *, invariant: bool, names: Iterable[str] = STEPS, checkpoint: str = "llama"
) -> dict[str, NDArray[np.float32]]:
    """Logits of a tiny model in the interpreter, under those STEPS."""
    model, buckets = fused(imported(CHECKPOINTS / checkpoint, *quantization)), INVARIANT if invariant else USUAL
    with TemporaryDirectory() as folder:
        artifact = write_artifact(model, Path(folder) / "artifact", buckets, "fp32", batch_invariant=invariant)
        options = EngineOptions(kv_blocks=24)
        return logits_under_all_steps(lambda: CudaExecutor(artifact, InterpretedDevice(), options), names)


@pytest.mark.parametrize(
    ("checkpoint", "quantization"),
    [("llama", ()), ("llama", (INT4,)), ("qwen3_moe", (INT4,)), ("qwen3_5_text", ()), ("falcon_h1", ())],
    ids=["floats", "4 bits", "experts of 4 bits", "delta rules", "scans"],
)
def test_a_row_has_the_same_bits_in_every_batch(
    checkpoint: str, quantization: tuple[Entry, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_ordered_dots(monkeypatch)
    alone, *others = logits_of(quantization, invariant=True, checkpoint=checkpoint).items()
    for name, rows in others:
        different = np.flatnonzero((rows.view(np.int32) != alone[1][: len(rows)].view(np.int32)).any(axis=1))
        assert not different.size, f"{name}: rows {different}"


def test_usual_programs_fail_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    use_ordered_dots(monkeypatch)
    found = logits_of((INT4,), invariant=False, names=("alone, at once", "alone, token by token"))
    alone = found.pop("alone, at once")
    assert all((rows != alone[: len(rows)]).any() for rows in found.values())
    assert all(np.abs(rows - alone[: len(rows)]).max() < 1e-4 * np.abs(alone).max() for rows in found.values())
