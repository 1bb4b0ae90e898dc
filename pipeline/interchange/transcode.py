"""Transcode: write a checkpoint in another format with the same weights, and prove that they are the same.

Codes, scales and zero points go from file to file without the IR, at most two layers in memory: the one that is read,
and its new form. The folder appears only after it was read back and every dequantized weight was compared.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.errors import BuildError, CheckpointError, UsageError, one_of, shown, unknown
from ingot.pipeline.checkpoint.checkpoint import WEIGHT_DTYPES, Checkpoint
from ingot.pipeline.checkpoint.formats.codes import FloatArray
from ingot.pipeline.interchange.folder import (
    FLOAT_TYPES,
    Contents,
    Source,
    WriteOptions,
    new_folder,
    write_checkpoint,
)
from ingot.pipeline.interchange.formats import CHECKPOINT_FORMATS, FORMATS, Format, formats_that_hold, get_format
from ingot.pipeline.interchange.weight_sources import CheckpointWeights, weights_of_checkpoint
from ingot.pipeline.interchange.writers.refusals import SchemeError
from ingot.progress import report_progress

_CHUNK_VALUES = 1 << 20


@dataclass(frozen=True)
class Transcoded:
    """The new folder with its proof.

    notes       layers that are stored in another form of the same values
    left_out    the source's tensors that are not in the folder: scales of the KV cache, buffers, biases of zeros
    """

    folder: Path
    target: str
    proof: "Proof"
    notes: Sequence[str]
    left_out: Sequence[str]

    def as_json(self) -> dict[str, Any]:
        """Return what --proof and --json write."""
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

    lossy    round what the target stores in 16 bits; without it, a change of value is refused
    floats   compressed-tensors: write layers whose scheme it cannot hold as float32, instead of refusing them
    dtype    float32, float16 or bfloat16: the type of weights that are written as floats

    Raises UsageError when the target cannot hold a scheme (naming layer, scheme and the formats that can) or the folder
    exists, CheckpointError for a damaged source, BuildError when the proof fails; nothing is written then.
    """
    get_format(target, CHECKPOINT_FORMATS)
    if dtype is not None and dtype not in FLOAT_TYPES:
        raise UsageError(f"--dtype: {unknown('type', dtype, FLOAT_TYPES, 'types')}")
    options = replace(TRANSCODING, lossy=lossy, floats=floats, dtype=FLOAT_TYPES[dtype] if dtype else None)
    checkpoint = Checkpoint.open(source)
    return write_and_prove(checkpoint, weights_of_checkpoint(checkpoint), folder, target, options)


TRANSCODING = WriteOptions(widen=True, put_dtype=True)


def write_and_prove(
    checkpoint: Checkpoint,
    read: CheckpointWeights,
    folder: Path,
    target: str,
    options: WriteOptions,
    extra_files: Mapping[str, str] | None = None,
) -> Transcoded:
    """Write the checkpoint's weights, like transcode. extra_files: name -> text of further files of the folder."""
    row = FORMATS[target]
    contents = _plan(Source(checkpoint, read.weights, keep_scales=True), row, options)
    with new_folder(folder) as staging:
        write_checkpoint(staging, folder.name, contents, checkpoint)
        proof = prove(checkpoint, Checkpoint.open(staging), [weight.name for weight in read.weights])
        if not (proof.equal or options.lossy):
            raise BuildError(
                f"{folder}: {proof.largest_in} reads back {proof.largest_difference:g} away from the value in "
                f"{checkpoint.path}; nothing is written. This is a bug in Ingot; please report it"
            )
        for name, text in (extra_files or {}).items():
            (staging / name).write_text(text, encoding="utf-8")
    return Transcoded(folder, target, proof, contents.notes, [*read.left_out, *_scales_left_out(checkpoint, row)])


def _plan(source: Source, row: Format, options: WriteOptions) -> Contents:
    try:
        return row.plan(source, options)
    except SchemeError as error:
        names = [name for name in CHECKPOINT_FORMATS if FORMATS[name] is not row]
        able = formats_that_hold(source, TRANSCODING, names)
        raise UsageError(f"{error}. Formats that hold this checkpoint exactly: {one_of(able)}") from error


def _scales_left_out(checkpoint: Checkpoint, row: Format) -> list[str]:
    caches = [name for name in checkpoint.scales if name.endswith((".k_scale", ".v_scale"))]
    if row.keeps_scales or not caches:
        return []
    return [f"{len(caches)} scales of a quantized KV cache, {caches[0]} the first"]


@dataclass(frozen=True)
class Proof:
    """The result of a comparison of two checkpoints; differences are of float32 values.

    A digest is the SHA-256 over the tensors in the order of their names: name, shape, float32 bits, both zeros as +0.
    Anyone with the two checkpoints can compute the digests again.
    """

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
        """Return what the proof's file holds."""
        return {"equal": self.equal, **asdict(self)}


def prove(source: Checkpoint, written: Checkpoint, names: Sequence[str]) -> Proof:
    """Dequantize and compare the named tensors, one at a time.

    CheckpointError when one is missing from `written` or has another shape there.
    """
    digests = hashlib.sha256(), hashlib.sha256()
    shapes = written.shapes
    elements, changed, largest, where = 0, 0, 0.0, ""
    for done, name in enumerate(sorted(names), start=1):
        if shapes.get(name) != source.shapes[name]:
            raise CheckpointError(f"{written.path}: {shown(name)} is {shapes.get(name)}, not {source.shapes[name]}")
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
    """Yield slices of the tensor as float32, -0 as +0. Of a tensor without floats, each byte is a number."""
    values = _flat(checkpoint, name)
    for begin in range(0, max(values.size, 1), _CHUNK_VALUES):
        yield values[begin : begin + _CHUNK_VALUES].astype(np.float32) + np.float32(0)


def _flat(checkpoint: Checkpoint, name: str) -> NDArray[Any]:
    """Return the tensor's values, decoded or mapped from its file."""
    if name in checkpoint.encoded:
        return checkpoint.encoded[name].dequantize().reshape(-1)
    stored = checkpoint.tensor(name)
    if not stored.num_bytes:
        return np.zeros(0, np.float32)
    dtype = WEIGHT_DTYPES[stored.dtype].numpy() if stored.dtype in WEIGHT_DTYPES else np.dtype(np.uint8)
    raw = np.memmap(stored.file, np.uint8, "r", offset=stored.offset, shape=(stored.num_bytes,))
    return raw.view(dtype)
