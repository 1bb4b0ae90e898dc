"""Copies to and from stages of the host take contiguous rows, and partial sums as their sum in float32."""

import onnx_ir as ir

from ingot.artifact import KVGeometry
from ingot.artifact.programs.launch_program import HostCopy
from ingot.pipeline.targets.cuda.lower.host_copies import RECEIVE, SEND
from ingot.pipeline.targets.cuda.lowering import lower_node
from ingot.pipeline.targets.cuda.lowering_context import LaunchContext
from ingot.pipeline.targets.cuda.program_builder import Bucket, ProgramBuilder, Shared
from ingot.pipeline.targets.fusions import Fusions

ROWS, COLUMNS = 4, 32
KV = KVGeometry(num_layers=1, num_kv_heads=1, head_dim=8, block_tokens=4)


def value(name: str, columns: int = COLUMNS) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(("T", columns)))


def context() -> LaunchContext:
    return LaunchContext(ProgramBuilder(Bucket.decode(ROWS, 32), Shared("fp16", KV)), Fusions())


def lowered(made: LaunchContext, op_type: str, x: list[ir.Value], y: ir.Value, columns: list[int]) -> HostCopy:
    buffers = [f"host.{number}" for number in range(len(columns))]
    node = ir.node(op_type, x, {"stage": 3, "buffers": buffers, "columns": columns}, outputs=[y], name="n")
    lower_node(made, node)
    copy = made.builder.launches[-1]
    assert isinstance(copy, HostCopy)
    assert (copy.stage, [one.buffer for one in copy.values], [one.column for one in copy.values]) == (
        3,
        buffers,
        columns,
    )
    return copy


def test_whole_rows_are_copied_as_they_are() -> None:
    made, x = context(), value("x")
    made.make(x)
    copy = lowered(made, SEND, [x], value("sent"), [5])
    assert made.builder.launches == [copy]
    assert (copy.direction, copy.buffers, copy.row_bytes) == ("send", ("x",), 2 * COLUMNS)


def test_partial_sums_and_columns_of_longer_rows_become_contiguous_first() -> None:
    made, x, y, long = context(), value("x"), value("y", 8), value("long")
    made.make_partials(x, 3)
    made.put(y, made.make(long).slice(4, 8))
    copy = lowered(made, SEND, [x, y], value("sent"), [0, 16])
    assert [getattr(one, "kernel", "").partition("-")[0] for one in made.builder.launches] == ["map_rows"] * 2 + [""]
    assert [(one.rows.type, one.rows.offset, one.columns) for one in copy.values] == [
        ("fp32", 0, COLUMNS),
        ("fp16", 0, 8),
    ]
    assert all(made.builder.sizes[name] for name in copy.buffers)


def test_received_rows_are_in_the_arena_from_the_copy_on() -> None:
    made, y = context(), value("y")
    copy = lowered(made, RECEIVE, [], y, [0])
    assert (copy.direction, copy.buffers) == ("receive", (made.rows_of[y].buffer.name,))
    place = made.builder.program().places["y"]
    assert place.bytes == ROWS * COLUMNS * 2
