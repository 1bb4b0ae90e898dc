"""The weights of a sealed artifact as the checkpoint's own tensors, with the values that its program computes with.

    ...qkv_proj, ...gate_up_proj     cut into the tensors that pack-projections joined
    floats widened from 16 bits      narrowed again if that is exact
    Gemma's 1 + w                    less 1

Scales and rotations that a pass folded into norms and matrices stay folded. The matrices of a CPU launch program are
unpacked from their tiles: a gate and an up projection that share a matrix of pairs are two weights; one packed
gate_up_proj is one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import onnx_ir as ir

from ingot.artifact import Artifact, SegmentStep
from ingot.artifact.programs.cpu_program import (
    WEIGHTS_FILE,
    Embed,
    ExpertLayer,
    Linear,
    layers_of,
)
from ingot.artifact.programs.cpu_program_checks import read_operations
from ingot.artifact.programs.operation_row import BITS, Matrix
from ingot.artifact.safetensors import MappedTensors
from ingot.errors import ArtifactError, UsageError, one_of, shown
from ingot.passes.fusion.pack_projections import PACKS
from ingot.passes.weights import apply_to_array
from ingot.pipeline.checkpoint.config.decoder import read_config
from ingot.pipeline.checkpoint.formats.activations import InputScheme
from ingot.pipeline.checkpoint.formats.decoded import DecodedWeight
from ingot.pipeline.checkpoint.sealed import sealed_checkpoint
from ingot.pipeline.checkpoint.tensors import EMBEDDING, HEAD, expected_tensors
from ingot.pipeline.interchange.layers import PlainWeight, QuantizedLayer, Weight, facts_of
from ingot.pipeline.interchange.segment_files import read_segment
from ingot.pipeline.targets.cpu.matrices import OTHER, PAIRS, TRANSPOSED
from ingot.pipeline.targets.cpu.packing import MatrixArrays, default_zero, unpack_tiles
from ingot.pipeline.targets.segments.weight_operands import (
    ONE_PLUS,
    WIDENED,
    Codes,
    Operand,
    read_operands,
    require_known,
    weight_name,
)

Shapes = Mapping[str, tuple[int, ...]]

_DTYPES = {"bfloat16": ir.DataType.BFLOAT16, "float16": ir.DataType.FLOAT16}
_MATRIX_DTYPES = {"float32": ir.DataType.FLOAT, **_DTYPES}
_GATE, _UP = ".gate_proj.", ".up_proj."
_SCALED = ".scaled"  # suffix of a bias that a factor was folded into


def weights_of_artifact(artifact: Artifact) -> list[Weight]:
    """Return the artifact's weights under the checkpoint's names, in config.json's order, and a tied head's own copy.

    Every weight is read once for its facts, and again when it is written. Raises UsageError for an op that has no row
    in weight_operands.READERS, for interleaved rope and for an artifact without config.json, ArtifactError when program
    and config.json contradict each other.
    """
    checkpoint = sealed_checkpoint(artifact)
    config = read_config(checkpoint)
    if config.family.interleaved_rope:
        raise UsageError(
            f"{artifact.path}: the program of a {config.model_type} model holds the rows of queries and keys in "
            "another order (deinterleave-rotary); export from the recipe instead"
        )
    shapes: dict[str, tuple[int, ...]] = {name: tensor.shape for name, tensor in expected_tensors(config).items()}
    found: dict[str, Weight] = {}
    for operand in program_operands(artifact, shapes):
        found.update((weight.name, weight) for weight in _unpacked(operand, shapes))
    missing = [name for name in shapes if name not in found]
    if missing:
        raise ArtifactError(
            f"{artifact.path}: the program reads no {shown(missing[0])} ({len(missing)} tensors missing)"
        )
    names = [*shapes, *(name for name in found if name not in shapes)]
    dtype = _DTYPES.get(str(checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")))
    return [_narrowed(found[name], dtype) for name in names]


def program_operands(artifact: Artifact, shapes: Shapes, complete: bool = True) -> list[Operand]:
    """Return the weights that the program's nodes read, each once, in the program's order.

    complete    refuse a program that reads weights through an unknown operand (UsageError); otherwise leave them out
    """
    found: dict[str, Operand] = {}
    if artifact.manifest.engine == "native":
        return _with_own_heads(_matrix_operands(artifact))
    for step in artifact.manifest.program.steps:
        if isinstance(step, SegmentStep):
            for node in read_segment(artifact, step.file).graph:
                if complete:
                    require_known(node)
                for operand in read_operands(node, lambda name: shapes.get(name, shapes[EMBEDDING])[1]):
                    found.setdefault(operand.stored, operand)  # a tied table is read by the embedding first
    return _with_own_heads(found.values())


def _with_own_heads(operands: Iterable[Operand]) -> list[Operand]:
    """Rename a head that has the embedding table's name but other values, since only one of them is quantized."""
    found = list(operands)
    tables = {operand.stored.removesuffix(WIDENED) for operand in found if "Gather" in operand.op_type}
    return [
        replace(operand, name=HEAD)
        if operand.name == EMBEDDING and operand.stored.removesuffix(WIDENED) not in tables
        else operand
        for operand in found
    ]


def _unpacked(operand: Operand, shapes: Shapes) -> Iterator[Weight]:
    """Yield the checkpoint's tensors in an operand: itself, or the parts of a packed one."""
    parts = _parts(operand.name, shapes)
    rows = [shapes.get(part, shapes[EMBEDDING])[0] for part in parts]
    if sum(rows) != operand.rows:
        raise ArtifactError(
            f"{shown(operand.stored)} has {operand.rows} rows, but config.json gives {one_of(parts)} {sum(rows)}"
        )
    start = 0
    for part, count in zip(parts, rows, strict=True):
        yield _part(operand, part, slice(start, start + count))
        start += count


def _parts(name: str, shapes: Shapes) -> list[str]:
    if name in shapes or name == HEAD:
        return [name]
    for pack, parts in PACKS.items():
        names = [name.replace(f".{pack}_proj.", f".{part}.") for part in parts]
        if name not in names and all(part in shapes for part in names):
            return names
    raise ArtifactError(f"the program's weight {shown(name)} is not a tensor of config.json's model")


def _part(operand: Operand, name: str, rows: slice) -> Weight:
    content = operand.content
    if isinstance(content, Codes):
        read = partial(content.decode, rows)
        return QuantizedLayer(name, facts_of(_decoded(operand, read)), read, content.activations)
    return PlainWeight(name, _rows_of(content, name, rows, less=1.0 if operand.stored.endswith(ONE_PLUS) else 0.0))


def _decoded(operand: Operand, read: Callable[[], DecodedWeight]) -> DecodedWeight:
    try:
        return read()
    except (AssertionError, IndexError, ValueError) as error:
        raise ArtifactError(
            f"the program's weight {shown(operand.stored)}: its codes, scales and zero points do not fit together "
            f"({str(error)[:200]}); build the artifact again"
        ) from error


def _rows_of(tensor: ir.TensorProtocol, name: str, rows: slice, less: float) -> ir.TensorProtocol:
    shape = ir.Shape([rows.stop - rows.start, *tensor.shape.numpy()[1:]])

    def read() -> ir.TensorProtocol:
        values = apply_to_array(tensor, lambda array: np.array(array[rows]))
        return ir.Tensor(values - np.float32(less) if less else values, dtype=tensor.dtype, name=name)

    return ir.LazyTensor(read, tensor.dtype, shape, name=name)


def _narrowed(weight: Weight, dtype: ir.DataType | None) -> Weight:
    """Return a float32 tensor in the checkpoint's 16-bit type if that holds all its values exactly."""
    if dtype is None or not isinstance(weight, PlainWeight) or weight.tensor.dtype != ir.DataType.FLOAT:
        return weight
    wide, narrow = weight.tensor, dtype.numpy()
    with np.errstate(over="ignore"):
        is_exact = apply_to_array(wide, lambda values: np.array_equal(values.astype(narrow).astype(np.float32), values))
    if not is_exact:
        return weight
    make = partial(_cast, wide, dtype)
    return PlainWeight(weight.name, ir.LazyTensor(make, dtype, ir.Shape(weight.shape), name=weight.name))


def _cast(tensor: ir.TensorProtocol, dtype: ir.DataType) -> ir.TensorProtocol:
    return ir.Tensor(apply_to_array(tensor, lambda values: values.astype(dtype.numpy())), dtype=dtype, name=tensor.name)


def _matrix_operands(artifact: Artifact) -> Iterator[Operand]:
    """Every matrix in the program's order, then norms and biases. UsageError for one without a form in checkpoints."""
    program, tensors = read_operations(artifact), MappedTensors(artifact.file(WEIGHTS_FILE))
    tables = {operation.table for operation in program.operations if isinstance(operation, Embed)}
    layers = {layer.matrix: layer for operation in program.operations for layer in layers_of(operation)}
    for name, matrix in program.matrices.items():
        stored = _StoredMatrix(tensors, name, matrix, _activations_of(layers.get(name)))
        for part, rows in _parts_of_matrix(name, matrix.n):
            yield stored.operand(part, rows, "Gather" if name in tables else "Linear")
    for name in program.tensors():
        shape = tensors.tensors[name].shape
        for part, rows in _parts_of_matrix(name, shape[0]) if len(shape) == 1 else ():
            values = ir.Tensor(np.array(tensors.view(name).view(np.float32)[rows]), name=part)
            yield Operand(part, weight_name(part), "Norm", values)


def _parts_of_matrix(name: str, rows: int) -> Iterator[tuple[str, slice]]:
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
class _StoredMatrix:
    """A packed matrix in the program's file."""

    tensors: MappedTensors
    name: str
    matrix: Matrix
    activations: InputScheme | None

    def operand(self, name: str, rows: slice, op_type: str) -> Operand:
        """Some of its rows as a weight."""
        count = rows.stop - rows.start
        if not self.matrix.scale_bytes:
            dtype = _MATRIX_DTYPES[self.matrix.form]
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
        return ir.Tensor(np.ascontiguousarray(self._arrays().codes[rows]), dtype=_MATRIX_DTYPES[self.matrix.form])

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


def _activations_of(layer: Linear | ExpertLayer | None) -> InputScheme | None:
    """The scheme of activations that a pass chose; rounding per block is the engine's own."""
    if layer is None or layer.rounding not in ("token", "static"):
        return None
    if layer.rounding == "token":
        return InputScheme(bits=8, kind="int", dynamic=True, strategy="token")
    return InputScheme(bits=8, kind="int", dynamic=False, strategy="tensor", scale=layer.static_scale)
