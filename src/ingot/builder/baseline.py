"""The baseline: the same checkpoint by the same recipe with quantization left out, made once and kept by digest."""

import hashlib
from pathlib import Path

from ingot.artifact import ArtifactWriter, open_artifact
from ingot.builder.description import describe_artifact
from ingot.errors import ArtifactError
from ingot.pipeline.checkpoint import Checkpoint
from ingot.pipeline.compile import compile_recipe, tool_versions
from ingot.pipeline.recipe import Recipe
from ingot.progress import Progress, silent
from ingot.settings import cache_dir


def baseline_artifact(recipe: Recipe, progress: Progress = silent) -> Path:
    """Folder of the recipe's baseline artifact, built when the cache does not hold it.

    The key covers the baseline's recipe, the checkpoint's bytes, the tokenizer and the tools' versions. A cached
    baseline that is incomplete or damaged is built again. INGOT_CACHE moves the cache.
    """
    unquantized = recipe.baseline()
    folder = cache_dir() / "baselines" / _key(unquantized)[:32]
    if _is_whole(folder):
        return folder
    with ArtifactWriter(folder) as writer:
        compiled = compile_recipe(unquantized, writer.path, progress=progress)
        describe_artifact(writer, unquantized, compiled)
        return writer.seal()


def _key(recipe: Recipe) -> str:
    checkpoint = Checkpoint.open(recipe.require_checkpoint())
    digest = hashlib.sha256(f"{recipe.resolved_yaml()}\0{checkpoint.digest()}\0{tool_versions()}".encode())
    for file in checkpoint.tokenizer_files:
        digest.update(f"\0{file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def _is_whole(folder: Path) -> bool:
    if not folder.exists():
        return False
    try:
        open_artifact(folder)
    except ArtifactError:
        return False
    return True
