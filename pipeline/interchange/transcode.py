"""A quantized checkpoint in another format with the same weights, and the proof that they are the same.

Codes, scales and zero points go from file to file, one layer at a time, without the IR. The folder appears only when it
was read back and every dequantized weight compared. To add a target: its line in TARGETS.

Proof that two checkpoints hold the same weights: every tensor of both is dequantized and compared, one at a time.

Digests are SHA-256 over the tensors in the order of their names: name, shape, float32 bits, the two zeros taken as one.
Whoever holds both checkpoints can make them again.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.artifact.safetensors import StoredTensor
from ingot.errors import BuildError, CheckpointError, UsageError, did_you_mean, one_of
from ingot.pipeline.checkpoint.checkpoint import WEIGHT_DTYPES, Checkpoint
from ingot.pipeline.checkpoint.config import read_config
from ingot.pipeline.checkpoint.formats.decoded import FloatArray
from ingot.pipeline.checkpoint.json_files import write_json
from ingot.pipeline.checkpoint.safetensors_writer import write_weights
from ingot.pipeline.checkpoint.tensors import EMBEDDING, HEAD
from ingot.pipeline.interchange.folder import Export, WriteOptions, staging_folder, stored_tensor
from ingot.pipeline.interchange.layers import PlainWeight, QuantizedLayer, Weight
from ingot.pipeline.interchange.weight_sources import weights_of_checkpoint
from ingot.pipeline.interchange.writers.awq import export_awq
from ingot.pipeline.interchange.writers.compressed_tensors import export_compressed_tensors
from ingot.pipeline.interchange.writers.gguf import plan_gguf, write_gguf
from ingot.pipeline.interchange.writers.gptq import export_gptq
from ingot.pipeline.interchange.writers.plain import FLOATS, export_plain
from ingot.pipeline.interchange.writers.refusals import SchemeError
from ingot.progress import report_progress

_CHUNK_VALUES = 1 << 20


@dataclass(frozen=True)
class Proof:
    """What a comparison found. largest_difference is of float32 values; 0 where every bit is the same."""

    tensors: int
    elements: int
    largest_difference: float
    largest_in: str
    changed_tensors: int
    source_digest: str
    written_digest: str

    @property
    def equal(self) -> bool:
        """Whether all values are the same."""
        return self.source_digest == self.written_digest

    def as_json(self) -> dict[str, Any]:
        """For the proof's file."""
        return {"equal": self.equal, **asdict(self)}


def prove(source: Checkpoint, written: Checkpoint, names: Sequence[str]) -> Proof:
    """Compare the named tensors. CheckpointError when one is missing or of another shape in `written`."""
    digests = hashlib.sha256(), hashlib.sha256()
    shapes = written.shapes
    elements, changed, largest, where = 0, 0, 0.0, ""
    for done, name in enumerate(sorted(names), start=1):
        if shapes.get(name) != source.shapes[name]:
            raise CheckpointError(f"{written.path}: {name!r} is {shapes.get(name)}, not {source.shapes[name]}")
        for digest in digests:
            digest.update(f"{name}\0{list(source.shapes[name])}\0".encode())
        difference = 0.0
        for here, there in zip(_chunks(source, name), _chunks(written, name), strict=True):
            for digest, values in zip(digests, (here, there), strict=True):
                digest.update(values.data)
            elements += here.size
            difference = max(difference, float(np.abs(here - there).max(initial=0.0)))
        changed += difference > 0
        largest, where = max((largest, where), (difference, name if difference else ""))
        report_progress("comparing weights", done, len(names))
    return Proof(len(names), elements, largest, where, changed, digests[0].hexdigest(), digests[1].hexdigest())


def _chunks(checkpoint: Checkpoint, name: str) -> Iterator[FloatArray]:
    """The tensor in pieces, as float32, zeros without a sign; what is no float as its bytes, each a number."""
    values = _flat(checkpoint, name)
    for begin in range(0, max(values.size, 1), _CHUNK_VALUES):
        yield values[begin : begin + _CHUNK_VALUES].astype(np.float32) + np.float32(0)


def _flat(checkpoint: Checkpoint, name: str) -> NDArray[Any]:
    """Decoded, or mapped from its file."""
    if name in checkpoint.encoded:
        return checkpoint.encoded[name].dequantize().reshape(-1)
    stored = checkpoint.tensor(name)
    if not stored.num_bytes:
        return np.zeros(0, np.float32)
    dtype = WEIGHT_DTYPES[stored.dtype].numpy() if stored.dtype in WEIGHT_DTYPES else np.dtype(np.uint8)
    raw = np.memmap(stored.file, np.uint8, "r", offset=stored.offset, shape=(stored.num_bytes,))
    return raw.view(dtype)


_KV_OF_PROJECTION = re.compile(r"\.self_attn\.([kv])_proj\.[kv]_scale$")  # ModelOpt's place

Weights = Sequence[Weight]
Planner = Callable[[Checkpoint, Weights, WriteOptions], Export]


def _gptq(version: int | None) -> Planner:
    return lambda checkpoint, weights, options: export_gptq(weights, options, version)


def _awq(checkpoint: Checkpoint, weights: Weights, options: WriteOptions) -> Export:
    return export_awq(weights, options)


def _compressed_tensors(checkpoint: Checkpoint, weights: Weights, options: WriteOptions) -> Export:
    scales = [_scale(stored) for stored in checkpoint.scales.values()]
    return export_compressed_tensors([*weights, *scales], options, checkpoint.quantization.get("kv_cache_scheme"))


def _scale(stored: StoredTensor) -> PlainWeight:
    """A scale of activations or of the KV cache under its name in compressed-tensors, with an axis at least."""
    name = _KV_OF_PROJECTION.sub(r".self_attn.\1_scale", stored.name)
    return PlainWeight(name, stored_tensor(replace(stored, shape=stored.shape or (1,)), name))


def _gguf(checkpoint: Checkpoint, weights: Weights, options: WriteOptions) -> Export:
    return Export((), None, plan_gguf(read_config(checkpoint), weights, options).notes)


def _safetensors(checkpoint: Checkpoint, weights: Weights, options: WriteOptions) -> Export:
    return export_plain(weights, options)


TARGETS: Mapping[str, Planner] = {
    "gptq": _gptq(None),
    "gptq-v1": _gptq(1),
    "gptq-v2": _gptq(2),
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "gguf": _gguf,
    "safetensors": _safetensors,
}


@dataclass(frozen=True)
class Transcoded:
    """What was written, how it was proven, and what an attentive reader wants to know.

    notes       layers that stand in another form with the same values
    left_out    tensors of the source that are not in the target: scales of the KV cache, buffers, biases of zeros
    """

    folder: Path
    target: str
    proof: Proof
    notes: Sequence[str]
    left_out: Sequence[str]

    def as_json(self) -> dict[str, Any]:
        """For --proof and --json."""
        parts = {"folder": str(self.folder), "format": self.target, **self.proof.as_json()}
        return {**parts, "notes": list(self.notes), "left_out": list(self.left_out)}


def transcode(
    source: Path,
    folder: Path,
    target: str,
    *,
    lossy: bool = False,
    floats: bool = False,
    dtype: str | None = None,
) -> Transcoded:
    """Write the checkpoint `source` to the new folder `folder` in the format `target`, and prove it.

    lossy    round what the target stores in 16 bits; without it a change of a value is refused
    floats   compressed-tensors: write layers whose scheme it cannot hold as float32, in place of a refusal
    dtype    float32, float16 or bfloat16: the type of weights that are written as floats

    Two layers are in memory at most: the one that is read, and what is made of it. Raises UsageError when the target
    cannot hold a scheme (naming layer, scheme and the formats that can) or the folder is there already, CheckpointError
    for what is wrong with the source, BuildError when the proof fails; nothing is written then.
    """
    _require(target, TARGETS, "format")
    if dtype is not None:
        _require(dtype, FLOATS, "dtype")
    options = WriteOptions(widen=True, lossy=lossy, floats=floats, dtype=FLOATS[dtype] if dtype else None)
    checkpoint = Checkpoint.open(source)
    read = weights_of_checkpoint(checkpoint)
    export = _plan(checkpoint, read.weights, target, options)
    with staging_folder(folder) as staging:
        _write(staging, folder.name, target, checkpoint, read.weights, export, options)
        written = Checkpoint.open(staging)
        proof = prove(checkpoint, written, [weight.name for weight in read.weights])
        if not (proof.equal or lossy):
            raise BuildError(
                f"{folder}: {proof.largest_in} reads back {proof.largest_difference:g} away from what {source} holds; "
                "nothing is written. This is a fault of Ingot's; please report it"
            )
    return Transcoded(folder, target, proof, export.notes, [*read.left_out, *_left_out(checkpoint, target)])


def _require(name: str, known: Mapping[str, object], what: str) -> None:
    if name not in known:
        raise UsageError(f"no {what} is named {name!r}; it must be {one_of(known)}.{did_you_mean(name, known)}")


def _plan(checkpoint: Checkpoint, weights: Weights, target: str, options: WriteOptions) -> Export:
    try:
        return TARGETS[target](checkpoint, weights, options)
    except SchemeError as error:
        able = [name for name in TARGETS if name != target and _holds(checkpoint, weights, name, options)]
        raise UsageError(f"{error}. Formats that hold this checkpoint exactly: {one_of(able)}") from error


def _holds(checkpoint: Checkpoint, weights: Weights, target: str, options: WriteOptions) -> bool:
    try:
        TARGETS[target](checkpoint, weights, replace(options, lossy=False, floats=False, dtype=None))
    except UsageError:
        return False
    return True


def _write(
    staging: Path,
    name: str,
    target: str,
    checkpoint: Checkpoint,
    weights: Weights,
    export: Export,
    options: WriteOptions,
) -> None:
    if target == "gguf":
        write_gguf(staging / f"{name}.gguf", checkpoint, weights, options)
    else:
        write_weights(staging / "model.safetensors", export.tensors, padded=False)
        write_json(staging / "config.json", _config(checkpoint, weights, export, options))
        if target.startswith("gptq"):
            write_json(staging / "quantize_config.json", export.quantization)
    for file in checkpoint.tokenizer_files:
        (staging / file.name).write_bytes(file.read_bytes())


def _config(checkpoint: Checkpoint, weights: Weights, export: Export, options: WriteOptions) -> dict[str, Any]:
    config = dict(checkpoint.config)
    names = {weight.name for weight in weights}
    if HEAD in names and EMBEDDING in names:
        config["tie_word_embeddings"] = False
    if export.quantization is not None:
        return {**config, "quantization_config": export.quantization}
    if options.dtype is not None or any(isinstance(weight, QuantizedLayer) for weight in weights):
        name = next((name for name, dtype in FLOATS.items() if dtype == options.dtype), "float32")
        config |= {"dtype": name, "torch_dtype": name}  # loaders round weights to what stands here
    return config


def _left_out(checkpoint: Checkpoint, target: str) -> list[str]:
    caches = [name for name in checkpoint.scales if name.endswith((".k_scale", ".v_scale"))]
    if target == "compressed-tensors" or not caches:
        return []
    return [f"{len(caches)} scales of a quantized KV cache, {caches[0]} the first"]
