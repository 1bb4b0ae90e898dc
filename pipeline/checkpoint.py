"""A Hugging Face checkpoint folder: its JSON files, its tokenizer's files, and its tensors left in place.

config.json                        the model's shape
generation_config.json             optional: token ids that end a text
tokenizer.json, ...                optional here; the runtime wants them
model.safetensors                  the tensors, or
model.safetensors.index.json       the names of the shards that hold them
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import onnx_ir as ir

from ingot.errors import CheckpointError, ConfigError, did_you_mean
from ingot.passes.progress import report_progress
from ingot.pipeline.finite import count_non_finite
from ingot.pipeline.safetensors_file import StoredTensor, read_header

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)
WEIGHT_DTYPES = {"F32": ir.DataType.FLOAT, "F16": ir.DataType.FLOAT16, "BF16": ir.DataType.BFLOAT16}
_DIGEST_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: headers are read and checked, tensor data is not touched.

    config, generation_config    the JSON objects as they stand in the files; the latter is empty where there is none
    tensors                      name -> where the tensor lies
    """

    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Open the folder `path`.

        Raises CheckpointError naming the file and what is wrong with it: a missing folder or file, JSON that is
        none, a safetensors file that is truncated or contradicts itself, a shard or tensor that the index names
        but is not there.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: no such folder; a checkpoint is a folder with config.json and {WEIGHTS}")
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"{folder}: holds no config.json, so it is no checkpoint; name the folder that does")
        generation = folder / "generation_config.json"
        return cls(
            path=folder,
            config=_read_object(folder / "config.json"),
            generation_config=_read_object(generation) if generation.is_file() else {},
            tensors=_read_tensors(folder),
        )

    @property
    def config_file(self) -> Path:
        """Path of config.json, for messages."""
        return self.path / "config.json"

    @property
    def tokenizer_files(self) -> tuple[Path, ...]:
        """Those of the tokenizer's and generation's files that the folder holds."""
        return tuple(file for name in TOKENIZER_FILES if (file := self.path / name).is_file())

    @property
    def weight_files(self) -> tuple[Path, ...]:
        """The safetensors files, sorted by name."""
        return tuple(sorted({tensor.file for tensor in self.tensors.values()}))

    def tensor(self, name: str) -> StoredTensor:
        """The stored tensor; CheckpointError with the nearest name when the checkpoint has none of that name."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: holds no tensor {name!r}.{did_you_mean(name, self.tensors)}")
        return self.tensors[name]

    def external(self, name: str) -> ir.ExternalTensor:
        """The tensor as the IR sees it: a memory-mapped view of the safetensors file, nothing copied.

        Raises CheckpointError for a dtype that is no plain weight's (float32, float16, bfloat16).
        """
        stored = self.tensor(name)
        if stored.dtype not in WEIGHT_DTYPES:
            raise CheckpointError(
                f"{stored.file}: {name!r} is {stored.dtype}; weights must be F32, F16 or BF16. "
                "Export the checkpoint in one of these (a quantized one: the model it was made from)"
            )
        # A hub's cache holds links to files elsewhere, which onnx_ir would refuse to follow.
        folder, file = os.path.split(os.path.realpath(stored.file))
        return ir.ExternalTensor(
            file,
            stored.offset,
            stored.num_bytes,
            WEIGHT_DTYPES[stored.dtype],
            shape=ir.Shape(stored.shape),
            name=name,
            base_dir=folder,
        )

    def check_finite(self, names: Iterable[str] | None = None) -> None:
        """Read every float tensor (or those named) in chunks; CheckpointError names all that hold NaN or Inf."""
        chosen = self.tensors if names is None else names
        problems = [text for stored in self._reported(chosen) if (text := _non_finite(stored))]
        if problems:
            raise CheckpointError(
                f"{self.path}: weights must be finite, but " + "; ".join(problems) + ". "
                "The checkpoint is damaged or its training diverged; take another one"
            )

    def _reported(self, names: Iterable[str]) -> Iterator[StoredTensor]:
        """The tensors, one by one; how many of their bytes are done is told as progress."""
        stored = [self.tensor(name) for name in names]
        total, done = sum(tensor.num_bytes for tensor in stored), 0
        for tensor in stored:
            yield tensor
            done += tensor.num_bytes
            report_progress("checking weights", done, total)

    def digest(self) -> str:
        """SHA-256 over config.json, generation_config.json and every weight file, whatever the folder's name."""
        digest = hashlib.sha256()
        names = (self.config_file, self.path / "generation_config.json", *self.weight_files)
        for file in filter(Path.is_file, names):
            digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
            with file.open("rb") as stream:
                while chunk := stream.read(_DIGEST_CHUNK_BYTES):
                    digest.update(chunk)
        return digest.hexdigest()


def _non_finite(stored: StoredTensor) -> str:
    count = count_non_finite(stored)
    if not (count.nan or count.inf):
        return ""
    return f"{stored.name!r} in {stored.file.name} has {count.nan} NaN and {count.inf} Inf"


def _read_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{file}: is not JSON ({error}); download or copy it again") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: is a JSON {type(value).__name__}, it must be an object")
    return value


def _read_tensors(folder: Path) -> dict[str, StoredTensor]:
    if (folder / WEIGHTS).is_file():
        return read_header(folder / WEIGHTS)
    if (folder / INDEX).is_file():
        return _read_shards(folder)
    pickled = sorted(file.name for file in folder.glob("pytorch_model*.bin"))
    if pickled:
        raise CheckpointError(
            f"{folder}: holds its weights as {pickled[0]}, a pickle, which Ingot never loads; convert it to "
            "safetensors (transformers: model.save_pretrained(folder)) and name that folder"
        )
    raise CheckpointError(f"{folder}: holds neither {WEIGHTS} nor {INDEX}; download the weights too")


def _read_shards(folder: Path) -> dict[str, StoredTensor]:
    weight_map = _read_weight_map(folder / INDEX)
    shards = {name: _read_shard(folder, name) for name in sorted(set(weight_map.values()))}
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise CheckpointError(
                f"{folder / shard}: holds no tensor {name!r}, though {INDEX} says so."
                f"{did_you_mean(name, shards[shard])} Download or copy both files again"
            )
    for shard, tensors in shards.items():
        for name in tensors:
            if name not in weight_map:
                raise CheckpointError(f"{folder / shard}: holds {name!r}, which {INDEX} does not list; copy both again")
    return {name: shards[shard][name] for name, shard in weight_map.items()}


def _read_weight_map(file: Path) -> dict[str, str]:
    weight_map = _read_object(file).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{file}: its weight_map must be an object from tensor names to file names")
    for name, shard in weight_map.items():
        if not shard or Path(shard).name != shard or "\\" in shard:
            raise CheckpointError(f"{file}: puts {name!r} into {shard!r}; a shard must be a file in the same folder")
    return weight_map


def _read_shard(folder: Path, name: str) -> dict[str, StoredTensor]:
    if not (folder / name).is_file():
        raise CheckpointError(f"{folder / name}: the shard is missing, though {INDEX} names it; download it too")
    return read_header(folder / name)
