"""Build the baseline, a recipe without quantization, and cache it by digest; measure a sealed artifact against it."""

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path

from ingot.artifact import Artifact, ArtifactWriter, open_artifact
from ingot.builder.measurements import bos_tokens, measure_options, origin_of
from ingot.errors import ArtifactError, UsageError
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.compile import compile_recipe, describe_artifact, open_source, tool_versions
from ingot.pipeline.model.importer import ModelSource
from ingot.pipeline.recipe.fit import fit_to_model
from ingot.pipeline.recipe.load import load_recipe
from ingot.pipeline.recipe.schema import Recipe
from ingot.runtime import Tokenizer
from ingot.settings import cache_dir, make_cache_dir
from ingot.validation.evidence import BuildNotes, Evidence, measure, sealed_quantization
from ingot.validation.evidence_json import SealedSummary, sealed_summary
from ingot.validation.prediction import sealed_prediction
from ingot.validation.result import Origin

_log = logging.getLogger(__name__)


def baseline_artifact(recipe: Recipe, source: ModelSource | None = None) -> Path:
    """Build the recipe's baseline artifact, unless the cache holds it, and return its folder.

    `source` is the recipe's checkpoint, if the caller has opened it. The cache key covers the baseline's recipe, the
    checkpoint's bytes, the tokenizer and the versions of the tools. An incomplete or damaged baseline is built again.
    INGOT_CACHE sets the cache folder.
    """
    unquantized = recipe.baseline()
    source = source or open_source(unquantized)
    name = _key(unquantized, source.checkpoint)[:32]
    folder = cache_dir() / "baselines" / name
    if _is_valid(folder):
        return folder
    folder = make_cache_dir("baselines") / name
    with ArtifactWriter(folder) as writer:
        compiled = compile_recipe(unquantized, writer.path, source=source)
        describe_artifact(writer, unquantized, compiled, unquantized.name)
        return writer.seal()


def _key(recipe: Recipe, checkpoint: Checkpoint) -> str:
    digest = hashlib.sha256(f"{recipe.resolved_yaml()}\0{checkpoint.digest}\0{tool_versions()}".encode())
    for name, file in checkpoint.tokenizer_files.items():
        digest.update(f"\0{name}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def _is_valid(folder: Path) -> bool:
    if not folder.exists():
        return False
    try:
        open_artifact(folder)
    except ArtifactError:
        return False
    return True


def remeasure(
    artifact: Path | str,
    *,
    checkpoint: Path | str | None = None,
    baseline: Path | str | None = None,
    overrides: Sequence[str] = (),
) -> Evidence:
    """Measure a sealed artifact against a baseline artifact, or one built from the checkpoint, and decide its gates.

    With a baseline, the checkpoint is needed only if it holds the evaluation text. `overrides` change the recipe's
    evaluation, latency and gates. The artifact is not changed. Raises ArtifactError for a damaged artifact, UsageError
    without baseline and checkpoint.
    """
    opened = open_artifact(artifact)
    if checkpoint is None and baseline is None:
        raise UsageError("no baseline to compare with; add --baseline ARTIFACT, or --checkpoint FOLDER to build one")
    recipe = with_checkpoint(opened, checkpoint, overrides)
    if not recipe.is_measured:
        raise UsageError(
            f"recipe {recipe.name} measures nothing: set evaluation.text or latency, as in "
            "--set evaluation.text=FILE --set latency.rounds=5"
        )
    recipe = fit_to_model(recipe, opened.manifest.model.context_tokens, bos_tokens(_tokenizer(opened)))
    options = measure_options(recipe)  # finds the texts, before a baseline is built
    sealed = sealed_summary(opened) or SealedSummary()
    origin = sealed.origin
    if baseline:
        other = Path(baseline)
    else:
        source = open_source(recipe)
        origin = _same_origin(opened, sealed.origin, origin_of(recipe, source))
        other = baseline_artifact(recipe.for_engine(opened.manifest.engine), source)
    notes = BuildNotes(
        quantization=sealed_quantization(opened),
        origin=origin,
        samples=sealed.samples,
        prediction=sealed_prediction(opened),
    )
    return measure(opened.path, other, options, notes)


def _tokenizer(artifact: Artifact) -> Tokenizer | None:
    """Return the artifact's tokenizer; None without one."""
    return Tokenizer.of_artifact(artifact)


def _same_origin(artifact: Artifact, sealed: Origin | None, given: Origin) -> Origin:
    """Return the origin that the artifact records, or else the given checkpoint's; warn if they differ."""
    if sealed is not None and sealed.checkpoint_digest != given.checkpoint_digest:
        _log.warning(
            "%s was built from the checkpoint %s with digest %s, but %s has %s: the comparison shows the difference of "
            "the checkpoints too",
            artifact.path,
            sealed.checkpoint,
            sealed.checkpoint_digest[:16],
            given.checkpoint,
            given.checkpoint_digest[:16],
        )
    return sealed or given


def with_checkpoint(artifact: Artifact, checkpoint: Path | str | None, overrides: Sequence[str] = ()) -> Recipe:
    """Load the artifact's recipe, with this checkpoint if one is given."""
    source = [f"checkpoint={_as_yaml(Path(checkpoint).expanduser().absolute())}"] if checkpoint else []
    return load_recipe(artifact.file("recipe.yaml"), [*source, *overrides])


def _as_yaml(path: Path) -> str:
    """Quote the path: a file name may contain YAML syntax."""
    return json.dumps(str(path), ensure_ascii=False)
