"""Write a checkpoint folder in some format, whole or not at all.

A format's writer plans the folder's Contents from a Source. Export, transcode and import then write every folder alike:

    with new_folder(target) as folder:        a temporary folder next to the target
        write_checkpoint(folder, ...)         the contents and the tokenizer's files
        ...                                   checks; an error leaves nothing on the disk
                                              flushed, renamed to the target
"""

import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from ingot.artifact.writer import flush_to_disk
from ingot.errors import BuildError, UsageError
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.json_files import write_json
from ingot.pipeline.checkpoint.safetensors_writer import write_weights
from ingot.pipeline.checkpoint.tensors import EMBEDDING, HEAD
from ingot.pipeline.interchange.layers import PlainWeight, QuantizedLayer, Weight, lazy_tensor

FLOAT_TYPES = {"float32": ir.DataType.FLOAT, "float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}

NamedTensor = tuple[str, ir.TensorProtocol]
Layout = Mapping[str, tuple[ir.DataType, tuple[int, ...]]]  # leaf name -> type and shape
Encoder = Callable[[QuantizedLayer], Mapping[str, NDArray[Any]]]


@dataclass(frozen=True)
class Source:
    """Content to write: weights under the checkpoint's names; the checkpoint gives its configuration and tokenizer.

    graph          the compiled model, for a format that holds a graph instead of weights
    keep_scales    also write the checkpoint's scales of inputs and KV cache, if the format has a place for them
    """

    checkpoint: Checkpoint
    weights: Sequence[Weight] = ()
    graph: ir.Model | None = None
    keep_scales: bool = False


@dataclass(frozen=True)
class WriteOptions:
    """Permissions of a writer to change a weight that its format cannot hold unchanged.

    widen        use another form of the same values: more bits, smaller groups, embedding and head as float32
    lossy        round scales and minima to the float16 that the format stores
    floats       write a layer that the format cannot hold as float32, if the format allows layers in floats
    dtype        type of weights written as floats; None: plain ones keep theirs, quantized ones become float32
    put_dtype    write the type of float weights to config.json when it may have changed
    """

    widen: bool = False
    lossy: bool = False
    floats: bool = False
    dtype: ir.DataType | None = None
    put_dtype: bool = False


AS_IT_IS = WriteOptions()


@dataclass(frozen=True)
class Contents(ABC):
    """The part of a source that a format can store. notes: one sentence for each change of form, for the user."""

    notes: Sequence[str]

    @abstractmethod
    def write(self, folder: Path, name: str) -> None:
        """Write the files, one weight in memory at a time. `name` is the folder's final name."""


@dataclass(frozen=True)
class SafetensorsFiles(Contents):
    """model.safetensors and config.json. side_file: a file that repeats quantization_config, such as GPTQ's."""

    tensors: Sequence[NamedTensor]
    config: Mapping[str, Any]
    side_file: str = ""

    @property
    def quantization(self) -> Mapping[str, Any] | None:
        """config.json's quantization_config; None when no tensor is quantized."""
        return self.config.get("quantization_config")

    def write(self, folder: Path, name: str) -> None:
        write_weights(folder / "model.safetensors", self.tensors, padded=False)
        write_json(folder / "config.json", self.config)
        if self.side_file:
            write_json(folder / self.side_file, self.quantization)


def write_checkpoint(folder: Path, name: str, contents: Contents, checkpoint: Checkpoint) -> None:
    """Write the contents, and copy the checkpoint's tokenizer and generation files."""
    contents.write(folder, name)
    for copied, file in checkpoint.tokenizer_files.items():
        shutil.copyfile(file, folder / copied)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `target` after the block, or removed when the block raises.

    UsageError when `target` exists and is not empty; BuildError when its parent cannot be written.
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
            flush_to_disk(file)
        staging.chmod(0o755)
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def config_of(source: Source, options: WriteOptions, quantization: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the checkpoint's config.json with the quantization; a head with its own tensor is no longer tied."""
    config = dict(source.checkpoint.config)
    if {HEAD, EMBEDDING} <= {weight.name for weight in source.weights}:
        config["tie_word_embeddings"] = False
    if quantization is not None:
        return {**config, "quantization_config": quantization}
    dequantized = any(isinstance(weight, QuantizedLayer) for weight in source.weights)
    if options.put_dtype and (dequantized or options.dtype is not None):
        name = next((name for name, dtype in FLOAT_TYPES.items() if dtype == options.dtype), "float32")
        config |= {"dtype": name, "torch_dtype": name}  # loaders round weights to this type
    return config


def layer_tensors(
    weights: Sequence[Weight], layout: Callable[[QuantizedLayer], Layout], encode: Encoder
) -> list[NamedTensor]:
    """Return plain weights unchanged, and each layer as lazy tensors `<module>.<leaf>` of its layout.

    `encode` makes the leaves of a layer when the first of them is written; they are kept until the next layer.
    """
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
