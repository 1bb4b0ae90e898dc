"""Buffers of values during lowering: views, split-K partials, and the copies that readers need."""

import onnx_ir as ir

from ingot.artifact import KVGeometry
from ingot.artifact.programs.launch_program import BufferArgument
from ingot.pipeline.targets.cuda.lowering_context import LaunchContext, RowBuffer
from ingot.pipeline.targets.cuda.program_builder import Bucket, ProgramBuilder, Shared
from ingot.pipeline.targets.fusions import Fusions

KV = KVGeometry(num_layers=1, num_kv_heads=1, head_dim=8, block_tokens=4)
ROWS, COLUMNS = 4, 32


def value(*shape: int | str) -> ir.Value:
    return ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))


X = value("T", COLUMNS)
READER = ir.node("Relu", [X], name="reader")


def context() -> LaunchContext:
    return LaunchContext(ProgramBuilder(Bucket.decode(ROWS, 32), Shared("fp16", KV)), Fusions())


def kernels(of: LaunchContext) -> list[str]:
    return [launch.kernel.partition("-")[0] for launch in of.builder.launches if hasattr(launch, "kernel")]


def test_a_view_is_aligned_at_multiples_of_16_bytes() -> None:
    rows = RowBuffer(BufferArgument(name="x", type="fp16"), COLUMNS, COLUMNS)
    assert [rows.slice(start, 8).is_aligned for start in (0, 4, 8, 12)] == [True, False, True, False]
    nested = rows.slice(8, 16).slice(4, 8)
    assert (nested.buffer.offset, nested.columns, nested.stride) == (12, 8, COLUMNS)
    assert nested.unaligned == (rows.buffer, 12)


def test_partials_are_added_once_for_readers_that_need_the_sum() -> None:
    made = context()
    partials = made.make_partials(X, 3)
    assert (partials.partials, partials.partial_stride, partials.buffer.type) == (3, ROWS * COLUMNS, "fp32")
    assert made.builder.sizes == {"x.parts": 3 * ROWS * COLUMNS * 4}
    assert made.read(X, READER, partials=True) is partials
    whole = made.read(X, READER)
    assert (whole.buffer.name, whole.buffer.type, whole.partials) == ("x.whole", "fp16", 1)
    assert made.read(X, READER) is whole
    assert kernels(made) == ["map_rows"]


def test_an_unaligned_view_is_copied_for_readers_that_take_pointers() -> None:
    made = context()
    view = made.put(X, made.make(X).slice(4, 8))
    assert made.read(X, READER, unaligned=True) is view
    assert kernels(made) == []
    copied = made.read(X, READER)
    assert (copied.buffer.offset, copied.columns, copied.stride) == (0, 8, 8)
    assert kernels(made) == ["map_rows"]


def test_rows_are_processed_in_blocks_of_at_most_1024_columns() -> None:
    assert context().blocks(3000) == ((ROWS, 3), {"COLUMNS": 3000, "BLOCK": 1024})
    assert context().blocks(20) == ((ROWS, 1), {"COLUMNS": 20, "BLOCK": 32})
