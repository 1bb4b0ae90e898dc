"""The weights of a CPU launch program, unpacked from their tiles: the operands of its operations.

A gate and an up projection that share a matrix of pairs are two weights; one packed gate_up_proj is one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx_ir as ir

from ingot.artifact import Artifact
from ingot.artifact.cpu_program import BITS, WEIGHTS_FILE, Embed, ExpertLayer, Linear, Matrix, layers_of
from ingot.artifact.cpu_program_checks import read_operations
from ingot.artifact.safetensors import MappedTensors
from ingot.errors import UsageError
from ingot.pipeline.checkpoint.formats.activations import ActivationScheme
from ingot.pipeline.checkpoint.formats.decoded import DecodedWeight
from ingot.pipeline.targets.cpu.matrices import OTHER, PAIRS, TRANSPOSED
from ingot.pipeline.targets.cpu.packing import MatrixArrays, default_zero, unpack_tiles
from ingot.pipeline.targets.segments.weight_operands import Codes, Operand, weight_name

_DTYPES = {"float32": ir.DataType.FLOAT, "float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}
_GATE, _UP = ".gate_proj.", ".up_proj."
_SCALED = ".scaled"  # a bias that a factor was folded into


def matrix_operands(artifact: Artifact) -> Iterator[Operand]:
    """Every matrix in the program's order, then norms and biases. UsageError for one without a form in checkpoints."""
    program, tensors = read_operations(artifact), MappedTensors(artifact.file(WEIGHTS_FILE))
    tables = {operation.table for operation in program.operations if isinstance(operation, Embed)}
    layers = {layer.matrix: layer for operation in program.operations for layer in layers_of(operation)}
    for name, matrix in program.matrices.items():
        stored = _Stored(tensors, name, matrix, _activations(layers.get(name)))
        for part, rows in _parts(name, matrix.n):
            yield stored.operand(part, rows, "Gather" if name in tables else "Linear")
    for name in program.tensors():
        shape = tensors.tensors[name].shape
        for part, rows in _parts(name, shape[0]) if len(shape) == 1 else ():
            values = ir.Tensor(np.array(tensors.view(name).view(np.float32)[rows]), name=part)
            yield Operand(part, weight_name(part), "Norm", values)


def _parts(name: str, rows: int) -> Iterator[tuple[str, slice]]:
    """Weights in a matrix or vector, and their rows."""
    name = name.removesuffix(OTHER)
    if name.endswith((TRANSPOSED, _SCALED)):
        raise UsageError(f"the program's {name!r} was changed when it was packed; export from the recipe instead")
    base = name.removesuffix(PAIRS)
    if base == name or _GATE not in base:
        yield base, slice(0, rows)
        return
    yield base, slice(0, rows // 2)
    yield base.replace(_GATE, _UP), slice(rows // 2, rows)


@dataclass(frozen=True)
class _Stored:
    """A packed matrix in the program's file."""

    tensors: MappedTensors
    name: str
    matrix: Matrix
    activations: ActivationScheme | None

    def operand(self, name: str, rows: slice, op_type: str) -> Operand:
        """Some of its rows as a weight."""
        count = rows.stop - rows.start
        if not self.matrix.scale_bytes:
            dtype = _DTYPES[self.matrix.form]
            values = partial(self._floats, rows)
            tensor = ir.LazyTensor(values, dtype, ir.Shape([count, self.matrix.k]), name=name)
            return Operand(name, weight_name(name), op_type, tensor)
        size = self.matrix.num_bytes * count // self.matrix.n
        packed = ir.LazyTensor(self._bytes, ir.DataType.UINT8, ir.Shape([size]), name=name)
        decode = partial(self._decode, rows.start)
        return Operand(f"{name}.q", weight_name(name), op_type, Codes(count, (packed,), decode, self.activations))

    def _arrays(self) -> MatrixArrays:
        tiles = self.tensors.view(self.name).reshape(self.matrix.num_tiles, self.matrix.tile_bytes)
        return unpack_tiles(self.matrix, tiles)

    def _bytes(self) -> ir.TensorProtocol:
        return ir.Tensor(np.array(self.tensors.view(self.name)))

    def _floats(self, rows: slice) -> ir.TensorProtocol:
        return ir.Tensor(np.ascontiguousarray(self._arrays().codes[rows]), dtype=_DTYPES[self.matrix.form])

    def _decode(self, first: int, rows: slice) -> DecodedWeight:
        """Rows of the weight that begins at row `first`; codes without zero points are centred at zero."""
        arrays, matrix = self._arrays(), self.matrix
        wanted = slice(first + rows.start, first + rows.stop)
        codes, zeros = arrays.codes[wanted], arrays.zero_points
        if not matrix.is_integer:
            codes = codes.astype(np.float32)
        elif zeros is None:
            codes = (codes.astype(np.int16) - default_zero(matrix)).astype(np.int8)
        assert arrays.scales is not None
        return DecodedWeight(
            codes=codes,
            scales=arrays.scales[wanted],
            group_size=matrix.k if matrix.per_row else matrix.block,
            zero_points=None if zeros is None else zeros[wanted].astype(np.int16),
            bits=BITS[matrix.form],
        )


def _activations(layer: Linear | ExpertLayer | None) -> ActivationScheme | None:
    """The scheme of activations that a pass chose; rounding per block is the engine's own."""
    if layer is None or layer.rounding not in ("token", "static"):
        return None
    if layer.rounding == "token":
        return ActivationScheme(bits=8, kind="int", dynamic=True, strategy="token")
    return ActivationScheme(bits=8, kind="int", dynamic=False, strategy="tensor", scale=layer.static_scale)
