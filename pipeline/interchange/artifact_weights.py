"""The weights of a sealed artifact as the checkpoint's own tensors, with the values that its program computes with.

    ...qkv_proj, ...gate_up_proj     cut into the tensors that pack-projections joined
    floats widened from 16 bits      narrowed again if that is exact
    Gemma's 1 + w                    less 1

Scales and rotations that a pass folded into norms and matrices stay folded.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import onnx_ir as ir

from ingot.artifact import Artifact, SegmentStep
from ingot.errors import ArtifactError, UsageError, one_of, shown
from ingot.passes.fusion.pack_projections import PACKS
from ingot.passes.weights import apply_to_array
from ingot.pipeline.checkpoint.config import read_config
from ingot.pipeline.checkpoint.formats.decoded import DecodedWeight
from ingot.pipeline.checkpoint.sealed import sealed_checkpoint
from ingot.pipeline.checkpoint.tensors import EMBEDDING, HEAD, expected_tensors
from ingot.pipeline.interchange.layers import PlainWeight, QuantizedLayer, Weight, facts_of
from ingot.pipeline.interchange.program_matrices import matrix_operands
from ingot.pipeline.interchange.segment_files import read_segment
from ingot.pipeline.targets.segments.weight_operands import (
    ONE_PLUS,
    WIDENED,
    Codes,
    Operand,
    read_operands,
    require_known,
)

Shapes = Mapping[str, tuple[int, ...]]

_DTYPES = {"bfloat16": ir.DataType.BFLOAT16, "float16": ir.DataType.FLOAT16}


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
        return _with_own_heads(matrix_operands(artifact))
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
