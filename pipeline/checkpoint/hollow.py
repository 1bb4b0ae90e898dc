"""A checkpoint without weights: the tensors that a config.json requires, of zeros in a sparse file.

A plan reads shapes alone; what reads a value of such a tensor gets zeros, and no byte of it is on the disk.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ingot.artifact.json_text import read_json_object
from ingot.artifact.safetensors import DTYPE_BYTES, StoredTensor
from ingot.errors import ConfigError
from ingot.pipeline.checkpoint.checkpoint import WEIGHTS, Checkpoint
from ingot.pipeline.checkpoint.config.decoder import read_config
from ingot.pipeline.checkpoint.families import FAMILIES
from ingot.pipeline.checkpoint.tensors import expected_tensors

MOST_LAYERS = 1024
MOST_TENSORS = 1_000_000
MOST_BYTES = 2**44
"""16 TiB, the largest file of ext4: eight trillion parameters of 16 bits."""
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@contextmanager
def hollow_checkpoint(config_file: Path) -> Iterator[Checkpoint]:
    """Open the checkpoint that a config.json describes, for as long as the block lasts.

    Raises ConfigError as `read_config`, and for sizes beyond those of any model.
    """
    values = read_json_object(config_file)
    with TemporaryDirectory(prefix="ingot-plan-") as folder:
        file = Path(folder, WEIGHTS)
        tensors = _tensors(config_file, values, file)
        with file.open("wb") as stream:
            stream.truncate(sum(tensor.num_bytes for tensor in tensors.values()))
        yield _opened(config_file, values, tensors)


def _opened(config_file: Path, values: dict[str, Any], tensors: dict[str, StoredTensor]) -> Checkpoint:
    return Checkpoint(config_file.parent, values, {}, tensors)._text_model()


def _tensors(config_file: Path, values: dict[str, Any], file: Path) -> dict[str, StoredTensor]:
    """Place every tensor of the model in the file, one after another."""
    config = read_config(_opened(config_file, values, _layer_names(config_file, values, file)))
    dtype = _DTYPES.get(str(values.get("dtype") or values.get("torch_dtype")), "BF16")
    expected = expected_tensors(config)
    if len(expected) > MOST_TENSORS:
        raise ConfigError(f"{config_file}: a model of {len(expected):,} tensors; a plan reads up to {MOST_TENSORS:,}")
    found, offset = {}, 0
    for name, tensor in expected.items():
        size = math.prod(tensor.shape) * DTYPE_BYTES[dtype]
        found[name] = StoredTensor(name, dtype, tensor.shape, file, offset, size)
        offset += size
    if offset > MOST_BYTES:
        raise ConfigError(f"{config_file}: a model of {offset:,} bytes; a plan reads up to {MOST_BYTES:,}")
    return found


def _layer_names(config_file: Path, values: dict[str, Any], file: Path) -> dict[str, StoredTensor]:
    """Names that begin as the family's do, as many as layers may be: a checkpoint has more tensors than layers."""
    text = values.get("text_config")
    model = text if isinstance(text, dict) else values
    count = model.get("num_hidden_layers")
    if isinstance(count, int) and count > MOST_LAYERS:
        raise ConfigError(f"{config_file}: num_hidden_layers is {count}; a plan reads up to {MOST_LAYERS}")
    family = FAMILIES.get(str(model.get("model_type")))
    begin = family.names.get("model", "model") if family else "model"
    names = (f"{begin}.layers.{number}" for number in range(MOST_LAYERS))
    return {name: StoredTensor(name, "F32", (), file, 0, 0) for name in names}
