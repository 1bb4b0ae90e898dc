"""A recipe, or a sealed artifact -> a quantized checkpoint that other tools load, by a format's writer.

Of a recipe only the quantization and pruning passes run: fusions and lowerings change the program and not what a weight
is worth, and foreign formats have no place for them. An artifact is read back as it is (artifact_weights.py): no
checkpoint, no calibration text is wanted. To add a format: its function, its line of FORMATS, its section of
docs/formats.md.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ingot.artifact import Artifact
from ingot.errors import UsageError, did_you_mean, one_of
from ingot.passes.base import Pass
from ingot.passes.calibration import calibrate_with
from ingot.passes.manager import PassManager
from ingot.passes.registry import make_pass
from ingot.pipeline.calibrate import resumable
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.config import read_config
from ingot.pipeline.checkpoint.json_files import write_json
from ingot.pipeline.checkpoint.safetensors_writer import write_weights
from ingot.pipeline.checkpoint.sealed import as_pruned, sealed_checkpoint
from ingot.pipeline.checkpoint.tensors import HEAD, check_tensors, tensor_names
from ingot.pipeline.compile import calibration_engine
from ingot.pipeline.interchange.artifact_weights import weights_of_artifact
from ingot.pipeline.interchange.folder import AS_IT_IS, WriteOptions, staging_folder
from ingot.pipeline.interchange.layers import Weight
from ingot.pipeline.interchange.weight_sources import weights_before_passes, weights_of_model
from ingot.pipeline.interchange.writers.gguf import plan_gguf, tokenizer_metadata, write_gguf
from ingot.pipeline.interchange.writers.plain import (
    Export,
    export_awq,
    export_compressed_tensors,
    export_gptq,
    export_plain,
)
from ingot.pipeline.interchange.writers.qdq_onnx import write_qdq_onnx
from ingot.pipeline.interchange.writers.refusals import SchemeError
from ingot.pipeline.model.importer import import_checkpoint
from ingot.pipeline.recipe.schema import Recipe

SAFETENSORS_FORMATS: Mapping[str, Callable[[Sequence[Weight], WriteOptions], Export]] = {
    "gptq": export_gptq,
    "gptq-v1": partial(export_gptq, version=1),
    "gptq-v2": partial(export_gptq, version=2),
    "awq": export_awq,
    "compressed-tensors": export_compressed_tensors,
    "safetensors": export_plain,
}
CHECKPOINT_FORMATS = (*SAFETENSORS_FORMATS, "gguf")
ONNX = "onnx"  # a whole graph, which only a recipe has
FORMATS = (*CHECKPOINT_FORMATS, ONNX)

Note = Callable[[str], None]


def _ignore(words: str) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class Source:
    """What is exported: weights by the checkpoint's names, and the checkpoint for its configuration and tokenizer."""

    checkpoint: Checkpoint
    weights: Sequence[Weight]


def export_checkpoint(
    recipe: Recipe,
    folder: Path,
    format_name: str,
    *,
    round_scales: bool = False,
    widen: bool = False,
    resume: bool = True,
    note: Note = _ignore,
) -> Path:
    """Quantize the recipe's checkpoint and write it to the new folder `folder`, tokenizer included; return the folder.

    round_scales    round scales to float16 behind the quantization, which GPTQ, AWQ and GGUF store
    widen           where the format has no place for a scheme, take another of its own that holds the same values
    resume          go on with a calibration that an earlier run of the same recipe did in part
    note            is told, in words, what stands in the folder in another form than before

    The folder appears whole or not at all, and holds weights that dequantize to the same float32 bits as the IR's. One
    weight is in memory at a time. Raises UsageError when the format cannot hold the recipe's scheme (saying which can,
    before calibration where that is known by then) or the folder is there already, CheckpointError, PassError or
    BuildError.
    """
    _require_format(format_name)
    checkpoint = Checkpoint.open(recipe.require_checkpoint())
    passes = [made for made in recipe.make_passes() if made.is_lossy]
    passes += [make_pass("round-scales")] if round_scales else []
    options = WriteOptions(widen=widen)
    if format_name != ONNX:
        _refuse_early(checkpoint, recipe, passes, format_name, options)
    with resumable(resume):
        if format_name == ONNX:
            return _write_onnx(checkpoint, _quantized_model(checkpoint, recipe, passes), folder)
        return _write(_quantized(checkpoint, recipe, passes), folder, format_name, options, note)


def export_artifact(
    artifact: Artifact,
    folder: Path,
    format_name: str,
    *,
    round_scales: bool = False,
    widen: bool = False,
    note: Note = _ignore,
) -> Path:
    """Write the artifact's weights to the new folder `folder`, tokenizer included; return the folder.

    The checkpoint dequantizes to the very numbers that the artifact's program computes with, unless scales are rounded.
    Options are those of export_checkpoint.
    Raises UsageError when the format cannot hold the artifact's scheme, the program has ops that cannot be read back,
    the artifact is too old to know its configuration, or the folder is there already; ArtifactError or BuildError.
    """
    _require_format(format_name)
    if format_name == ONNX:
        raise UsageError(
            f"{artifact.path}: {ONNX} is written from a recipe, whose graph is standard operators; this program is "
            f"lowered for its engine. Name the recipe, or one of {one_of(CHECKPOINT_FORMATS)}"
        )
    source = Source(sealed_checkpoint(artifact), weights_of_artifact(artifact))
    return _write(source, folder, format_name, WriteOptions(widen=widen, lossy=round_scales), note)


def _require_format(name: str) -> None:
    if name not in FORMATS:
        raise UsageError(f"no format is named {name!r}; formats: {one_of(FORMATS)}.{did_you_mean(name, FORMATS)}")


def require_fit(source: Source, format_name: str, options: WriteOptions = AS_IT_IS) -> None:
    """SchemeError when the format cannot hold a weight: which one, what would fit, and which formats can."""
    try:
        _plan(source, format_name, options)
    except SchemeError as error:
        raise SchemeError(f"{error}. {_what_fits(source)}") from error


def _what_fits(source: Source) -> str:
    """The formats that hold the weights, by the least that has to be allowed."""
    allowed = {
        "As they are, these weights fit": AS_IT_IS,
        "with --widen (the same values in another form)": WriteOptions(widen=True),
        "with --widen --round-scales": WriteOptions(widen=True, lossy=True),
    }
    left = [name for name in CHECKPOINT_FORMATS if name not in ("safetensors", "gptq-v1", "gptq-v2")]
    said = []
    for words, options in allowed.items():
        fitting = [name for name in left if _holds(source, name, options)]
        left = [name for name in left if name not in fitting]
        if fitting or options == AS_IT_IS:
            said.append(f"{words} {one_of(fitting) if fitting else 'no format but safetensors, which has floats'}")
    return "; ".join(said)


def _holds(source: Source, format_name: str, options: WriteOptions) -> bool:
    try:
        _plan(source, format_name, options)
    except UsageError:
        return False
    return True


def _plan(source: Source, format_name: str, options: WriteOptions) -> Export | None:
    """What a safetensors format would write; None for gguf, of which it is only found out that it can."""
    if format_name != "gguf":
        return SAFETENSORS_FORMATS[format_name](source.weights, options)
    config = read_config(source.checkpoint)
    plan_gguf(config, source.weights, options)
    tokenizer_metadata(source.checkpoint, config)
    return None


def _write(source: Source, folder: Path, format_name: str, options: WriteOptions, note: Note) -> Path:
    require_fit(source, format_name, options)
    checkpoint, weights = source.checkpoint, source.weights
    with staging_folder(folder) as staging:
        if format_name == "gguf":
            notes = write_gguf(staging / f"{folder.name}.gguf", checkpoint, weights, options)
        else:
            export = SAFETENSORS_FORMATS[format_name](weights, options)
            notes = export.notes
            write_weights(staging / "model.safetensors", export.tensors, padded=False)
            write_json(staging / "config.json", _config(checkpoint, weights, export))
            if format_name.startswith("gptq"):
                write_json(staging / "quantize_config.json", export.quantization)
        _copy(checkpoint, staging)
    for words in notes:
        note(words)
    return folder


def _refuse_early(
    checkpoint: Checkpoint, recipe: Recipe, passes: Sequence[Pass], format_name: str, options: WriteOptions
) -> None:
    """Before weights are checked and data is read, as far as the schemes are known by then."""
    names = check_tensors(checkpoint, read_config(checkpoint))
    model = import_checkpoint(checkpoint, recipe.context_tokens, check_weights=False)
    weights = weights_before_passes(model, passes, names)
    if weights is not None:
        require_fit(Source(checkpoint, weights), format_name, options)


def _quantized(checkpoint: Checkpoint, recipe: Recipe, passes: Sequence[Pass]) -> Source:
    model = _quantized_model(checkpoint, recipe, passes)
    checkpoint = as_pruned(checkpoint, model)
    return Source(checkpoint, list(weights_of_model(model, tensor_names(read_config(checkpoint))).values()))


def _quantized_model(checkpoint: Checkpoint, recipe: Recipe, passes: Sequence[Pass]) -> ir.Model:
    check_tensors(checkpoint, read_config(checkpoint))
    model = import_checkpoint(checkpoint, recipe.context_tokens)
    with calibrate_with(calibration_engine(recipe, checkpoint, model, passes)):
        PassManager(passes).run(model)
    return model


def _write_onnx(checkpoint: Checkpoint, model: ir.Model, folder: Path) -> Path:
    checkpoint = as_pruned(checkpoint, model)
    with staging_folder(folder) as staging:
        write_qdq_onnx(model, staging)
        write_json(staging / "config.json", checkpoint.config)
        _copy(checkpoint, staging)
    return folder


def _config(checkpoint: Checkpoint, weights: Sequence[Weight], export: Export) -> dict[str, Any]:
    """The checkpoint's own, with what is quantized how; a head with a tensor of its own is tied no more."""
    config = dict(checkpoint.config)
    if any(weight.name == HEAD for weight in weights):
        config["tie_word_embeddings"] = False
    if export.quantization is not None:
        config["quantization_config"] = export.quantization
    return config


def _copy(checkpoint: Checkpoint, folder: Path) -> None:
    """The tokenizer's and generation's files, as they are."""
    for file in checkpoint.tokenizer_files:
        (folder / file.name).write_bytes(file.read_bytes())
