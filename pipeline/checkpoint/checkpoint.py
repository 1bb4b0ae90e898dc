"""A checkpoint, a Hugging Face folder or a GGUF file: its configuration, its tokenizer's files, its tensors in place.

config.json                        the model's shape
generation_config.json             optional: token ids that end a text
tokenizer.json, ...                optional here; the runtime needs them
model.safetensors                  the tensors, or
model.safetensors.index.json       the names of the shards that hold them
quantize_config.json               optional: how a quantized checkpoint's layers are stored, unless config.json says so;
hf_quant_config.json               the same for ModelOpt

A .gguf file, or a folder with one and without config.json, has configuration and tensors in one file.
"""

import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import onnx_ir as ir
from numpy.typing import NDArray

from ingot.artifact.json_text import read_json_object
from ingot.artifact.safetensors import StoredTensor, read_header
from ingot.errors import CheckpointError, did_you_mean, naming_file, shown
from ingot.pipeline.checkpoint.adapter import CheckpointAdapter, read_adapter
from ingot.pipeline.checkpoint.config.text_tower import TextTower, read_tower, text_config
from ingot.pipeline.checkpoint.families import FAMILIES
from ingot.pipeline.checkpoint.formats.decoded import EncodedTensor
from ingot.pipeline.checkpoint.formats.quantized_folder import (
    KEYS,
    SIDE_FILES,
    quantization_of,
    refuse_quantized_tensors,
    scales_left_out,
    split_tensors,
)
from ingot.pipeline.checkpoint.gguf import gguf_config, gguf_tensors
from ingot.pipeline.checkpoint.gguf_file import read_gguf
from ingot.pipeline.checkpoint.non_finite import count_non_finite
from ingot.progress import report_progress

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CHAT_TEMPLATE = "chat_template.jinja"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    CHAT_TEMPLATE,
    "generation_config.json",
)
WEIGHT_DTYPES = {"F32": ir.DataType.FLOAT, "F16": ir.DataType.FLOAT16, "BF16": ir.DataType.BFLOAT16}
_DIGEST_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: headers are read and checked, tensor data is not touched.

    config, generation_config    the JSON objects of the files, without the keys of weight encodings; the latter is
                                 empty if the file is missing
    tensors                      name -> place of the tensor
    encoded                      name -> how to decode it, for the weights of a quantized checkpoint
    quantization                 config.json's description of how weights are encoded; empty if it has none
    scales                       name -> place of a quantized checkpoint's scales of activations and KV cache
    readable                     names of the small files that may be read, where an artifact lists them; None: all
    chat_template                file of a template that replaces the checkpoint's own; None: its own
    tower                        of a multimodal checkpoint, whose text model this is; None: a text model
    adapter                      what is merged into the tensors when they are read; None: nothing
    """

    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    encoded: Mapping[str, EncodedTensor] = field(default_factory=dict)
    quantization: Mapping[str, Any] = field(default_factory=dict)
    scales: Mapping[str, StoredTensor] = field(default_factory=dict)
    readable: frozenset[str] | None = None
    chat_template: Path | None = None
    tower: TextTower | None = None
    adapter: CheckpointAdapter | None = None

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Open the folder or .gguf file `path`.

        Raises CheckpointError with the file and its problem: a missing folder or file, invalid JSON, a safetensors
        file that is truncated or contradicts itself, a shard or tensor that the index names and that is missing.
        """
        folder = Path(path)
        if (file := gguf_file_at(folder)) is not None:
            return cls._open_gguf(file)
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: no such folder; a checkpoint is a folder with config.json and {WEIGHTS}")
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"{folder}: holds no config.json, so it is not a checkpoint; name one that does")
        config, tensors = read_json_object(folder / "config.json"), _read_tensors(folder)
        if not tensors:
            raise CheckpointError(f"{folder}: its weights hold no tensor; download or copy them again")
        quantization = quantization_of(folder, config)
        if quantization is None:
            refuse_quantized_tensors(tensors, str(folder / "config.json"))
            return cls(folder, config, _read_generation(folder), tensors)._text_model()
        config = {key: value for key, value in config.items() if key not in KEYS}
        plain, encoded = split_tensors(tensors, quantization, str(folder / "config.json"))
        scales = scales_left_out(tensors)
        return cls(folder, config, _read_generation(folder), plain, encoded, quantization, scales)._text_model()

    def _text_model(self) -> Self:
        """The text model of a multimodal checkpoint, if it is one whose text model is imported."""
        text = text_config(self.config, str(self.config_file))
        if text is None or text["model_type"] not in FAMILIES:
            return self
        stored = [*self.tensors, *self.encoded, *self.scales]
        tower = read_tower(self.config, text, stored, str(self.path))
        encoded = {name: replace(tensor, name=name) for name, tensor in tower.of_text(self.encoded).items()}
        return replace(
            self,
            config=tower.config,
            tensors=tower.of_text(self.tensors),
            encoded=encoded,
            scales=tower.of_text(self.scales),
            tower=tower,
        )

    @classmethod
    def _open_gguf(cls, path: Path) -> Self:
        file = read_gguf(path)
        tensors, encoded = gguf_tensors(file)
        return cls(path, gguf_config(file), _read_generation(path.parent), tensors, encoded)

    @property
    def folder(self) -> Path:
        """Folder of the tokenizer's and the other small files."""
        return self.path.parent if self.path.is_file() else self.path

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor; of encoded ones, after decoding."""
        plain = {name: tensor.shape for name, tensor in self.tensors.items()}
        return plain | {name: tensor.shape for name, tensor in self.encoded.items()}

    @property
    def config_file(self) -> Path:
        """config.json or the GGUF file, for messages."""
        return self.path if self.path.is_file() else self.path / "config.json"

    @property
    def tokenizer_files(self) -> dict[str, Path]:
        """Name -> file of those of TOKENIZER_FILES that there are; a given chat template replaces the folder's."""
        names = [name for name in TOKENIZER_FILES if self.readable is None or name in self.readable]
        found = {name: file for name in names if (file := self.folder / name).is_file()}
        return found if self.chat_template is None else {**found, CHAT_TEMPLATE: self.chat_template}

    @property
    def weight_files(self) -> tuple[Path, ...]:
        """The files that hold tensors, sorted by name."""
        return tuple(sorted({self.file_of(name) for name in (*self.tensors, *self.encoded)}))

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor, encoded or not."""
        return self.encoded[name].file if name in self.encoded else self.tensor(name).file

    def tensor(self, name: str) -> StoredTensor:
        """The stored tensor; CheckpointError with the nearest name for an unknown one."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: holds no tensor {shown(name)}.{did_you_mean(name, self.tensors)}")
        return self.tensors[name]

    def with_adapter(self, folder: Path) -> Self:
        """The checkpoint with a LoRA adapter merged into it; CheckpointError as `read_adapter`."""
        stored_names = self.tower.names if self.tower else {}
        names = {stored: name for name, stored in stored_names.items()}
        adapter = read_adapter(folder, self.tensors, self.encoded, lambda name: names.get(name, name))
        return replace(self, adapter=adapter, tensors={**self.tensors, **adapter.replaced})

    def external(self, name: str) -> ir.TensorProtocol:
        """The tensor as the IR sees it: a memory-mapped view of the safetensors file, nothing copied.

        One to which the adapter adds is made each time it is read. Raises CheckpointError for a dtype other than
        float32, float16 and bfloat16.
        """
        stored = self.tensor(name)
        self.require_weight_type(stored)
        tensor = _external(stored, name, stored.offset, stored.shape)
        if self.adapter is None or name not in self.adapter.added:
            return tensor
        return self.adapter.apply(name, tensor)

    def external_slice(self, name: str, index: int, start: int, rows: int, part: str) -> ir.ExternalTensor:
        """Rows start .. start + rows of matrix `index` of a tensor [matrices, rows, columns] or [rows, columns].

        As `external`; `part` is the slice's own name.
        """
        stored = self.tensor(name)
        self.require_weight_type(stored)
        height, width = stored.shape[-2:]
        row_bytes = width * WEIGHT_DTYPES[stored.dtype].bitwidth // 8
        return _external(stored, part, stored.offset + (index * height + start) * row_bytes, (rows, width))

    @staticmethod
    def require_weight_type(stored: StoredTensor) -> None:
        """Raise CheckpointError for a dtype other than float32, float16 and bfloat16."""
        if stored.dtype not in WEIGHT_DTYPES:
            raise CheckpointError(
                f"{stored.file}: {shown(stored.name)} is {stored.dtype}; weights must be F32, F16 or BF16. "
                "Export the checkpoint in one of these (if it is quantized: the model it was made from)"
            )

    def check_finite(self, names: Iterable[str] | None = None) -> None:
        """Read every float tensor (or those named) in chunks; CheckpointError names all that hold NaN or Inf.

        Encoded weights are not read here; decoding checks them.
        """
        chosen = self.tensors if names is None else [name for name in names if name not in self.encoded]
        problems = [text for stored in self._reported(chosen) if (text := _non_finite(stored))]
        if problems:
            raise CheckpointError(
                f"{self.path}: weights must be finite, but " + "; ".join(problems) + ". "
                "The checkpoint is damaged or its training diverged; take another one"
            )

    def _reported(self, names: Iterable[str]) -> Iterator[StoredTensor]:
        """The tensors one by one; reports the bytes of those that are done as progress."""
        stored = [*(self.tensor(name) for name in names), *(self.adapter.parts if self.adapter else ())]
        total, done = sum(tensor.num_bytes for tensor in stored), 0
        for tensor in stored:
            yield tensor
            done += tensor.num_bytes
            report_progress("checking weights", done, total)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of config.json, generation_config.json, all weight files and the adapter's; not of folders' names."""
        digest = hashlib.sha256()
        small = [self.folder / name for name in ("generation_config.json", *SIDE_FILES)]
        of_adapter = self.adapter.files if self.adapter else ()
        files = dict.fromkeys([self.config_file, *small, *self.weight_files, *of_adapter])
        for file in filter(Path.is_file, files):
            digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
            with naming_file(file), file.open("rb") as stream:
                while chunk := stream.read(_DIGEST_CHUNK_BYTES):
                    digest.update(chunk)
        return digest.hexdigest()


def _external(stored: StoredTensor, name: str, offset: int, shape: tuple[int, ...]) -> ir.ExternalTensor:
    """A tensor in the file of a stored one."""
    # The cache of a hub holds links to files elsewhere, which onnx_ir refuses to follow.
    folder, file = os.path.split(os.path.realpath(stored.file))
    kind = WEIGHT_DTYPES[stored.dtype]
    size = math.prod(shape) * kind.bitwidth // 8
    return _MappedTensor(file, offset, size, kind, shape=ir.Shape(shape), name=name, base_dir=folder)


class _MappedTensor(ir.ExternalTensor):
    """Names the file when it cannot be mapped."""

    def numpy(self) -> NDArray[Any]:
        with naming_file(self.path):
            return super().numpy()

    def tobytes(self) -> bytes:
        with naming_file(self.path):
            return super().tobytes()

    def tofile(self, file: Any) -> None:
        with naming_file(self.path):
            super().tofile(file)


def gguf_file_at(path: Path) -> Path | None:
    """The GGUF file `path`, or the one in the folder `path` if that has no config.json; None for other paths.

    CheckpointError when the folder has several.
    """
    if path.suffix == ".gguf" and path.is_file():
        return path
    found = sorted(path.glob("*.gguf")) if path.is_dir() and not (path / "config.json").is_file() else []
    if len(found) > 1:
        raise CheckpointError(f"{path}: holds {len(found)} GGUF files and no config.json; name one of the files")
    return found[0] if found else None


def _read_generation(folder: Path) -> dict[str, Any]:
    file = folder / "generation_config.json"
    return read_json_object(file) if file.is_file() else {}


def _non_finite(stored: StoredTensor) -> str:
    count = count_non_finite(stored)
    if not (count.nan or count.inf):
        return ""
    return f"{shown(stored.name)} in {stored.file.name} has {count.nan} NaN and {count.inf} Inf"


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
                f"{folder / shard}: holds no tensor {shown(name)}, though {INDEX} says so."
                f"{did_you_mean(name, shards[shard])} Download or copy both files again"
            )
    for shard, tensors in shards.items():
        for name in tensors:
            if name not in weight_map:
                raise CheckpointError(
                    f"{folder / shard}: holds {shown(name)}, which {INDEX} does not list; copy both again"
                )
            if weight_map[name] != shard:
                _require_copy(tensors[name], shards[weight_map[name]][name])
    return {name: shards[shard][name] for name, shard in weight_map.items()}


def _require_copy(stored: StoredTensor, listed: StoredTensor) -> None:
    """Raise CheckpointError unless a tensor in another shard than the index says is a copy of the listed one."""
    form, listed_form = (stored.dtype, stored.shape), (listed.dtype, listed.shape)
    if form == listed_form and all(map(bytes.__eq__, _pieces(stored), _pieces(listed))):
        return
    raise CheckpointError(
        f"{stored.file} and {listed.file.name} both hold {shown(stored.name)}, and with different values; copy both "
        f"shards and {INDEX} again"
    )


def _pieces(stored: StoredTensor) -> Iterator[bytes]:
    """The tensor's bytes, one piece in memory at a time."""
    with naming_file(stored.file), stored.file.open("rb") as stream:
        stream.seek(stored.offset)
        for begin in range(0, stored.num_bytes, _DIGEST_CHUNK_BYTES):
            yield stream.read(min(_DIGEST_CHUNK_BYTES, stored.num_bytes - begin))


def _read_weight_map(file: Path) -> dict[str, str]:
    weight_map = read_json_object(file).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{file}: its weight_map must be an object from tensor names to file names")
    for name, shard in weight_map.items():
        if not _is_file_name(shard):
            raise CheckpointError(
                f"{file}: puts {shown(name)} into {shown(shard)}; a shard must be a file in the same folder"
            )
    return weight_map


def _is_file_name(name: str) -> bool:
    """Whether it is a name that a file in this folder can have: up to 255 bytes of Unicode, no path."""
    encoded = name.encode("utf-8", "replace")
    return 0 < len(encoded) < 256 and name == encoded.decode() and name not in (".", "..") and not {*name} & {*"/\\\0"}


def _read_shard(folder: Path, name: str) -> dict[str, StoredTensor]:
    if not (folder / name).is_file():
        raise CheckpointError(f"{folder / name}: the shard is missing, though {INDEX} names it; download it too")
    return read_header(folder / name)
