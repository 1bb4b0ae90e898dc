"""What weights the nodes of a sealed program read: one row of READERS for each op that has any.

Names come from the initializers:

    <weight>.q, .q.rows, .scale, .zero_point     codes, scales and zero points
    <weight>.float32                             widened from 16 bits
    <path>.one_plus                              Gemma's 1 + w

A node that reads a stored vector or matrix through an operand that its row does not name is refused, so that nothing is
read back in part. To add an op: its row, its case in tests/pipeline/interchange/test_artifact_weights.py.

A sealed program -> the checkpoint's own tensors, with the very numbers that the program computes with.

What the program's nodes read is told by artifact_weights.py. Of it

    ...qkv_proj, ...gate_up_proj     are rows of several tensors, cut as config.json says (pack-projections)
    floats widened from 16 bits      are narrowed again where no bit is lost
    Gemma's 1 + w                    has its 1 taken away

Norms and matrices that a pass folded a scale or a rotation into come out as they are in the program.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.artifact import Artifact, SegmentStep
from ingot.errors import ArtifactError, UsageError, one_of
from ingot.passes.fusion.pack_projections import PACKS
from ingot.passes.lowering.lower_onnxruntime_cpu import MICROSOFT
from ingot.passes.lowering.nbits_packing import PackedWeight
from ingot.passes.weights import apply_to_array
from ingot.pipeline.checkpoint.config import read_config
from ingot.pipeline.checkpoint.formats.activations import ActivationScheme, activations_of_node
from ingot.pipeline.checkpoint.formats.decoded import DecodedWeight
from ingot.pipeline.checkpoint.sealed import sealed_checkpoint
from ingot.pipeline.checkpoint.tensors import EMBEDDING, HEAD, expected_tensors
from ingot.pipeline.interchange.layers import PlainWeight, QuantizedLayer, Weight, facts_of

WIDENED = ".float32"
ONE_PLUS = ".one_plus"
_SUFFIXES = (".q.rows", ".q", WIDENED)
_COLUMN = ".scale.column"

Columns = Callable[[str], int]  # the width of the weight of that name, where the op does not say it


@dataclass(frozen=True)
class Codes:
    """A quantized weight of so many rows; `decode` reads some of them."""

    rows: int
    decode: Callable[[slice], DecodedWeight]
    activations: ActivationScheme | None = None


@dataclass(frozen=True)
class Operand:
    """A weight that a node reads: the initializer's name, the weight's name, and its content."""

    stored: str
    name: str
    op_type: str
    content: Codes | ir.TensorProtocol

    @property
    def rows(self) -> int:
        """Rows of the weight, or elements of a vector."""
        return self.content.rows if isinstance(self.content, Codes) else int(self.content.shape.numpy()[0])


Read = Callable[[ir.Node, tuple[int, ...], Columns], Iterator[Operand]]


@dataclass(frozen=True)
class Reader:
    """The operands of an op that are weights or tables, and how the weights among them are read."""

    operands: tuple[int, ...]
    read: Read


def read_operands(node: ir.Node, columns: Columns) -> Iterator[Operand]:
    """The weights that a node reads, as far as its row of READERS names them."""
    reader = READERS.get((node.domain, node.op_type), _NO_WEIGHTS)
    yield from reader.read(node, reader.operands, columns)


def require_known(node: ir.Node) -> None:
    """UsageError when the node reads a stored vector or matrix through an operand that its row does not name."""
    reader = READERS.get((node.domain, node.op_type), _NO_WEIGHTS)
    for index, value in enumerate(node.inputs):
        if value is not None and value.is_initializer() and index not in reader.operands and not _is_small(value):
            raise UsageError(
                f"{node.name!r} ({node.op_type}) reads {value.name!r}, which no checkpoint has a tensor for; programs "
                f"are read back with weights of {one_of(sorted({op for _, op in READERS}))}"
            )


def _is_small(value: ir.Value) -> bool:
    """Scalars, the integers that say sizes and axes, and the scales of a float8 weight that its Cast has read."""
    tensor = value.const_value
    is_scale = (value.name or "").endswith(_COLUMN)
    return tensor is None or tensor.size <= 1 or tensor.dtype == ir.DataType.INT64 or is_scale


def _nothing(node: ir.Node, operands: tuple[int, ...], columns: Columns) -> Iterator[Operand]:
    yield from ()


def _floats(node: ir.Node, operands: tuple[int, ...], columns: Columns) -> Iterator[Operand]:
    for index in operands:
        value = node.inputs[index] if index < len(node.inputs) else None
        if value is not None and value.const_value is not None and value.const_value.size > 1:
            yield Operand(value.name or "", _name_of(value), node.op_type, value.const_value)


def _blocks(node: ir.Node, operands: tuple[int, ...], columns: Columns) -> Iterator[Operand]:
    """Packed codes, scales, zero points; then a bias, if the op has one."""
    codes = _stored(node, operands[0])
    width = node.attributes.get_int("K", 0) or columns(_name_of(codes))
    packed = PackedWeight.read(node, width, (operands[0], operands[1], operands[2]))
    yield _coded(node, codes, packed.rows, partial(_decode_blocks, packed))
    yield from _floats(node, operands[3:], columns)


def _channels(node: ir.Node, operands: tuple[int, ...], columns: Columns) -> Iterator[Operand]:
    """8-bit codes [out, in], a scale and a zero point for each row."""
    codes, *rest = (_stored(node, index) for index in operands)
    yield _coded(node, codes, _size(codes), _channel_decoder(codes, *rest))


def _widened(node: ir.Node, operands: tuple[int, ...], columns: Columns) -> Iterator[Operand]:
    """A stored tensor of 16 bits, or float8 codes that a Mul multiplies by their scales."""
    codes = node.inputs[0]
    if codes is None or codes.dtype != ir.DataType.FLOAT8E4M3FN or not codes.is_initializer():
        yield from _floats(node, operands, columns)
        return
    scaled = next(iter(node.outputs[0].consumers()))
    (scales,) = (value for value in scaled.inputs if value is not None and value.is_initializer())
    reader = next(iter(scaled.outputs[0].consumers()), scaled)
    yield _coded(reader, codes, _size(codes), _channel_decoder(codes, scales))


READERS: Mapping[tuple[str, str], Reader] = {
    (MICROSOFT, "MatMulNBits"): Reader((1, 2, 3, 5), _blocks),
    (MICROSOFT, "GatherBlockQuantized"): Reader((0, 2, 3), _blocks),
    (MICROSOFT, "QGemm"): Reader((3, 4, 5), _channels),
    (MICROSOFT, "SkipSimplifiedLayerNormalization"): Reader((2,), _floats),
    ("", "Add"): Reader((0, 1), _floats),
    ("", "Cast"): Reader((0,), _widened),
    ("", "Gather"): Reader((0,), _floats),
    ("", "Gemm"): Reader((1, 2), _floats),
    ("", "RMSNormalization"): Reader((1,), _floats),
    ("", "RotaryEmbedding"): Reader((1, 2), _nothing),
}
_NO_WEIGHTS = Reader((), _nothing)


def _coded(node: ir.Node, codes: ir.Value, rows: int, decode: Callable[[slice], DecodedWeight]) -> Operand:
    stored = (codes.name or "").removesuffix(".rows")
    return Operand(stored, _name_of(codes), node.op_type, Codes(rows, decode, _activations(node)))


def _activations(node: ir.Node) -> ActivationScheme | None:
    """How a linear layer's inputs are quantized: it says so itself, or what makes them does."""
    maker = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
    found = activations_of_node(node.metadata_props)
    return found if found is not None or maker is None else activations_of_node(maker.metadata_props)


def _decode_blocks(packed: PackedWeight, rows: slice) -> DecodedWeight:
    zero_points = packed.zero_points_of(rows)
    return DecodedWeight(
        codes=packed.codes_of(rows),
        scales=packed.scales_of(rows),
        group_size=packed.columns if packed.per_channel else packed.block_size,
        zero_points=None if zero_points is None else zero_points.astype(np.int16),
        bits=packed.bits,
    )


def _channel_decoder(
    codes: ir.Value, scales: ir.Value, zero_points: ir.Value | None = None
) -> Callable[[slice], DecodedWeight]:
    return lambda rows: _decode_channels(codes, scales, zero_points, rows)


def _decode_channels(codes: ir.Value, scales: ir.Value, zero_points: ir.Value | None, rows: slice) -> DecodedWeight:
    is_float = codes.dtype == ir.DataType.FLOAT8E4M3FN
    values = _stored_rows(codes, rows)
    unsigned = zero_points is not None and codes.dtype == ir.DataType.UINT8
    return DecodedWeight(
        codes=values.astype(np.float32) if is_float else values,
        scales=_stored_rows(scales, rows).reshape(-1, 1),
        group_size=values.shape[1],
        zero_points=_stored_rows(zero_points, rows).reshape(-1, 1).astype(np.int16) if unsigned else None,
        bits=8,
    )


def _stored_rows(value: ir.Value | None, rows: slice) -> NDArray[Any]:
    assert value is not None
    assert value.const_value is not None
    return apply_to_array(value.const_value, lambda values: np.array(values[rows]))


def _stored(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    assert value is not None
    return value


def _size(value: ir.Value) -> int:
    assert value.const_value is not None
    return int(value.const_value.shape.numpy()[0])


def _name_of(value: ir.Value) -> str:
    name = value.name or ""
    if name.endswith(ONE_PLUS):
        return f"model.{name.removesuffix(ONE_PLUS)}.weight"
    suffix = next((suffix for suffix in _SUFFIXES if name.endswith(suffix)), "")
    return name.removesuffix(suffix)


Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]

_DTYPES = {"bfloat16": ir.DataType.BFLOAT16, "float16": ir.DataType.FLOAT16}


def weights_of_artifact(artifact: Artifact) -> list[Weight]:
    """Every tensor of the artifact's checkpoint, in config.json's order, and a tied head's own copy if there is one.

    Every weight is read once for its facts and given back; it is read again when it is asked for. Raises UsageError
    for an op that has no row in program_readers.READERS and for an artifact without config.json, ArtifactError when
    program and config.json do not go together.
    """
    checkpoint = sealed_checkpoint(artifact)
    shapes: dict[str, Shape] = {
        name: tensor.shape for name, tensor in expected_tensors(read_config(checkpoint)).items()
    }
    found: dict[str, Weight] = {}
    for operand in program_operands(artifact, shapes):
        found.update((weight.name, weight) for weight in _unpacked(operand, shapes))
    missing = [name for name in shapes if name not in found]
    if missing:
        raise ArtifactError(f"{artifact.path}: the program reads no {missing[0]!r} ({len(missing)} tensors missing)")
    names = [*shapes, *(name for name in found if name not in shapes)]
    dtype = _DTYPES.get(str(checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")))
    return [_narrowed(found[name], dtype) for name in names]


def program_operands(artifact: Artifact, shapes: Shapes, complete: bool = True) -> list[Operand]:
    """The weights that the program's nodes read, each once, in the program's order.

    complete    refuse a program with a weight that nobody can read back (UsageError); otherwise leave it out
    """
    found: dict[str, Operand] = {}
    for step in artifact.manifest.program.steps:
        if isinstance(step, SegmentStep):
            for node in ir.load(artifact.file(step.file)).graph:
                if complete:
                    require_known(node)
                for operand in read_operands(node, lambda name: shapes.get(name, shapes[EMBEDDING])[1]):
                    found.setdefault(operand.stored, operand)  # a tied table is read by the embedding first
    return _with_own_heads(found.values())


def _with_own_heads(operands: Iterable[Operand]) -> list[Operand]:
    """A head that shares the table's name but not its numbers (the one quantized, the other not) gets its own name."""
    found = list(operands)
    tables = {operand.stored.removesuffix(WIDENED) for operand in found if "Gather" in operand.op_type}
    return [
        replace(operand, name=HEAD)
        if operand.name == EMBEDDING and operand.stored.removesuffix(WIDENED) not in tables
        else operand
        for operand in found
    ]


def _unpacked(operand: Operand, shapes: Shapes) -> Iterator[Weight]:
    """The checkpoint's tensors in one operand: itself, or the parts of a packed one."""
    parts = _parts(operand.name, shapes)
    rows = [shapes.get(part, shapes[EMBEDDING])[0] for part in parts]
    if sum(rows) != operand.rows:
        raise ArtifactError(
            f"{operand.stored!r} has {operand.rows} rows, but config.json gives {one_of(parts)} {sum(rows)}"
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
    raise ArtifactError(f"the program's weight {name!r} is none of config.json's tensors")


def _part(operand: Operand, name: str, rows: slice) -> Weight:
    content = operand.content
    if isinstance(content, Codes):
        read = partial(content.decode, rows)
        return QuantizedLayer(name, facts_of(read()), read, content.activations)
    return PlainWeight(name, _rows_of(content, name, rows, less=1.0 if operand.stored.endswith(ONE_PLUS) else 0.0))


def _rows_of(tensor: ir.TensorProtocol, name: str, rows: slice, less: float) -> ir.TensorProtocol:
    shape = ir.Shape([rows.stop - rows.start, *tensor.shape.numpy()[1:]])

    def read() -> ir.TensorProtocol:
        values = apply_to_array(tensor, lambda array: np.array(array[rows]))
        return ir.Tensor(values - np.float32(less) if less else values, dtype=tensor.dtype, name=name)

    return ir.LazyTensor(read, tensor.dtype, shape, name=name)


def _narrowed(weight: Weight, dtype: ir.DataType | None) -> Weight:
    """A float32 tensor in the checkpoint's 16 bits where they hold every number of it."""
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
