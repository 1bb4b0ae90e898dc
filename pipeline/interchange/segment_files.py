"""The segments of a sealed artifact, read back as graphs: checked as onnxruntime checks them when it loads them.

A weight is bytes of program/weights.safetensors from an offset on. Its type is checked against STORED_TYPES: decoding
codes of another type would give other weights without a word.
"""

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

import onnx_ir as ir

from ingot.artifact import Artifact
from ingot.errors import ArtifactError, shown

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_BYTES = (ir.DataType.UINT8, ir.DataType.INT8)
_CODES = (*_BYTES, ir.DataType.UINT4, ir.DataType.INT4)

# Types of the stored operands of an op, by their index; other ops read floats.
STORED_TYPES: Mapping[str, Mapping[int, tuple[ir.DataType, ...]]] = {
    "MatMulNBits": {1: (ir.DataType.UINT8,), 2: _FLOATS, 3: (ir.DataType.UINT8,), 5: _FLOATS},
    "GatherBlockQuantized": {0: _CODES, 2: _FLOATS, 3: _CODES},
    "QGemm": {3: _BYTES, 4: _FLOATS, 5: _BYTES},
    "Cast": {0: (*_FLOATS, ir.DataType.FLOAT8E4M3FN)},
    "Gemm": {1: _FLOATS, 2: _FLOATS},
    "LayerNormalization": {1: _FLOATS, 2: _FLOATS},
    "RMSNormalization": {1: _FLOATS},
}


def read_segment(artifact: Artifact, name: str) -> ir.Model:
    """Load a segment; its weights stay in their file. ArtifactError when it is damaged or does not fit its weights."""
    file = artifact.file(name)
    try:
        model = ir.load(file)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ArtifactError(f"{file}: is not an ONNX segment ({reason[:200]}); build the artifact again") from error
    for problem in (*_problems_of_places(artifact, name, model), *_problems_of_types(model)):
        raise ArtifactError(f"{file}: {problem}; build the artifact again")
    return model


def _problems_of_places(artifact: Artifact, name: str, model: ir.Model) -> Iterator[str]:
    """Yield weights outside of the artifact's files, or beyond the end of theirs."""
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if not isinstance(tensor, ir.ExternalTensor):
            continue
        stored = (PurePosixPath(name).parent / tensor.location).as_posix()
        entry = artifact.manifest.files.get(stored)
        end = (tensor.offset or 0) + (tensor.nbytes if tensor.length is None else tensor.length)
        if entry is None:
            yield f"the weight {shown(value.name)} is in {shown(stored)}, which the manifest does not list"
        elif tensor.length not in (None, tensor.nbytes) or (tensor.offset or 0) < 0 or end > entry.bytes:
            what = f"{shown(value.name)} takes {tensor.nbytes} bytes up to byte {end}"
            yield f"the weight {what} of {stored}, which has {entry.bytes}"


def _problems_of_types(model: ir.Model) -> Iterator[str]:
    for node in model.graph:
        for index, allowed in STORED_TYPES.get(node.op_type, {}).items():
            value = node.inputs[index] if index < len(node.inputs) else None
            tensor = None if value is None else value.const_value
            if value is not None and tensor is not None and tensor.dtype not in allowed:
                names = " or ".join(kind.name.lower() for kind in allowed)
                yield f"{node.op_type} reads {shown(value.name)} as {tensor.dtype.name.lower()}; it must be {names}"
