"""Export the quantized weights of a recipe or of a sealed artifact as a checkpoint that other tools load.

From a recipe only the quantization and pruning passes run: fusions and lowerings change the program, not the values of
weights, and other formats cannot hold them. From an artifact the weights are read back from its program, without the
checkpoint and without calibration.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import onnx_ir as ir

from ingot.artifact import Artifact
from ingot.errors import UsageError, one_of, shown
from ingot.passes.base import Pass
from ingot.passes.calibration import calibrate_with
from ingot.passes.manager import PassManager
from ingot.passes.registry import make_pass
from ingot.pipeline.calibrate import resumable
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.config.decoder import read_config
from ingot.pipeline.checkpoint.sealed import as_pruned, sealed_checkpoint
from ingot.pipeline.checkpoint.tensors import EMBEDDING, tensor_names
from ingot.pipeline.compile import calibration_engine, open_source
from ingot.pipeline.interchange.artifact_weights import weights_of_artifact
from ingot.pipeline.interchange.folder import AS_IT_IS, Contents, Source, WriteOptions, new_folder, write_checkpoint
from ingot.pipeline.interchange.formats import CHECKPOINT_FORMATS, FORMATS, Format, formats_that_hold, get_format
from ingot.pipeline.interchange.weight_sources import weights_before_passes, weights_of_model
from ingot.pipeline.interchange.writers.refusals import SchemeError
from ingot.pipeline.model.importer import ModelSource
from ingot.pipeline.recipe.schema import Recipe

Note = Callable[[str], None]


def _ignore(text: str) -> None:
    """Drop the note."""


# By the options of `ingot export`; those that change less come first.
_LOOSER = {
    ("--widen",): WriteOptions(widen=True),
    ("--widen", "--round-scales"): WriteOptions(widen=True, lossy=True),
}


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
    """Quantize the recipe's checkpoint, write it with its tokenizer to the new folder `folder`, and return the folder.

    round_scales    quantize with float16 scales, which GPTQ, AWQ and GGUF store; round those of codes in the checkpoint
    widen           if the format cannot hold a scheme, use another of its schemes that holds the same values
    resume          continue the calibration of an earlier, interrupted run of the same recipe
    note            called with a sentence for each weight whose form changed

    The folder appears whole or not at all. Its weights dequantize to the same float32 bits as the IR's, unless the
    checkpoint's scales are rounded. One weight is in memory at a time. Raises UsageError when the format cannot hold
    the recipe's scheme (with the formats that can, and before calibration if the scheme alone shows it) or the folder
    exists, CheckpointError, PassError or BuildError.
    """
    row = get_format(format_name)
    model_source = open_source(recipe)
    passes = [made for made in recipe.make_passes() if made.is_lossy]
    if round_scales:
        passes = [_with_float16_scales(made) for made in passes]
    options = WriteOptions(widen=widen, lossy=round_scales, put_dtype=True)
    if not row.needs_graph:
        _refuse_early(model_source, passes, row, options)
    with resumable(resume):
        source = _quantized(model_source, recipe, passes, row)
        return _write(source, folder, row, options, note)


def export_artifact(
    artifact: Artifact,
    folder: Path,
    format_name: str,
    *,
    round_scales: bool = False,
    widen: bool = False,
    note: Note = _ignore,
) -> Path:
    """Write the artifact's weights with its tokenizer to the new folder `folder`, and return the folder.

    The checkpoint dequantizes to the numbers that the artifact's program computes with, unless scales are rounded.
    Options are those of export_checkpoint. Raises UsageError when the format cannot hold the artifact's scheme, the
    program has ops that cannot be read back, the artifact holds no config.json, or the folder exists; ArtifactError or
    BuildError.
    """
    row = get_format(format_name)
    if row.needs_graph:
        raise UsageError(
            f"{artifact.path}: {format_name} is written from a recipe, whose graph has standard operators; this "
            f"program is lowered for its engine. Name the recipe, or one of {one_of(CHECKPOINT_FORMATS)}"
        )
    checkpoint = sealed_checkpoint(artifact)
    _require_exportable(checkpoint)
    _require_loadable(checkpoint, row)
    source = Source(checkpoint, weights_of_artifact(artifact))
    return _write(source, folder, row, WriteOptions(widen=widen, lossy=round_scales, put_dtype=True), note)


def _with_float16_scales(made: Pass) -> Pass:
    """The pass with float16 scales, if the type of scales is an option of it."""
    options = made.options()
    return make_pass(made.name, {**options, "scale_dtype": "float16"}) if "scale_dtype" in options else made


def _require_exportable(checkpoint: Checkpoint) -> None:
    """Refuse what formats cannot hold under Llama's names: recurrent layers, latent attention, experts, other names."""
    config = read_config(checkpoint)
    if any(layer.recurrent is not None for layer in config.layers):
        raise UsageError(
            f"{checkpoint.path}: a {config.model_type} model has recurrent layers; no format is written for it. "
            "Build an artifact"
        )
    if config.latent is not None:
        raise UsageError(
            f"{checkpoint.path}: a {config.model_type} model has latent attention, whose kv_b_proj is computed head by "
            "head; checkpoint formats are not written for it. Export to onnx"
        )
    if any(layer.experts is not None for layer in config.layers):
        raise UsageError(
            f"{checkpoint.path}: a {config.model_type} model is a mixture of experts; checkpoint formats are not "
            "written for it. Export to onnx"
        )
    if not config.family.norms_have_weights:
        raise UsageError(
            f"{checkpoint.path}: a {config.model_type} model has norms without weights, into which passes fold scales; "
            "checkpoint formats are not written for it. Export to onnx"
        )
    embedding, stored = config.tensor_name(EMBEDDING), config.family.rewritten_weights
    other = f"{shown(embedding)} instead of {shown(EMBEDDING)}" if embedding != EMBEDDING else ""
    if other or stored:
        raise UsageError(
            f"{checkpoint.path}: a {config.model_type} model has {', and '.join(filter(None, (other, stored)))}; "
            "checkpoint formats are not written for it. Export to onnx"
        )


def _require_loadable(checkpoint: Checkpoint, row: Format) -> None:
    """Refuse a number of heads with which transformers does not load the exported config.json."""
    config = read_config(checkpoint)
    width, heads = config.hidden_size, config.num_heads
    if not row.has_config or not config.family.heads_divide_width or width % heads == 0:
        return
    shared = heads // config.num_kv_heads
    fitting = [str(groups) for groups in range(1, config.num_kv_heads) if width % (groups * shared) == 0]
    advice = f"give prune-structure kv_groups of one of {', '.join(fitting)}, or " if fitting else ""
    raise UsageError(
        f"{checkpoint.path}: transformers loads a {config.model_type} model only if num_attention_heads divides "
        f"hidden_size, and {heads} does not divide {width}; {advice}export to gguf or onnx"
    )


def _refuse_early(source: ModelSource, passes: Sequence[Pass], row: Format, options: WriteOptions) -> None:
    """Refuse what the format cannot hold before weights are checked and calibration data is read."""
    _require_exportable(source.checkpoint)
    names = tensor_names(read_config(source.checkpoint))
    weights = weights_before_passes(source.copy(), passes, names)
    if weights is not None:
        _plan(Source(source.checkpoint, weights), row, options)


def _quantized(source: ModelSource, recipe: Recipe, passes: Sequence[Pass], row: Format) -> Source:
    model = _quantized_model(source, recipe, passes)
    pruned = as_pruned(source.checkpoint, model)
    _require_loadable(pruned, row)
    if row.needs_graph:
        return Source(pruned, graph=model)
    return Source(pruned, list(weights_of_model(model, tensor_names(read_config(pruned))).values()))


def _quantized_model(source: ModelSource, recipe: Recipe, passes: Sequence[Pass]) -> ir.Model:
    source.check_weights()
    model = source.copy()
    with calibrate_with(calibration_engine(recipe, source, passes)):
        PassManager(passes).run(model)
    return model


def _write(source: Source, folder: Path, row: Format, options: WriteOptions, note: Note) -> Path:
    contents = _plan(source, row, options)
    with new_folder(folder) as staging:
        write_checkpoint(staging, folder.name, contents, source.checkpoint)
    for text in contents.notes:
        note(text)
    return folder


def _plan(source: Source, row: Format, options: WriteOptions) -> Contents:
    try:
        return row.plan(source, options)
    except SchemeError as error:
        refusal = SchemeError(f"{error}. {_what_fits(source)}")
        name = next(name for name, known in FORMATS.items() if known is row)
        fitting = (flags for flags, looser in _LOOSER.items() if formats_that_hold(source, looser, [name]))
        refusal.flags = next(fitting, ())
        raise refusal from error


def _what_fits(source: Source) -> str:
    """Name the formats that hold the weights, those that change the least first."""
    widened, rounded = _LOOSER.values()
    steps = {
        "As they are, these weights fit": AS_IT_IS,
        "with --widen (the same values in another form)": widened,
        "with --widen --round-scales": rounded,
    }
    left = [name for name, row in FORMATS.items() if not (row.dequantizes or row.variant_of or row.needs_graph)]
    parts = []
    for words, options in steps.items():
        fitting = formats_that_hold(source, options, left)
        left = [name for name in left if name not in fitting]
        if fitting or options == AS_IT_IS:
            parts.append(f"{words} {one_of(fitting) if fitting else 'no format but safetensors, which holds floats'}")
    return "; ".join(parts)
