"""Recipe -> a quantized checkpoint that other tools load: import, quantization, and a format's writer.

Only the recipe's quantization passes run: fusions and lowerings change the program and not what a weight is worth, and
foreign formats have no place for them. To add a format: its function, its line of FORMATS, its section of
docs/formats.md.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ingot.errors import UsageError, did_you_mean, one_of
from ingot.passes.calibration import calibrate_with
from ingot.passes.manager import PassManager
from ingot.passes.progress import progress_to
from ingot.passes.registry import make_pass
from ingot.pipeline.checkpoint import Checkpoint
from ingot.pipeline.compile import calibration_engine
from ingot.pipeline.config import read_config
from ingot.pipeline.formats.exported import ExportedWeight, exported_weights
from ingot.pipeline.formats.gguf_export import write_gguf
from ingot.pipeline.formats.safetensors_export import (
    Export,
    export_awq,
    export_compressed_tensors,
    export_gptq,
    export_plain,
)
from ingot.pipeline.importer import import_checkpoint
from ingot.pipeline.recipe import Recipe
from ingot.pipeline.staging import staging_folder
from ingot.pipeline.tensors import HEAD, check_tensors
from ingot.pipeline.weights_file import write_weights
from ingot.progress import Progress, silent

SAFETENSORS_FORMATS: Mapping[str, Callable[[Sequence[ExportedWeight]], Export]] = {
    "gptq": export_gptq,
    "awq": export_awq,
    "compressed-tensors": export_compressed_tensors,
    "safetensors": export_plain,
}
FORMATS = (*SAFETENSORS_FORMATS, "gguf")


def export_checkpoint(
    recipe: Recipe, folder: Path, format_name: str, *, round_scales: bool = False, progress: Progress = silent
) -> Path:
    """Quantize the recipe's checkpoint and write it to the new folder `folder`, tokenizer included; return the folder.

    round_scales    round scales to float16 behind the quantization, which GPTQ, AWQ and GGUF store

    The folder appears whole or not at all, and holds weights that dequantize to the same float32 bits as the IR's. One
    weight is in memory at a time. Raises UsageError when the format cannot hold the recipe's scheme (saying what would
    fit) or the folder is there already, CheckpointError, PassError or BuildError.
    """
    if format_name not in FORMATS:
        near = did_you_mean(format_name, FORMATS)
        raise UsageError(f"no format is named {format_name!r}; formats: {one_of(FORMATS)}.{near}")
    checkpoint = Checkpoint.open(recipe.require_checkpoint())
    weights = _quantized(checkpoint, recipe, round_scales, progress)
    with staging_folder(folder) as staging:
        if format_name == "gguf":
            write_gguf(staging / f"{folder.name}.gguf", checkpoint, weights, progress)
        else:
            export = SAFETENSORS_FORMATS[format_name](weights)
            write_weights(staging / "model.safetensors", export.tensors, progress, padded=False)
            _write_json(staging / "config.json", _config(checkpoint, weights, export))
            if format_name == "gptq":
                _write_json(staging / "quantize_config.json", export.quantization)
        _copy(checkpoint, staging)
    return folder


def _quantized(
    checkpoint: Checkpoint, recipe: Recipe, round_scales: bool, progress: Progress
) -> Sequence[ExportedWeight]:
    passes = [made for made in recipe.make_passes() if made.kind == "quantization"]
    passes += [make_pass("round-scales")] if round_scales else []
    names = check_tensors(checkpoint, read_config(checkpoint))
    with progress_to(progress):
        model = import_checkpoint(checkpoint, recipe.context_tokens)
        with calibrate_with(calibration_engine(recipe, checkpoint, model, passes)):
            PassManager(passes).run(model)
    return list(exported_weights(model, names).values())


def _config(checkpoint: Checkpoint, weights: Sequence[ExportedWeight], export: Export) -> dict[str, Any]:
    """The checkpoint's own, with what is quantized how; a head with a tensor of its own is tied no more."""
    config = dict(checkpoint.config)
    if any(weight.name == HEAD for weight in weights):
        config["tie_word_embeddings"] = False
    if export.quantization is not None:
        config["quantization_config"] = export.quantization
    return config


def _write_json(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _copy(checkpoint: Checkpoint, folder: Path) -> None:
    """The tokenizer's and generation's files, as they are."""
    for file in checkpoint.tokenizer_files:
        (folder / file.name).write_bytes(file.read_bytes())
