"""Linear layers and table look-ups of the IR as launches, for each form that a weight has.

    plain                              matmul, gather_rows: the weight in the activations' type
    4 or 8 bits in blocks              matmul_nbits, gather_quantized_rows: codes in spans of 64 columns (kernels/)

2 and 3 bits stand in 4. A block must be a multiple of 32 columns: half a span has one scale.
"""

from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.artifact.launch_program import Argument, BufferArgument
from ingot.errors import PassError
from ingot.passes.weight_values import float32_values
from ingot.pipeline.cuda.program_builder import ProgramBuilder, as_float, next_power_of_two
from ingot.pipeline.cuda.tiles import FEW_ROWS, SPAN, ProductShape


def lower_gemm(builder: ProgramBuilder, node: ir.Node, x: BufferArgument, out: BufferArgument, rows: int) -> None:
    """y = x @ W^T + b."""
    operand = node.inputs[1]
    assert operand is not None
    assert operand.shape is not None
    n, columns = operand.shape.numpy()
    bias = _bias(builder, node)
    producer = operand.producer()
    if producer is not None and producer.op_type == "DequantizeLinear":
        _nbits(builder, node, producer, x, out, bias, (rows, n, columns))
        return
    plain = builder.weight(operand.name or "", builder.activation_type, partial(float32_values, operand))
    tile = builder.shared.tiles.choose(ProductShape(kernel="matmul", rows=rows, n=n, columns=columns))
    builder.launch(
        "matmul",
        node,
        (-(-n // tile.columns) * -(-rows // tile.rows),),
        {
            "N": n,
            "COLUMNS": columns,
            "TILE_ROWS": tile.rows,
            "TILE": tile.columns,
            "TILE_COLUMNS": tile.depth,
            "BAND": 8,
            "KIND": 0,
            "HAS_BIAS": bias is not None,
            "UPCAST": False,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        x=x,
        weight=plain,
        x_scales=None,
        weight_scales=None,
        bias=bias,
        out=out,
        rows=rows,
        x_stride=columns,
        out_stride=n,
    )


def lower_gather(
    builder: ProgramBuilder, node: ir.Node, indices: BufferArgument, table: BufferArgument | None, rows: int
) -> None:
    """Rows of a stored table, or of a buffer where `table` is given."""
    source = node.inputs[0]
    assert source is not None
    assert source.shape is not None
    columns = int(source.shape.numpy()[-1]) if table is None else _static_columns(source)
    out = builder.buffer(node.outputs[0].name or "", rows * columns)
    block = min(1024, next_power_of_two(columns, 16))
    grid, shape = (rows, -(-columns // block)), {"COLUMNS": columns, "BLOCK": block}
    producer = source.producer()
    if table is None and producer is not None and producer.op_type == "DequantizeLinear":
        group = _block(producer, columns)
        codes, scales, zeros = (_operand(producer, index) for index in range(3))
        assert codes is not None
        kind = "u8" if zeros is not None else "i8"
        groups = -(-columns // group)
        builder.launch(
            "gather_quantized_rows",
            node,
            grid,
            {**shape, "GROUP": group, "HAS_ZERO_POINTS": zeros is not None},
            indices=indices,
            codes=builder.weight(f"{codes.name}.rows", kind, partial(_bytes, codes, kind)),
            scales=_scales(builder, scales, groups),
            zero_points=_zero_points(builder, zeros, groups),
            out=out,
            codes_stride=columns,
            scales_stride=groups,
            out_stride=columns,
        )
        return
    plain: Argument = table or builder.weight(
        source.name or "", builder.activation_type, partial(float32_values, source)
    )
    builder.launch(
        "gather_rows",
        node,
        grid,
        shape,
        indices=indices,
        table=plain,
        out=out,
        table_stride=columns,
        out_stride=columns,
    )


def _nbits(
    builder: ProgramBuilder,
    node: ir.Node,
    dequantize: ir.Node,
    x: BufferArgument,
    out: BufferArgument,
    bias: Argument | None,
    shape: tuple[int, int, int],
) -> None:
    """matmul_nbits, and add_splits where the columns are shared out."""
    rows, n, columns = shape
    codes, scales, zeros = (_operand(dequantize, index) for index in range(3))
    assert codes is not None
    assert codes.dtype is not None
    bits, group = int(codes.dtype.bitwidth), _block(dequantize, columns)
    spans, groups = -(-columns // SPAN), -(-columns // group)
    shape_ = ProductShape(kernel="matmul_nbits", rows=rows, n=n, columns=columns, bits=bits, group=group)
    tile = builder.shared.tiles.choose(shape_)
    splits = min(tile.splits, spans)
    parts = builder.buffer(f"{node.name}.parts", splits * rows * n, "fp32") if splits > 1 else out
    builder.launch(
        "matmul_nbits",
        node,
        (-(-n // tile.columns), -(-rows // tile.rows), splits),
        {
            "N": n,
            "COLUMNS": columns,
            "SPANS": spans,
            "GROUP": group,
            "GROUPS": groups,
            "SPLITS": splits,
            "TILE_ROWS": tile.rows,
            "TILE": tile.columns,
            "BITS": bits,
            "HAS_ZERO_POINTS": zeros is not None,
            "HAS_BIAS": bias is not None,
            "SCALE_WEIGHTS": rows > FEW_ROWS,
            "DTYPE": builder.activation_type,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        x=x,
        codes=builder.weight(f"{codes.name}.spans", "u8", partial(_spans, codes, bits, spans)),
        scales=_scales(builder, scales, groups),
        zero_points=_zero_points(builder, zeros, groups),
        bias=bias,
        out=parts,
        rows=rows,
        x_stride=columns,
        out_stride=n,
    )
    if splits > 1:
        block = min(1024, next_power_of_two(n, 16))
        builder.launch(
            "add_splits",
            node,
            (rows, -(-n // block)),
            {"N": n, "SPLITS": splits, "BLOCK": block, "HAS_BIAS": bias is not None},
            parts=parts,
            bias=bias,
            out=out,
            rows=rows,
            out_stride=n,
        )


def _block(dequantize: ir.Node, columns: int) -> int:
    """Columns that share a scale; whole spans where a row has one."""
    block = dequantize.attributes.get_int("block_size", 0) or -(-columns // SPAN) * SPAN
    if block % (SPAN // 2):
        raise PassError(
            f"{dequantize.name!r} has blocks of {block}; the CUDA kernels take multiples of {SPAN // 2}: set block_size"
            " to 32, 64, 128 or channel"
        )
    return block


def _spans(codes: ir.Value, bits: int, spans: int) -> NDArray[np.uint8]:
    """Codes as matmul_nbits reads them: [n, spans * 8 * bits], offset binary where they are signed."""
    unsigned = _unsigned(codes, bits)
    padded = np.pad(unsigned, ((0, 0), (0, spans * SPAN - unsigned.shape[1])))
    if bits == 8:
        return padded
    halves = padded.reshape(len(padded), spans, 2, SPAN // 2)
    packed: NDArray[np.uint8] = halves[:, :, 0] | halves[:, :, 1] << np.uint8(4)
    return packed.reshape(len(padded), -1)


def _unsigned(codes: ir.Value, bits: int) -> NDArray[np.uint8]:
    assert codes.const_value is not None
    values = np.asarray(codes.const_value.numpy()).astype(np.int16)
    signed = codes.dtype in (ir.DataType.INT4, ir.DataType.INT8)
    return (values + (1 << (bits - 1) if signed else 0)).astype(np.uint8)


def _bytes(codes: ir.Value, kind: str) -> NDArray[Any]:
    assert codes.const_value is not None
    return np.asarray(codes.const_value.numpy()).astype(np.int8 if kind == "i8" else np.uint8)


def _scales(builder: ProgramBuilder, scales: ir.Value | None, groups: int) -> Argument:
    assert scales is not None
    return builder.weight(scales.name or "", "fp32", lambda: as_float(_stored(scales)).reshape(-1, groups))


def _zero_points(builder: ProgramBuilder, zeros: ir.Value | None, groups: int) -> Argument | None:
    if zeros is None:
        return None
    return builder.weight(zeros.name or "", "u8", lambda: _stored(zeros).astype(np.uint8).reshape(-1, groups))


def _bias(builder: ProgramBuilder, node: ir.Node) -> Argument | None:
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if bias is None:
        return None
    return builder.weight(bias.name or "", builder.activation_type, lambda: float32_values(bias))


def _operand(node: ir.Node, index: int) -> ir.Value | None:
    return node.inputs[index] if index < len(node.inputs) else None


def _stored(value: ir.Value) -> NDArray[np.generic]:
    assert value.const_value is not None
    return np.asarray(value.const_value.numpy())


def _static_columns(value: ir.Value) -> int:
    assert value.shape is not None
    columns = value.shape[-1]
    assert isinstance(columns, int)
    return columns
