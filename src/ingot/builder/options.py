"""A recipe's sections -> validation's options, and a compiled recipe -> the artifact's manifest."""

from collections.abc import Mapping

from ingot.artifact import ArtifactWriter, GateOutcome, Manifest
from ingot.pipeline.compile import Compiled, tool_versions
from ingot.pipeline.recipe.schema import GateLimit, LatencyOptions, Recipe
from ingot.validation.evidence import MeasureOptions
from ingot.validation.gates import GateSpec
from ingot.validation.latency import LatencyLoad, ServiceLevel
from ingot.validation.memory import MemoryOptions
from ingot.validation.windows import AccuracyOptions


def describe_artifact(
    writer: ArtifactWriter, recipe: Recipe, compiled: Compiled, gates: tuple[GateOutcome, ...] = ()
) -> Manifest:
    """Write the manifest of the files in the staging folder. May be called again after more files."""
    return writer.describe(
        name=recipe.name,
        model=compiled.model,
        kv=compiled.written.kv,
        target=compiled.target.name,
        engine=compiled.target.engine,
        program=compiled.written.program,
        versions=tool_versions(compiled.written.tools),
        max_batch_tokens=recipe.engine.max_batch_tokens,
        gates=gates,
    )


def is_measured(recipe: Recipe) -> bool:
    """Whether the recipe has evidence measured."""
    return bool(recipe.evaluation or recipe.latency or recipe.gates)


def measure_options(recipe: Recipe) -> MeasureOptions:
    """The measurements of the recipe, and the gates to decide."""
    evaluation = recipe.evaluation
    return MeasureOptions(
        text=recipe.evaluation_text(),
        accuracy=AccuracyOptions(evaluation.tokens, evaluation.window_tokens, recipe.seed) if evaluation else None,
        latency=_load(recipe.latency, recipe.seed) if recipe.latency else None,
        memory=MemoryOptions(),
        gates=gate_specs(recipe.gates),
        num_threads=recipe.threads,
    )


def gate_specs(gates: Mapping[str, GateLimit]) -> tuple[GateSpec, ...]:
    """The recipe's gates as validation decides them."""
    return tuple(GateSpec(metric, gate.bound, gate.limit) for metric, gate in gates.items())


def _load(latency: LatencyOptions, seed: int) -> LatencyLoad:
    return LatencyLoad(
        concurrency=latency.concurrency,
        prompt_tokens=latency.prompt_tokens,
        output_tokens=latency.output_tokens,
        requests=latency.requests,
        rounds=latency.rounds,
        seed=seed,
        slo=ServiceLevel(latency.slo.ttft_seconds, latency.slo.tpot_seconds) if latency.slo else None,
    )
