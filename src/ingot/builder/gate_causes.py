"""Why a gate on accuracy failed: what weights, KV cache, activations and pruning each explain of the KL divergence.

Each part is put back to 16 bits, by leaving out its passes, and the rest is built and measured again on a part of the
text. Where that takes too long, the KL of rounding each weight alone, which the build measured, says whether weights
explain the divergence.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from ingot.artifact import ArtifactWriter
from ingot.artifact.metrics import METRICS
from ingot.builder.measurements import measure_options
from ingot.errors import IngotError
from ingot.passes.base import Pass
from ingot.pipeline.compile import Compiled, compile_recipe, describe_artifact
from ingot.pipeline.model.importer import ModelSource
from ingot.pipeline.recipe.schema import Recipe
from ingot.progress import note
from ingot.validation.evidence import Evidence, MeasureOptions, measure
from ingot.validation.options import MIN_WINDOWS, AccuracyOptions

_log = logging.getLogger(__name__)
_METRIC = "kl_mean"
_MOST_SECONDS = 120.0  # the passes of one build: each part takes about as long again
_MOST_TOKENS = 4096
_WEIGHTS = "weights"
_PART_OF = {
    "quantize-kv-cache": "KV cache",
    "quantize-activations": "activations",
    "smooth-quant": "weights with activations",
}
_ADVICE = {
    _WEIGHTS: "use more bits, a smaller block, GPTQ or AWQ for them",
    "KV cache": "give quantize-kv-cache more bits, or leave it out",
    "weights with activations": "leave out smooth-quant for quantize-weights, which rounds no activations",
    "activations": "leave out quantize-activations, or put smooth-quant before it",
    "pruning": "prune less, or leave it out",
}


def failure_cause(
    evidence: Evidence, recipe: Recipe, compiled: Compiled, source: ModelSource, folders: tuple[Path, Path]
) -> str | None:
    """Describe the cause of a failed gate on accuracy, with advice; None without such a gate or a known cause.

    `folders` are those of the candidate and of the baseline.
    """
    failed = [gate for gate in evidence.gates if gate.verdict == "FAIL" and not gate.advisory]
    if not failed or METRICS[failed[0].name.partition("@")[0]].section != "evaluation":
        return None
    parts = parts_of(recipe)
    if len(parts) < 2:
        return f"Only {next(iter(parts))} differ from the baseline: {_ADVICE[next(iter(parts))]}" if parts else None
    if sum(record.seconds for record in compiled.passes) <= _MOST_SECONDS:
        explained = _explained(recipe, parts, source, folders)
    else:
        explained = _by_weights_alone(evidence)
    return _described(explained) if explained else None


def parts_of(recipe: Recipe) -> dict[str, tuple[int, ...]]:
    """The parts that the recipe changes, each with the places of its passes."""
    found: dict[str, tuple[int, ...]] = {}
    for place, entry in enumerate(recipe.passes):
        if (made := entry.make()).is_lossy:
            part = _part(made)
            found[part] = (*found.get(part, ()), place)
    return found


def _part(made: Pass) -> str:
    if made.kind == "pruning":
        return "pruning"
    return _PART_OF.get(made.name, _WEIGHTS)


def _explained(
    recipe: Recipe, parts: Mapping[str, Sequence[int]], source: ModelSource, folders: tuple[Path, Path]
) -> dict[str, float]:
    """The share of the KL divergence that goes when a part is put back; without parts that cannot be left out."""
    note(f"a gate failed: measuring what {', '.join(parts)} explain of it")
    options = _sample_of(recipe)
    found: dict[str, float] = {}
    candidate, baseline = folders
    whole = measure(candidate, baseline, options).measured[_METRIC].estimate.value
    for part, places in parts.items():
        kept = tuple(entry for place, entry in enumerate(recipe.passes) if place not in places)
        try:
            rest = _kl_of(recipe.model_copy(update={"passes": kept}), source, baseline, options)
        except IngotError as error:  # passes that need the one that is left out
            _log.info("%s cannot be put back alone: %s", part, error)
            continue
        found[part] = 1 - rest / whole if whole else 0.0
    return found


def _sample_of(recipe: Recipe) -> MeasureOptions:
    accuracy = measure_options(recipe).accuracy or AccuracyOptions()
    tokens = max(MIN_WINDOWS * accuracy.window_tokens, min(_MOST_TOKENS, accuracy.tokens))
    smaller = AccuracyOptions(min(tokens, accuracy.tokens), accuracy.window_tokens, accuracy.seed)
    return MeasureOptions(text=recipe.evaluation_text(), accuracy=smaller, num_threads=recipe.threads)


def _kl_of(recipe: Recipe, source: ModelSource, baseline: Path, options: MeasureOptions) -> float:
    with TemporaryDirectory(prefix="ingot-cause-") as folder, ArtifactWriter(Path(folder) / "rest") as writer:
        compiled = compile_recipe(recipe, writer.path, source=source)
        describe_artifact(writer, recipe, compiled, "rest")
        return measure(writer.seal(), baseline, options).measured[_METRIC].estimate.value


def _by_weights_alone(evidence: Evidence) -> dict[str, float]:
    """The share of the weights by the KL of rounding each alone; empty where the build did not measure it."""
    alone = [weight.kl for weight in evidence.notes.quantization.weights if weight.kl is not None]
    whole = evidence.measured[_METRIC].estimate.value if _METRIC in evidence.measured else 0.0
    return {_WEIGHTS: min(1.0, sum(alone) / whole)} if alone and whole else {}


def _described(explained: Mapping[str, float]) -> str:
    """Return one line: all parts, the one that explains most first, and its advice."""
    ranked = sorted(explained, key=lambda part: -explained[part])
    shares = ", ".join(f"{part} {100 * max(0.0, explained[part]):.0f} %" for part in ranked)
    if explained[ranked[0]] < 0.5 and len(ranked) == 1:
        return f"Of the KL divergence {ranked[0]} explain {100 * explained[ranked[0]]:.0f} %: look at the other parts"
    return f"Put back to 16 bits, each of these takes away of the KL divergence: {shares}; {_ADVICE[ranked[0]]}"
