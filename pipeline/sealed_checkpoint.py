"""What an artifact keeps of the checkpoint it was built from, beside the weights: its configuration and its tokenizer.

Both lie in the folder tokenizer/, config.json as the compiler understood it: of a GGUF file in Hugging Face's words, of
a quantized checkpoint without what says how its layers were stored.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from ingot.artifact import Artifact
from ingot.errors import ArtifactError, UsageError
from ingot.pipeline.checkpoint import Checkpoint
from ingot.pipeline.safetensors_file import read_header
from ingot.pipeline.segments import WEIGHTS

FOLDER = "tokenizer"
CONFIG = f"{FOLDER}/config.json"


def seal_checkpoint(checkpoint: Checkpoint, folder: Path) -> None:
    """Copy the tokenizer's and generation's files into folder/tokenizer as they are, and write config.json there."""
    (folder / FOLDER).mkdir()
    for file in checkpoint.tokenizer_files:
        shutil.copyfile(file, folder / FOLDER / file.name)
    text = json.dumps(dict(checkpoint.config), indent=2, sort_keys=True) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")


def sealed_checkpoint(artifact: Artifact) -> Checkpoint:
    """The artifact's configuration and tokenizer as a checkpoint whose tensors are those that the program stores.

    UsageError for an artifact of an older Ingot, which kept no configuration.
    """
    if not artifact.has(CONFIG):
        raise UsageError(
            f"{artifact.path}: the artifact holds no {CONFIG}, which says what its weights are called; it was built by "
            "an older Ingot: build it again, or name its recipe and checkpoint instead of the artifact"
        )
    generation = f"{FOLDER}/generation_config.json"
    return Checkpoint(
        artifact.path / FOLDER,
        _read(artifact.file(CONFIG)),
        _read(artifact.file(generation)) if artifact.has(generation) else {},
        read_header(artifact.file(f"program/{WEIGHTS}")),
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except ValueError as error:
        raise ArtifactError(f"{file}: is not JSON ({error}); build the artifact again") from error
    if not isinstance(value, dict):
        raise ArtifactError(f"{file}: is a JSON {type(value).__name__}, it must be an object; build the artifact again")
    return value
