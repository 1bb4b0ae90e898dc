"""EncodedTensor: a checkpoint's weight that must be decoded, and where its bytes are; reading stored tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.errors import CheckpointError
from ingot.pipeline.formats.activations import ActivationScheme
from ingot.pipeline.formats.float_codes import FloatArray, from_bfloat16
from ingot.pipeline.formats.quantized import QuantizedWeight
from ingot.pipeline.safetensors_file import StoredTensor

_NUMPY = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "F8_E4M3": "u1",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
}


@dataclass(frozen=True)
class EncodedTensor:
    """A weight under its plain name and shape; `decode` reads and decodes it anew each time, holding nothing.

    parts          the tensors that it is decoded from, by their leaf names
    storage        the format they are in, where a method has several
    activations    how the layer's inputs are quantized, if they are
    """

    name: str
    shape: tuple[int, ...]
    file: Path
    decode: Callable[[], QuantizedWeight | FloatArray]
    parts: Mapping[str, StoredTensor] = field(default_factory=dict)
    storage: str = ""
    activations: ActivationScheme | None = None

    def read(self) -> QuantizedWeight | FloatArray:
        """Codes and scales, or the floats themselves. CheckpointError when they contradict one another or are not
        finite."""
        try:
            with np.errstate(invalid="ignore", over="ignore"):  # what is not finite is refused below
                content = self.decode()
        except ValueError as error:
            raise CheckpointError(f"{self.file}: {self.name!r}: {error}; the checkpoint is damaged") from error
        self._check(content)
        return content

    def dequantize(self) -> FloatArray:
        """The weight as float32."""
        content = self.read()
        return content.dequantize() if isinstance(content, QuantizedWeight) else content

    def _check(self, content: QuantizedWeight | FloatArray) -> None:
        shape = content.codes.shape if isinstance(content, QuantizedWeight) else content.shape
        if shape != self.shape:
            raise CheckpointError(f"{self.file}: {self.name!r} decodes to {list(shape)}, not {list(self.shape)}")
        for part, values in _floats(content):
            bad = values.size - int(np.count_nonzero(np.isfinite(values)))
            if bad:
                raise CheckpointError(
                    f"{self.file}: {self.name!r}: {bad} of its {values.size} {part} are NaN or infinite; the "
                    "checkpoint is damaged or its quantization went wrong; take another one"
                )


def _floats(content: QuantizedWeight | FloatArray) -> list[tuple[str, FloatArray]]:
    if not isinstance(content, QuantizedWeight):
        return [("values", content)]
    found = [("scales", content.scales)]
    if content.offsets is not None:
        found.append(("offsets", content.offsets))
    return [*found, ("codes", content.codes)] if content.kind == "float" else found


def load(stored: StoredTensor) -> NDArray[Any]:
    """The tensor as an array of its own: bfloat16 as float32, fp8 as its bytes. CheckpointError for other dtypes."""
    if stored.dtype not in _NUMPY:
        raise CheckpointError(
            f"{stored.file}: {stored.name!r} is {stored.dtype}; quantized checkpoints are read with {', '.join(_NUMPY)}"
        )
    count = stored.num_bytes // np.dtype(_NUMPY[stored.dtype]).itemsize
    array = np.fromfile(stored.file, _NUMPY[stored.dtype], count, offset=stored.offset).reshape(stored.shape)
    return from_bfloat16(array) if stored.dtype == "BF16" else array
