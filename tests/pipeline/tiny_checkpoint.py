"""Checkpoints to break: copies of the fixtures with changed keys or tensors, and safetensors files by hand."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.parity import CHECKPOINTS

ABSENT = object()


def copy_fixture(folder: Path, name: str = "llama", **changes: Any) -> Path:
    """Copy a fixture to `folder` / name, with config.json changed; ABSENT removes a key."""
    target = folder / name
    shutil.copytree(CHECKPOINTS / name, target)
    edit_json(target / "config.json", changes)
    return target


def edit_json(file: Path, changes: Mapping[str, Any]) -> None:
    """Change keys of a JSON object in place; ABSENT removes one."""
    values = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not ABSENT}))


def edit_tensors(checkpoint: Path, changes: Mapping[str, Any]) -> None:
    """Change or add float32 tensors of a single-file checkpoint; ABSENT removes one."""
    file = checkpoint / "model.safetensors"
    tensors = {**load_file(file), **changes}
    save_file({name: array for name, array in tensors.items() if array is not ABSENT}, file)


def write_raw(file: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """Write a safetensors file, valid or not; a header other than bytes is written as JSON."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(raw) if length is None else length
    file.write_bytes(size.to_bytes(8, "little") + raw + data)
    return file


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    """One tensor of a safetensors header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def ones(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A float32 tensor of ones."""
    return np.ones(shape, np.float32)
