"""The pass lower-onnxruntime-cpu: the IR in the ops that onnxruntime's CPU provider runs best.

    Matched                                                  Replacement
    Gemm(x, DequantizeLinear(q, s, z?), b?, transB=1)        com.microsoft::MatMulNBits(x, B, scales, zero_points?, b?)
    Gather(DequantizeLinear(q, s, z?), ids)                  com.microsoft::GatherBlockQuantized(B, ids, scales, ...)
    Gather(Cast(W16), ids), the only reader of W16           Cast(Gather(W16, ids))
    Cast(W16), any other                                     initializer in float32, widened when it is written
    Gemm(x, W32, b?, transB=1)                               unchanged
    RotaryEmbedding over [1, T, W]                           over [T, 1, W], see rotary_rows.py
    Gemm(x', DequantizeLinear(int8 per channel), b?)         com.microsoft::QGemm, where x' is quantized to int8 too,
                                                             see integer_matmul.py
    DequantizeLinear(float8, s), a weight                    Mul(Cast(float8), s), which the engine computes at load,
                                                             see weight_nodes.py

A table and a head that share one quantized tensor keep sharing its bytes. Where the last block is partial,
GatherBlockQuantized makes whole blocks of columns and a Slice drops the padding. onnxruntime has no CPU kernels for
16-bit floats, so all other weights are widened.

Numerics. GatherBlockQuantized and the widening are exact. MatMulNBits with accuracy_level 4 rounds the activations to
int8, block by block: about 5e-3 of the largest result away from the exact one, whatever the weights' bits.
accuracy_level 0 keeps them float32 (1e-6), is about three times slower with 4 bits, and some hundred times with 8.

Batch invariance (onnxruntime 1.31.1, AVX-512 with VNNI, 1 and 2 threads, 1 to 512 rows; table in docs/log.md). A row's
result is the same to the last bit whatever the other rows: always for float32 Gemm, for 4 bits with blocks of 16 and
32, and for 8 bits with blocks of 16, 32 and 64. In every other form another kernel computes the last row of an odd
number of rows (at level 0: of some). An executor that pads to an even number, tokens and rows of logits alike, gets the
same bits in all forms. Other CPUs have other kernels, so it must check that when it starts.

Refuses: a quantized weight that is read by anything but a Gemm or the embedding's Gather; 16-bit floats that are
computed rather than stored.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import onnx_ir as ir

from ingot.errors import PassError
from ingot.passes.base import Pass, PassKind
from ingot.passes.lowering.integer_matmul import lower_integer_matmuls
from ingot.passes.lowering.nbits_packing import BLOCKS_KEY, PER_CHANNEL, UnpackedWeight
from ingot.passes.lowering.rotary_rows import put_tokens_on_batch_axis
from ingot.passes.quantization.activation_nodes import ACTIVATIONS_KEY
from ingot.passes.quantization.schemes import require_used_schemes
from ingot.passes.quantization.weight_nodes import BITS_KEY, float_value, widen_float8_weights
from ingot.passes.rewriting import add_initializer, require_plain_gemm
from ingot.passes.weights import apply_to_array, drop_if_unused

MICROSOFT = "com.microsoft"
_SIXTEEN_BITS = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@dataclass(frozen=True)
class LowerOnnxruntimeCpu(Pass):
    """Options:

    accuracy_level    4 rounds activations to int8, which is fast; 0 keeps them float32, which shows the weights' error
                      alone
    """

    name: ClassVar[str] = "lower-onnxruntime-cpu"
    kind: ClassVar[PassKind] = "lowering"
    summary: ClassVar[str] = "Turns quantized and 16-bit weights into what onnxruntime runs best on a CPU."

    accuracy_level: Literal[0, 4] = 4

    def requires(self, model: ir.Model) -> None:
        """No weight has a scheme that no pass applied."""
        require_used_schemes(model)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Lower quantized weights first, then the remaining 16-bit ones."""
        modified = put_tokens_on_batch_axis(model.graph)
        modified |= lower_integer_matmuls(model.graph)
        modified |= widen_float8_weights(model.graph)
        for node in list(model.graph):
            if node.op_type == "DequantizeLinear" and ACTIVATIONS_KEY not in node.metadata_props:
                self._lower_quantized(model.graph, node)
                modified = True
        for node in list(model.graph):
            if _widens_weight(node):
                _lower_cast(model.graph, node)
                modified = True
        if modified:
            model.graph.opset_imports.setdefault(MICROSOFT, 1)
        return ir.passes.PassResult(model, modified)

    def ensures(self, model: ir.Model) -> None:
        """No op but Gather and Cast reads 16-bit floats: the engine has no kernels for them."""
        for node in model.graph:
            for value in node.inputs:
                if node.op_type not in ("Gather", "Cast") and value is not None and value.dtype in _SIXTEEN_BITS:
                    raise PassError(f"{node.name!r} reads {value.name!r}, 16-bit floats; the CPU computes in float32")

    def _lower_quantized(self, graph: ir.Graph, dequantize: ir.Node) -> None:
        """Replace every reader of a dequantized weight, then the DequantizeLinear and its initializers."""
        weight, uses = UnpackedWeight.read(dequantize), list(dequantize.outputs[0].uses())
        facts = _facts_for_reader(dequantize)
        for node, index in uses:
            if (node.op_type, index) not in (("Gemm", 1), ("Gather", 0)):
                raise PassError(
                    f"{self.name}: {node.name!r} ({node.op_type}) reads the quantized weight {weight.name!r}; "
                    "onnxruntime has kernels for a quantized weight of a Gemm and of the embedding's Gather only"
                )
            require_plain_gemm(node)
        old, tensors = [value for value in dequantize.inputs if value is not None], _Tensors(graph, weight)
        for node, _ in uses:
            node.replace_input_with(1 if node.op_type == "Gemm" else 0, None)
        graph.remove(dequantize, safe=True)
        for value in old:
            drop_if_unused(graph, value)
        for node, _ in uses:
            lowered = self._matmul(node, tensors) if node.op_type == "Gemm" else _gather(node, tensors)
            lowered[0].metadata_props.update(facts)
            _replace(graph, node, lowered)

    def _matmul(self, gemm: ir.Node, tensors: "_Tensors") -> list[ir.Node]:
        weight = tensors.weight
        bias = gemm.inputs[2] if len(gemm.inputs) > 2 else None
        inputs = [gemm.inputs[0], tensors.codes, tensors.scales, tensors.zero_points, None, bias]
        attributes = {
            "K": weight.columns,
            "N": weight.rows,
            "bits": weight.bits,
            "block_size": weight.block_size,
            "accuracy_level": self.accuracy_level,
        }
        return [ir.node("MatMulNBits", _trimmed(inputs), attributes, domain=MICROSOFT, name=gemm.name)]


def _facts_for_reader(dequantize: ir.Node) -> dict[str, str]:
    """Metadata for the node that reads the packed operands, which do not show these: see nbits_packing.py."""
    facts = {key: value for key, value in dequantize.metadata_props.items() if key == BITS_KEY}
    scale = dequantize.inputs[1]
    if scale is not None and scale.shape is not None and len(scale.shape) == 1:
        facts[BLOCKS_KEY] = PER_CHANNEL
    return facts


class _Tensors:
    """The packed initializers of one weight, each registered on first use."""

    def __init__(self, graph: ir.Graph, weight: UnpackedWeight) -> None:
        self._graph = graph
        self.weight = weight

    @property
    def codes(self) -> ir.Value:
        return self.add(self.weight.packed_codes())

    @property
    def rows(self) -> ir.Value:
        return self.add(self.weight.packed_rows())

    @property
    def scales(self) -> ir.Value:
        return self.add(self.weight.packed_scales())

    @property
    def zero_points(self) -> ir.Value | None:
        tensor = self.weight.packed_zero_points()
        return None if tensor is None else self.add(tensor)

    def add(self, tensor: ir.TensorProtocol) -> ir.Value:
        """Register a tensor once."""
        known = self._graph.initializers.get(tensor.name or "")
        return known if known is not None else add_initializer(self._graph, tensor)


def _gather(gather: ir.Node, tensors: _Tensors) -> list[ir.Node]:
    """GatherBlockQuantized, and a Slice where the last block is partial."""
    weight, path = tensors.weight, gather.name or ""
    inputs = [tensors.rows, gather.inputs[1], tensors.scales, tensors.zero_points]
    attributes = {"bits": weight.bits, "block_size": weight.block_size, "gather_axis": 0, "quantize_axis": 1}
    padded = weight.num_blocks * weight.block_size
    is_whole = padded == weight.columns
    blocks = ir.node(
        "GatherBlockQuantized",
        _trimmed(inputs),
        attributes,
        domain=MICROSOFT,
        name=path if is_whole else f"{path}.blocks",
        outputs=[float_value(f"{path}.blocks", ("T", padded))],
    )
    if is_whole:
        return [blocks]
    bounds = [tensors.add(_integer(f"{path}.{name}", at)) for name, at in _columns_from_zero_to(weight.columns)]
    return [blocks, ir.node("Slice", [blocks.outputs[0], *bounds], name=path)]


def _columns_from_zero_to(end: int) -> Iterator[tuple[str, int]]:
    """Names and values of Slice's operands, in order."""
    yield from (("starts", 0), ("ends", end), ("axes", 1))


def _integer(name: str, number: int) -> ir.TensorProtocol:
    return ir.Tensor(np.array([number], np.int64), name=name)


def _trimmed(inputs: list[ir.Value | None]) -> list[ir.Value | None]:
    """The inputs without absent ones at the end."""
    while inputs[-1] is None:
        inputs = inputs[:-1]
    return inputs


def _replace(graph: ir.Graph, old: ir.Node, new: list[ir.Node]) -> None:
    """Put nodes in the place of one; the last one's output takes over its name, uses and type."""
    ir.convenience.replace_nodes_and_values(graph, old, [old], new, [old.outputs[0]], [new[-1].outputs[0]])


def _widens_weight(node: ir.Node) -> bool:
    source = node.inputs[0] if node.op_type == "Cast" else None
    return source is not None and source.is_initializer() and source.dtype in _SIXTEEN_BITS


def _lower_cast(graph: ir.Graph, cast: ir.Node) -> None:
    """Widen a Gather's rows when they are read, and any other weight when the program is written."""
    source, wide = cast.inputs[0], cast.outputs[0]
    assert source is not None
    readers = [node for node, _ in wide.uses()]
    if len(source.uses()) == 1 and readers and all(node.op_type == "Gather" for node in readers):
        for gather in readers:
            _cast_rows(graph, gather, source)
    else:
        wide.replace_all_uses_with(_widened(graph, source))
    drop_if_unused(graph, wide)


def _cast_rows(graph: ir.Graph, gather: ir.Node, table: ir.Value) -> None:
    """Gather(Cast(W16), ids) -> Cast(Gather(W16, ids))."""
    path, shape, dtype = gather.name or "", gather.outputs[0].shape, table.dtype
    assert dtype is not None
    rows = ir.Value(name=f"{path}.stored", type=ir.TensorType(dtype), shape=shape)
    attributes = [*gather.attributes.values()]
    stored = ir.Node("", "Gather", [table, gather.inputs[1]], attributes, name=f"{path}.stored", outputs=[rows])
    _replace(graph, gather, [stored, ir.node("Cast", [rows], {"to": ir.DataType.FLOAT}, name=path)])


def _widened(graph: ir.Graph, source: ir.Value) -> ir.Value:
    """A lazy float32 initializer that reads the 16-bit one when the program is written."""
    name, tensor = f"{source.name}.float32", source.const_value
    assert tensor is not None
    if name in graph.initializers:
        return graph.initializers[name]

    def widen() -> ir.TensorProtocol:
        return ir.Tensor(apply_to_array(tensor, lambda values: values.astype(np.float32)))

    return add_initializer(graph, ir.LazyTensor(widen, ir.DataType.FLOAT, ir.Shape(tensor.shape.numpy()), name=name))
