"""Linear layers and look-ups in the forms of onnxruntime's CUDA provider.

    plain                  Gemm(x, W, b)
    2, 4, 8 bit codes      com.microsoft::MatMulNBits(x, codes, scales, zero_points?, b?), scales in the compute dtype
    float8 codes           Gemm(x, W, b), W stored in the compute dtype: the provider would write W out in each step
    x quantized to 8 bits  rounded to its codes and back before any of these: the products are in the compute dtype
    quantized table        com.microsoft::GatherBlockQuantized(codes, ids, scales, zero_points?), cut to whole columns

All weights are inputs of the segment. The provider could repack constants of MatMulNBits for kernels of CUTLASS
(ORT_FPA_INTB_GEMM, off by default); as inputs they are stored once, wherever they are read, and all layers of one shape
share a session, which is what a card has to hold workspaces for.

Quantized weights as inputs of a segment: the layout of MatMulNBits and GatherBlockQuantized, scales in its dtype.

A table that is the head, too, has the same bytes in both: one weight of the program, shown in two shapes.

Builds the ONNX model of one segment for onnxruntime's CUDA provider: as for TensorRT, with Microsoft's operators.

The provider computes ReduceMax by cuDNN, which it needs for nothing else here: the largest of a row comes from TopK.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.errors import PassError
from ingot.passes.lowering.lower_onnxruntime_cpu import MICROSOFT
from ingot.passes.lowering.nbits_packing import UnpackedWeight
from ingot.passes.quantization.activation_quantization import dequantizer
from ingot.passes.weights import float32_values, is_stored
from ingot.pipeline.targets.segments.activation_codes import quantized_rows
from ingot.pipeline.targets.segments.builder import Compute, Dims, SegmentBuilder, dims
from ingot.pipeline.targets.segments.linear import plain_linear


class OrtSegmentBuilder(SegmentBuilder):
    """The segment so far."""

    @classmethod
    def of(cls, nodes: Iterable[ir.Node], compute: Compute) -> "OrtSegmentBuilder":
        """An empty segment for these nodes of the IR."""
        made = super().of(nodes, compute)
        assert isinstance(made, OrtSegmentBuilder)
        made.graph.opset_imports[MICROSOFT] = 1
        return made

    def emit(
        self,
        op_type: str,
        name: str,
        inputs: Sequence[ir.Value | None],
        shape: Dims,
        dtype: ir.DataType | None = None,
        **attributes: Any,
    ) -> ir.Value:
        """Append a node with one output; it has the node's name."""
        if op_type == "ReduceMax":
            return self._largest(name, inputs, shape, **attributes)
        return super().emit(op_type, name, inputs, shape, dtype, **attributes)

    def emit_microsoft(
        self, op_type: str, name: str, inputs: Sequence[ir.Value | None], shape: Dims, **attributes: int
    ) -> ir.Value:
        """Append a node of com.microsoft with one output; absent inputs at the end are left out."""
        given = list(inputs)
        while given[-1] is None:
            given.pop()
        return self.append(op_type, name, given, [(name, shape, self.dtype)], attributes, MICROSOFT)[0]

    def _largest(self, name: str, inputs: Sequence[ir.Value | None], shape: Dims, keepdims: int = 1) -> ir.Value:
        """The largest of each row [T, 1]. ReduceMax gives its axes as the second input."""
        assert keepdims == 1
        assert shape[-1] == 1
        outputs = [(name, shape, self.dtype), (f"{name}.places", shape, ir.DataType.INT64)]
        return self.append("TopK", name, [inputs[0], self.integers(1)], outputs, {"axis": -1, "sorted": 0})[0]


_BYTES = ir.DataType.UINT8
_FLOAT8 = ir.DataType.FLOAT8E4M3FN


def weight_dequantizer(operand: ir.Value | None) -> ir.Node | None:
    """The DequantizeLinear over stored codes that makes an operand."""
    producer = None if operand is None else operand.producer()
    if operand is None or producer is None or producer.op_type != "DequantizeLinear":
        return None
    return producer if is_stored(operand) else None


def is_float8(dequantize: ir.Node) -> bool:
    """Whether the codes are 8-bit floats, which neither operator takes."""
    codes = dequantize.inputs[0]
    return codes is not None and codes.dtype == _FLOAT8


@dataclass(frozen=True)
class SegmentWeight:
    """A quantized weight within a segment."""

    b: OrtSegmentBuilder
    weight: UnpackedWeight

    @property
    def codes(self) -> ir.Value:
        """Of a matmul: [out, blocks, bytes of a block]."""
        return self._input("codes", self.weight.packed_codes(), _BYTES)

    @property
    def rows(self) -> ir.Value:
        """Of a look-up: [rows, bytes of a row]."""
        return self._input("codes", self.weight.packed_rows(), _BYTES)

    @property
    def scales(self) -> ir.Value:
        """[out, blocks]."""
        return self._input("scales", self.weight.packed_scales(), self.b.dtype)

    @property
    def zero_points(self) -> ir.Value | None:
        """[out, bytes of a row's]; None: symmetric."""
        points = self.weight.packed_zero_points()
        return None if points is None else self._input("zero_points", points, _BYTES)

    def _input(self, part: str, tensor: ir.TensorProtocol, dtype: ir.DataType) -> ir.Value:
        def make() -> NDArray[np.generic]:
            return np.asarray(tensor.numpy())

        name = f"{self.weight.name}.nbits.{part}"  # kernels store the same codes in layouts of their own
        return self.b.weight(name, dtype, tuple(int(size) for size in tensor.shape.numpy()), make)


Read = Callable[[ir.Value], ir.Value]

_LOG = logging.getLogger("ingot.ort_cuda")


def lower_linear(b: OrtSegmentBuilder, node: ir.Node, read: Read) -> ir.Value:
    """y = x @ W^T + b in the compute dtype; `read` gives the segment's value for one of the IR's."""
    x = _activations(b, node, read)
    dequantize = weight_dequantizer(node.inputs[1])
    if dequantize is None:
        return plain_linear(b, node, x)
    if is_float8(dequantize):
        _LOG.info("%s: onnxruntime has no float8 matmul for it; the weight is stored in %s", node.name, b.compute)
        return plain_linear(b, node, x)
    return _nbits(b, node, SegmentWeight(b, UnpackedWeight.read(dequantize)), x)


def lower_lookup(b: OrtSegmentBuilder, node: ir.Node, dequantize: ir.Node, ids: ir.Value) -> ir.Value:
    """Rows of a quantized table."""
    given = SegmentWeight(b, UnpackedWeight.read(dequantize))
    weight, shape, path = given.weight, dims(node.outputs[0]), node.name or ""
    padded = weight.num_blocks * weight.block_size
    is_whole = padded == weight.columns
    sizes = {"bits": weight.bits, "block_size": weight.block_size, "gather_axis": 0, "quantize_axis": 1}
    inputs = [given.rows, ids, given.scales, given.zero_points]
    rows = b.emit_microsoft(
        "GatherBlockQuantized", path if is_whole else f"{path}.blocks", inputs, [shape[0], padded], **sizes
    )
    if is_whole:
        return rows
    bounds = [b.integers(number) for number in (0, weight.columns, 1)]
    return b.emit("Slice", path, [rows, *bounds], shape)


def _activations(b: OrtSegmentBuilder, node: ir.Node, read: Read) -> ir.Value:
    source = dequantizer(node)
    if source is None:
        assert node.inputs[0] is not None
        return read(node.inputs[0])
    if b.compute == "bf16":
        raise PassError(
            f"{node.name!r} reads activations in 8 bits, which onnxruntime's CUDA provider makes from float16 and "
            "float32 alone; set gpu.activations to float16"
        )
    return quantized_rows(b, source, read)


def _nbits(b: OrtSegmentBuilder, node: ir.Node, given: SegmentWeight, x: ir.Value) -> ir.Value:
    weight, bias = given.weight, node.inputs[2] if len(node.inputs) > 2 else None
    vector = None
    if bias is not None:
        vector = b.weight(bias.name or "", b.dtype, (weight.rows,), lambda: float32_values(bias))
    inputs = [x, given.codes, given.scales, given.zero_points, None, vector]
    sizes = {"K": weight.columns, "N": weight.rows, "bits": weight.bits, "block_size": weight.block_size}
    return b.emit_microsoft("MatMulNBits", node.name or "", inputs, dims(node.outputs[0]), **sizes)
