"""A small builder over onnx_ir: one call per node, its output's shape on the same line.

A quantized checkpoint's weights become tensors of the IR that are decoded each time they are read, scales and zero
points at once. Nothing large is held: a pass or writer that reads a weight has it decoded, uses it, and drops it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.errors import ConfigError
from ingot.passes.quantization.weight_nodes import code_tensor, mark_bits
from ingot.passes.weights import apply_to_array
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.encoded_values import EncodedValues
from ingot.pipeline.checkpoint.formats.decoded import EncodedTensor
from ingot.pipeline.checkpoint.formats.exact_forms import DequantizeOperands, dequantize_operands

OPSETS = {"": 24, "com.microsoft": 1, "ingot": 1}
IR_VERSION = 11
MADE_BY = "import"
Dims = Sequence[int | str]
Rewrite = Callable[[NDArray[Any]], NDArray[Any]]


def dims(value: ir.Value) -> list[int | str]:
    """The value's shape as plain ints and names."""
    assert value.shape is not None
    return [dim if isinstance(dim, int) else str(dim.value) for dim in value.shape]


class GraphBuilder:
    """Builds one graph. A node and its output have the same readable path as name.

    Shapes are lists of ints and names of symbolic dimensions: ["T", 64].
    """

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self.checkpoint = checkpoint
        self.graph = ir.Graph([], [], nodes=[], opset_imports=dict(OPSETS), name=name)
        self.encoded_values = EncodedValues(checkpoint.quantization)
        self.dequantized: dict[str, str] = {}  # weight -> why the IR holds floats instead of its codes
        self.whole: set[str] = set()  # tensors of the checkpoint that are weights as they are, or transposed
        self._widened: dict[str, ir.Value] = {}

    def input(self, name: str, dtype: ir.DataType, shape: Dims) -> ir.Value:
        """A graph input."""
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        self.graph.inputs.append(value)
        return value

    def output(self, value: ir.Value) -> None:
        """Make the value a graph output."""
        self.graph.outputs.append(value)

    def constant(self, name: str, array: NDArray[np.generic]) -> ir.Value:
        """An initializer that holds the array; the same name again returns the same value."""
        if name not in self.graph.initializers:
            self._initializer(ir.tensor(array, name=name))
        return self.graph.initializers[name]

    def scalar(self, number: float) -> ir.Value:
        """A float32 constant of rank 0."""
        return self.constant(f"scalar.{number!r}", np.array(number, np.float32))

    def integers(self, *numbers: int) -> ir.Value:
        """An int64 constant of rank 1: axes, shapes, splits."""
        return self.constant("integers." + ".".join(map(str, numbers)), np.array(numbers, np.int64))

    def weight(self, name: str) -> ir.Value:
        """The checkpoint's tensor as float32: the initializer itself, or the Cast of one in 16 bits, or the
        DequantizeLinear of a quantized one."""
        self.whole.add(name)
        if name in self.checkpoint.encoded:
            return self._encoded(self.checkpoint.encoded[name])
        if name not in self.graph.initializers:
            self._initializer(self.checkpoint.external(name))
        return self._as_float32(name)

    def _as_float32(self, name: str) -> ir.Value:
        stored = self.graph.initializers[name]
        if stored.dtype == ir.DataType.FLOAT:
            return stored
        if name not in self._widened:
            cast = f"{name}.float32"
            self._widened[name] = self.op("Cast", cast, [stored], dims(stored), to=ir.DataType.FLOAT)
        return self._widened[name]

    def weight_slice(self, name: str, index: int, start: int, rows: int, part: str) -> ir.Value:
        """Rows of one matrix of a tensor [matrices, rows, columns] as float32, under the name `part`.

        ConfigError for a quantized tensor, whose matrices are not read one by one.
        """
        self._refuse_encoded_experts(name)
        if part not in self.graph.initializers:
            self._initializer(self.checkpoint.external_slice(name, index, start, rows, part))
        return self._as_float32(part)

    def row_slice(self, name: str, start: int, rows: int, part: str, transposed: bool = False) -> ir.Value:
        """Rows start .. start + rows of a matrix as float32, or those rows transposed, under the name `part`."""
        if part not in self.graph.initializers:
            stored = self.checkpoint.external_slice(name, 0, start, rows, part)
            if transposed:
                make = partial(_rewritten, stored, np.transpose)
                shape = ir.Shape(stored.shape.numpy()[::-1])
                self._initializer(ir.LazyTensor(make, stored.dtype, shape, name=part))
            else:
                self._initializer(stored)
        return self._as_float32(part)

    def transposed_slice(self, name: str, index: int, chosen: range, part: str) -> ir.Value:
        """Rows of the transposed matrix `index` of a tensor [matrices, in, out], as float32 or codes, named `part`."""
        if name in self.checkpoint.encoded:
            source = self.checkpoint.encoded[name]
            return self._encoded(source.matrix(index, part, np.array(chosen)))
        if part not in self.graph.initializers:
            _, columns, _ = self.checkpoint.tensor(name).shape
            stored = self.checkpoint.external_slice(name, index, 0, columns, part)
            shape = ir.Shape([len(chosen), columns])
            make = partial(_rewritten, stored, partial(_rows_of_transposed, chosen))
            self._initializer(ir.LazyTensor(make, stored.dtype, shape, name=part))
        return self._as_float32(part)

    def weight_rows(self, name: str, rows: NDArray[np.intp], part: str) -> ir.Value:
        """Rows of a stored matrix [out, in] as float32 or codes, named `part`; read when they are used."""
        if name in self.checkpoint.encoded:
            return self._encoded(self.checkpoint.encoded[name].chosen_rows(rows, part))
        if part not in self.graph.initializers:
            stored = self.checkpoint.external(name)
            shape = ir.Shape([len(rows), *stored.shape.numpy()[1:]])
            make = partial(_rewritten, stored, lambda matrix: matrix[rows])
            self._initializer(ir.LazyTensor(make, stored.dtype, shape, name=part))
        return self._as_float32(part)

    def computed(self, part: str, names: Sequence[str], compute: Callable[..., NDArray[Any]]) -> ir.Value:
        """An initializer in float32 that is computed from small tensors of the checkpoint each time it is read."""
        if part not in self.graph.initializers:
            stored = [self.checkpoint.external(name) for name in names]
            shape = ir.Shape(compute(*(np.zeros(tensor.shape.numpy(), np.float32) for tensor in stored)).shape)
            make = partial(_computed, stored, compute, part)
            self._initializer(ir.LazyTensor(make, ir.DataType.FLOAT, shape, name=part))
        return self.graph.initializers[part]

    def vector_slice(self, name: str, index: int, chosen: range, part: str) -> ir.Value:
        """Elements of row `index` of a tensor [rows, elements] as an initializer in float32, named `part`."""
        return self._vector(name, part, lambda rows: rows[index, _slice(chosen)])

    def vector(self, name: str) -> ir.Value:
        """The checkpoint's small tensor as an initializer in float32, without a Cast; widened each time it is read."""
        return self._vector(name, name, lambda values: values)

    def scaled(self, name: str, factor: float, part: str) -> ir.Value:
        """The checkpoint's small tensor times a number, in float32, as an initializer named `part`."""
        return self._vector(name, part, lambda values: values.astype(np.float32) * np.float32(factor))

    def scaled_slice(self, name: str, index: int, scales: str, part: str) -> ir.Value:
        """Matrix `index` of a tensor [matrices, rows, columns], times that number of the tensor `scales`."""
        self._refuse_encoded_experts(name)
        if part not in self.graph.initializers:
            _, rows, columns = self.checkpoint.tensor(name).shape
            stored = self.checkpoint.external_slice(name, index, 0, rows, part)
            numbers = self.checkpoint.external(scales)
            make = partial(_scaled, stored, numbers, index)
            self._initializer(ir.LazyTensor(make, ir.DataType.FLOAT, ir.Shape([rows, columns]), name=part))
        return self.graph.initializers[part]

    def _refuse_encoded_experts(self, name: str) -> None:
        if name in self.checkpoint.encoded:
            raise ConfigError(
                f"{self.checkpoint.config_file}: {name} holds all experts of a layer and is quantized, which Ingot "
                "reads in 16 or 32 bits only: import the model that it was made from"
            )

    def _vector(self, name: str, part: str, choose: Rewrite) -> ir.Value:
        if part not in self.graph.initializers:
            stored = self.checkpoint.external(name)
            shape = ir.Shape(choose(np.empty(stored.shape.numpy(), np.bool_)).shape)
            make = partial(_widened, stored, choose, part)
            self._initializer(ir.LazyTensor(make, ir.DataType.FLOAT, shape, name=part))
        return self.graph.initializers[part]

    def rewritten_weight(self, name: str, shape: Dims, rewrite: Rewrite) -> ir.Value:
        """The checkpoint's tensor in another arrangement, made each time it is read, as float32.

        ConfigError for a quantized weight, whose codes are not rearranged.
        """
        if name in self.checkpoint.encoded:
            raise ConfigError(
                f"{self.checkpoint.config_file}: {name} is quantized; in this model_type its elements are stored in "
                "another order than they are computed in, which Ingot reads in 16 or 32 bits only: import the model "
                "that it was made from"
            )
        if name not in self.graph.initializers:
            if rewrite is np.transpose:
                self.whole.add(name)
            stored = self.checkpoint.external(name)
            make = partial(_rewritten, stored, rewrite)
            self._initializer(ir.LazyTensor(make, stored.dtype, ir.Shape(shape), name=name))
        return self._as_float32(name)

    def op(
        self,
        op_type: str,
        name: str,
        inputs: Sequence[ir.Value | None],
        shape: Dims,
        domain: str = "",
        **attributes: int | float | str,
    ) -> ir.Value:
        """Append a node with one float32 output of the given shape; the output is named as the node."""
        return self.multi_op(op_type, name, inputs, {name: shape}, domain, **attributes)[0]

    def multi_op(
        self,
        op_type: str,
        name: str,
        inputs: Sequence[ir.Value | None],
        outputs: dict[str, Dims],
        domain: str = "",
        **attributes: int | float | str,
    ) -> Sequence[ir.Value]:
        """Append a node with several float32 outputs, name -> shape."""
        values = [
            ir.Value(name=output, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))
            for output, shape in outputs.items()
        ]
        node = ir.node(op_type, list(inputs), attributes, domain=domain, outputs=values, name=name)
        node.metadata_props["ingot.pass"] = MADE_BY
        self.graph.append(node)
        return node.outputs

    def _encoded(self, source: EncodedTensor) -> ir.Value:
        """Add a quantized weight. It is decoded once to find its form, and again whenever its codes are read."""
        if source.name not in self._widened:
            form = dequantize_operands(self.encoded_values.read(source))
            self._widened[source.name] = (
                self._floats(source, form) if isinstance(form, str) else self._quantized(source, form)
            )
        return self._widened[source.name]

    def _floats(self, source: EncodedTensor, reason: str) -> ir.Value:
        self.dequantized[source.name] = reason
        self._initializer(float_tensor(source))
        return self.graph.initializers[source.name]

    def _quantized(self, source: EncodedTensor, form: DequantizeOperands) -> ir.Value:
        tensors = form_tensors(source, form)
        for tensor in tensors:
            self._initializer(tensor)
        inputs = [self.graph.initializers[tensor.name or ""] for tensor in tensors]
        path = f"{source.name.removesuffix('.weight')}.dequantize"
        outputs: dict[str, Dims] = {f"{source.name}.dequantized": source.shape}
        if form.block_size:
            made = self.multi_op("DequantizeLinear", path, inputs, outputs, axis=1, block_size=form.block_size)[0]
        else:
            made = self.multi_op("DequantizeLinear", path, inputs, outputs, axis=0)[0]
        node = made.producer()
        assert node is not None
        mark_bits(node, form.bits)
        return made

    def _initializer(self, tensor: ir.TensorProtocol) -> None:
        value = ir.Value(
            name=tensor.name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()), const_value=tensor
        )
        self.graph.initializers.add(value)


def form_tensors(source: EncodedTensor, form: DequantizeOperands) -> list[ir.TensorProtocol]:
    """The operands of DequantizeLinear: codes, scale and, when asymmetric, zero point."""
    name = source.name
    tensors: list[ir.TensorProtocol] = [_lazy_codes(source, form), ir.Tensor(form.scale, name=f"{name}.scale")]
    if form.zero_point is not None:
        tensors.append(code_tensor(form.zero_point, form.bits, f"{name}.zero_point"))
    return tensors


def float_tensor(source: EncodedTensor) -> ir.LazyTensor:
    """The weight as float32, decoded each time it is read."""
    return ir.LazyTensor(
        lambda: ir.Tensor(source.dequantize()), ir.DataType.FLOAT, ir.Shape(source.shape), name=source.name
    )


def _lazy_codes(source: EncodedTensor, form: DequantizeOperands) -> ir.LazyTensor:
    name, shape = f"{source.name}.q", ir.Shape(source.shape)
    kind = "INT" if form.zero_point is None else "UINT"

    def decode() -> ir.TensorProtocol:
        again = dequantize_operands(source.read())
        assert isinstance(again, DequantizeOperands), "the weight had these operands when the model was imported"
        return code_tensor(again.codes, again.bits, name)

    return ir.LazyTensor(decode, ir.DataType[f"{kind}{max(form.bits, 4)}"], shape, name=name)


def _widened(stored: ir.TensorProtocol, choose: Rewrite, name: str) -> ir.TensorProtocol:
    return ir.Tensor(apply_to_array(stored, lambda array: choose(array).astype(np.float32)), name=name)


def _scaled(stored: ir.TensorProtocol, numbers: ir.TensorProtocol, index: int) -> ir.TensorProtocol:
    scale = apply_to_array(numbers, lambda array: array[index].astype(np.float32))
    return ir.Tensor(apply_to_array(stored, lambda array: array.astype(np.float32) * scale), name=stored.name)


def _rows_of_transposed(chosen: range, matrix: NDArray[Any]) -> NDArray[Any]:
    return matrix.T[_slice(chosen)]


def _slice(chosen: range) -> slice:
    return slice(chosen.start, chosen.stop, chosen.step)


def _computed(
    stored: Sequence[ir.TensorProtocol], compute: Callable[..., NDArray[Any]], name: str
) -> ir.TensorProtocol:
    values = [apply_to_array(tensor, lambda array: array.astype(np.float32)) for tensor in stored]
    return ir.Tensor(np.ascontiguousarray(compute(*values), np.float32), name=name)


def _rewritten(stored: ir.TensorProtocol, rewrite: Rewrite) -> ir.TensorProtocol:
    values = apply_to_array(stored, lambda array: np.array(rewrite(array)))
    return ir.Tensor(values, stored.dtype, name=stored.name)
