"""Writing a safetensors file whose tensors are made one at a time, shapes unknown until they are.

Room for the header is left first, as much as the longest shapes and places can take, and filled when all is known.
Every tensor begins on a multiple of ALIGNMENT bytes; entries padding.N fill the gaps, as the format allows no holes.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ingot.artifact.launch_program import STORED_TYPES
from ingot.pipeline.weights_file import ALIGNMENT, needing_room
from ingot.progress import Progress, silent

_LONGEST_ENTRY = 160  # bytes of an entry's JSON beside its name: a dtype, a shape of four, two places of 16 digits
_PADDING_NAME = len("padding.") + 10

# Triton's names of types -> numpy's.
_TYPES: Mapping[str, Any] = {
    "fp32": np.float32,
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "fp8e4nv": ml_dtypes.float8_e4m3fn,
    "i8": np.int8,
    "u8": np.uint8,
    "i32": np.int32,
    "i64": np.int64,
}

Maker = Callable[[], NDArray[Any]]


def stream_weights(file: Path, tensors: Mapping[str, tuple[str, Maker]], progress: Progress = silent) -> None:
    """Write name -> (type, how it is made) to a new file, converted to the type. One tensor is in memory at a time.

    The same tensors give the same bytes. BuildError when the disk is full.
    """
    room = _rounded(64 + sum(len(name) + _PADDING_NAME + 2 * _LONGEST_ENTRY for name in tensors))
    header: dict[str, object] = {}
    with file.open("wb") as stream:
        stream.seek(room)
        for number, (name, (type_, make)) in enumerate(tensors.items()):
            begin = stream.tell() - room
            values = np.ascontiguousarray(make(), _TYPES[type_])
            with needing_room(file, f"the weight {name}", values.nbytes):
                stream.write(values.reshape(-1).view(np.uint8).data)
                end = begin + values.nbytes
                word, shape = STORED_TYPES[type_], list(values.shape)
                header[name] = {"dtype": word, "shape": shape, "data_offsets": [begin, end]}
                if missing := -end % ALIGNMENT:
                    stream.write(bytes(missing))
                    place = [end, end + missing]
                    header[f"padding.{number}"] = {"dtype": "U8", "shape": [missing], "data_offsets": place}
            progress("writing weights", number + 1, len(tensors))
        text = json.dumps(header, separators=(",", ":")).encode()
        assert len(text) <= room - 8, "the header outgrew the room that was left for it"
        stream.seek(0)
        stream.write((room - 8).to_bytes(8, "little") + text + b" " * (room - 8 - len(text)))


def _rounded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
