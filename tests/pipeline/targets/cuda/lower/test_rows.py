"""Ops on rows: what they launch, which views need no launch, and nodes that no kernel computes."""

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from ingot.artifact import KVGeometry
from ingot.artifact.programs.launch_program import Launch
from ingot.errors import PassError
from ingot.pipeline.targets.cuda.kernel_signatures import SIGNATURES
from ingot.pipeline.targets.cuda.lowering import lower_node
from ingot.pipeline.targets.cuda.lowering_context import LaunchContext, RowBuffer
from ingot.pipeline.targets.cuda.program_builder import Bucket, ProgramBuilder, Shared
from ingot.pipeline.targets.fusions import Fusions
from tests.each_case import each_case

KV = KVGeometry(num_layers=1, num_kv_heads=1, head_dim=8, block_tokens=4)
ROWS, COLUMNS = 4, 8


def value(name: str, *shape: int | str) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))


def stored(name: str, array: Any) -> ir.Value:
    tensor = ir.Tensor(np.asarray(array), name=name)
    shape = ir.Shape(tensor.shape.numpy())
    made = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=shape, const_value=tensor)
    ir.Graph([], [], nodes=[], initializers=[made])
    return made


X = value("x", "T", COLUMNS)


def node(op_type: str, *inputs: ir.Value, columns: int = COLUMNS, outputs: int = 1, **attributes: Any) -> ir.Node:
    made = [value(f"y{index}", "T", columns) for index in range(outputs)]
    return ir.node(op_type, inputs, attributes, outputs=made, name="layers.0.op")


def lowered(one: ir.Node) -> LaunchContext:
    """Lower a node that reads X, [rows, 8] in the arena."""
    context = LaunchContext(ProgramBuilder(Bucket.decode(ROWS, 32), Shared("fp16", KV)), Fusions())
    context.put(X, RowBuffer(context.builder.buffer("x", ROWS * COLUMNS), COLUMNS, COLUMNS))
    lower_node(context, one)
    return context


def arguments(context: LaunchContext) -> tuple[str, dict[str, Any]]:
    """The kernel of the only launch, and its arguments by name: numbers, names of buffers and weights, None."""
    (launch,) = context.builder.launches
    assert isinstance(launch, Launch)
    kernel = launch.kernel.partition("-")[0]
    found = (getattr(one, "value", getattr(one, "name", None)) for one in launch.arguments)
    return kernel, dict(zip(SIGNATURES[kernel].arguments, found, strict=True))


@pytest.mark.parametrize(("op_type", "alpha"), [("Mul", 4.0), ("Div", 0.25)])
def test_a_scalar_factor_is_an_argument(op_type: str, alpha: float) -> None:
    kernel, given = arguments(lowered(node(op_type, X, stored("four", np.float32(4)))))
    assert (kernel, given["x"], given["out"], given["alpha"]) == ("map_rows", "x", "y0", alpha)


def test_a_stored_vector_is_added_to_every_row() -> None:
    kernel, given = arguments(lowered(node("Add", stored("bias", np.ones(COLUMNS, np.float32)), X)))
    assert (kernel, given["left"], given["right"]) == ("combine_rows", "x", "bias")
    assert (given["left_stride"], given["right_stride"]) == (COLUMNS, 0)


def test_a_split_makes_views_without_a_launch() -> None:
    one = node("Split", X, columns=3, outputs=2, axis=-1)
    context = lowered(one)
    assert context.builder.launches == []
    views = [context.rows_of[output] for output in one.outputs]
    assert [(rows.buffer.name, rows.buffer.offset, rows.columns, rows.stride) for rows in views] == [
        ("x", 0, 3, COLUMNS),
        ("x", 3, 3, COLUMNS),
    ]


def test_columns_are_gathered_by_a_stored_list() -> None:
    kernel, given = arguments(lowered(node("Gather", X, stored("order", [5, 0, 2]), columns=3, axis=1)))
    assert (kernel, given["columns"], given["x_stride"], given["out_stride"]) == ("gather_columns", "order", COLUMNS, 3)


MATRIX = stored("matrix", np.ones((2, COLUMNS), np.float32))


@each_case(
    ("refused", "message"),
    [
        (node("Div", X, X), r"'layers.0.op' \(Div\) divides by something other than a stored number"),
        (node("Add", X, MATRIX), r"\(Add\) broadcasts a constant that is not a vector of its columns"),
        (node("Gather", MATRIX, X), r"\(Gather\) gathers rows by 'x', which is not an input of the model"),
        (node("Gather", X, X, axis=1), r"\(Gather\) gathers columns by 'x', which is not a stored list"),
        (node("Swish", X, alpha=2.0), r"\(Swish\) has an alpha other than 1"),
        (node("Split", X, axis=0), r"\(Split\) splits another axis than the last"),
        (node("Reshape", X, stored("shape", [2, -1])), r"\(Reshape\) moves elements between rows"),
        (
            node("RMSNormalization", X, stored("w", np.ones(COLUMNS, np.float32)), axis=0),
            r"\(RMSNormalization\) norms another axis than the last",
        ),
        (node("Relu", MATRIX), r"\(Relu\) reads a constant, and its CUDA kernel takes rows"),
        (node("Relu", value("unknown", "T", COLUMNS)), r"\(Relu\) reads 'unknown', and its CUDA kernel takes rows"),
    ],
    ids=lambda given: given.op_type if isinstance(given, ir.Node) else "",
)
def test_a_node_that_no_kernel_computes_is_refused_by_name(refused: ir.Node, message: str) -> None:
    with pytest.raises(PassError, match=message):
        lowered(refused)
