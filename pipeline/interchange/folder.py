"""What the writers of safetensors formats share: what they are allowed, what they return, tensors made when written.

A new folder that appears whole or not at all: written under another name beside its place, flushed, renamed.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.artifact.safetensors import StoredTensor
from ingot.errors import BuildError, UsageError
from ingot.pipeline.interchange.layers import PlainWeight, QuantizedLayer, Weight

NamedTensor = tuple[str, ir.TensorProtocol]
Layout = Mapping[str, tuple[ir.DataType, tuple[int, ...]]]
Encoder = Callable[[QuantizedLayer], Mapping[str, NDArray[Any]]]


@dataclass(frozen=True)
class WriteOptions:
    """What a writer may do to a scheme that its format does not have.

    widen    put it into another that holds the same values: more bits, smaller groups, tables as float32
    lossy    round scales and minima to the float16 that the format stores
    floats   write a layer that the format cannot hold as float32, where it may leave layers in floats
    dtype    of weights that are written as floats; None: plain ones as they are, others float32
    """

    widen: bool = False
    lossy: bool = False
    floats: bool = False
    dtype: ir.DataType | None = None


AS_IT_IS = WriteOptions()


@dataclass(frozen=True)
class Export:
    """tensors by name, config.json's quantization_config (None: no quantized tensor), and what changed its form."""

    tensors: Sequence[NamedTensor]
    quantization: Mapping[str, Any] | None
    notes: Sequence[str] = ()


def layer_tensors(
    weights: Sequence[Weight], layout: Callable[[QuantizedLayer], Layout], encode: Encoder
) -> list[NamedTensor]:
    """Plain tensors as they are; layers as lazy tensors by their leaf names, encoded once for all their leaves."""
    by_name = {weight.name: weight for weight in weights if isinstance(weight, QuantizedLayer)}

    @lru_cache(maxsize=1)
    def encoded(name: str) -> Mapping[str, NDArray[Any]]:
        return encode(by_name[name])

    def leaf_of(name: str, leaf: str) -> NDArray[Any]:
        return encoded(name)[leaf]

    found: list[NamedTensor] = []
    for weight in weights:
        if isinstance(weight, PlainWeight):
            found.append((weight.name, weight.tensor))
            continue
        for leaf, (dtype, shape) in layout(weight).items():
            name = f"{weight.module}.{leaf}"
            found.append((name, lazy_tensor(name, dtype, shape, partial(leaf_of, weight.name, leaf))))
    return found


def as_floats(layer: QuantizedLayer) -> PlainWeight:
    """The layer as the float32 that its codes stand for."""
    make = partial(_dequantized, layer)
    return PlainWeight(layer.name, lazy_tensor(layer.name, ir.DataType.FLOAT, layer.shape, make))


def lazy_tensor(
    name: str, dtype: ir.DataType, shape: tuple[int, ...], make: Callable[[], NDArray[Any]]
) -> ir.LazyTensor:
    """A tensor that is made each time it is read; fp8 comes as its bytes."""
    return ir.LazyTensor(lambda: _tensor(make(), dtype), dtype, ir.Shape(shape), name=name)


def _dequantized(layer: QuantizedLayer) -> NDArray[Any]:
    return layer.read().dequantize()


def _tensor(values: NDArray[Any], dtype: ir.DataType) -> ir.TensorProtocol:
    content = np.ascontiguousarray(values)
    return ir.Tensor(content if content.dtype == dtype.numpy() else content.view(dtype.numpy()), dtype)


_STORED = {
    "F64": ir.DataType.DOUBLE,
    "F32": ir.DataType.FLOAT,
    "F16": ir.DataType.FLOAT16,
    "BF16": ir.DataType.BFLOAT16,
    "F8_E4M3": ir.DataType.FLOAT8E4M3FN,
    "F8_E5M2": ir.DataType.FLOAT8E5M2,
    "I64": ir.DataType.INT64,
    "I32": ir.DataType.INT32,
    "I16": ir.DataType.INT16,
    "I8": ir.DataType.INT8,
    "U64": ir.DataType.UINT64,
    "U32": ir.DataType.UINT32,
    "U16": ir.DataType.UINT16,
    "U8": ir.DataType.UINT8,
    "BOOL": ir.DataType.BOOL,
}


def stored_tensor(stored: StoredTensor, name: str | None = None) -> ir.LazyTensor:
    """A tensor of a checkpoint as it lies in its file, whatever its type; read when it is written."""
    dtype = _STORED[stored.dtype]

    def read() -> NDArray[Any]:
        raw = np.fromfile(stored.file, np.uint8, stored.num_bytes, offset=stored.offset)
        return raw.view(dtype.numpy()).reshape(stored.shape)

    return lazy_tensor(name or stored.name, dtype, stored.shape, read)


@contextmanager
def staging_folder(target: Path) -> Iterator[Path]:
    """Give a temporary folder that becomes `target` when the block ends without an error, and disappears otherwise.

    UsageError when `target` is there and not empty; BuildError when nothing can be written there.
    """
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UsageError(f"{target}: exists already, and is not replaced; name a new folder")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".ingot-export-{target.name}-", dir=target.parent))
    except OSError as error:
        raise BuildError(f"{target}: cannot write there: {error.strerror}; choose another output folder") from error
    try:
        yield staging
        for file in [*staging.iterdir(), staging]:
            _flush(file)
        staging.chmod(0o755)
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
