"""Candidates of a comparison: every recipe with every checkpoint, and artifacts, grouped by checkpoint.

All of a group are measured alike: evaluation, latency, memory, seed and threads are those of its first recipe that
measures, else the defaults; and against one baseline.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from ingot.artifact import MANIFEST, Artifact, open_artifact
from ingot.builder.baseline import with_checkpoint
from ingot.builder.flow import checkpoint_name
from ingot.builder.measurements import bos_tokens, measure_options, require_gpu, require_texts, require_tokenizer
from ingot.errors import UsageError, shown_path
from ingot.pipeline.compile import open_source
from ingot.pipeline.model.importer import ModelSource
from ingot.pipeline.recipe.fit import fit_to_model
from ingot.pipeline.recipe.load import load_recipe, require_paths
from ingot.pipeline.recipe.schema import Recipe
from ingot.validation.evidence import MeasureOptions
from ingot.validation.evidence_json import sealed_summary
from ingot.validation.options import LatencyLoad

UNMEASURED = ("evaluation=null", "latency=null", "memory=null", "verify=null", "generate=null", "gates={}")
_DIGITS = 8


@dataclass(frozen=True)
class ComparedSources:
    """What is compared, as the command line names it.

    sources      names or files of recipes, and folders of artifacts
    checkpoints  each is built by every recipe; none: the recipes' own
    overrides    KEY=VALUE for all recipes
    gates        KEY=LIMIT in place of the recipes' gates
    """

    sources: tuple[str, ...]
    checkpoints: tuple[Path, ...] = ()
    overrides: tuple[str, ...] = ()
    gates: tuple[str, ...] = ()


@dataclass(frozen=True)
class ComparedModel:
    """A recipe with a checkpoint, or a sealed artifact; `recipe` has the checkpoint and the gates that decide.

    overrides  of the build; unused for an artifact
    """

    name: str
    source: str
    recipe: Recipe
    overrides: tuple[str, ...] = ()
    artifact: Artifact | None = None

    @property
    def key(self) -> str:
        """A name for its files: changes with what would be built, and not with how it is measured."""
        if self.artifact is not None:
            return f"{self.name}-{self.artifact.manifest.identity[:_DIGITS]}"
        text = load_recipe(self.source, (*self.overrides, *UNMEASURED)).resolved_yaml(with_serving=True)
        return f"{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]}"


@dataclass(frozen=True)
class Group:
    """The candidates of one checkpoint, and the recipe by which all of them are measured."""

    name: str
    candidates: tuple[ComparedModel, ...]

    @cached_property
    def source(self) -> ModelSource:
        """The checkpoint, opened once."""
        return open_source(self.candidates[0].recipe)

    @cached_property
    def measuring(self) -> Recipe:
        """The recipe whose evaluation, latency and memory are measured, fitted to the model and the text.

        UsageError where no candidate names an evaluation text.
        """
        # The path of a sealed recipe's text is not sealed: artifacts come last.
        order = sorted(self.candidates, key=lambda one: one.artifact is not None)
        recipe = next((one.recipe for one in order if one.recipe.evaluation), None)
        if recipe is None:
            raise UsageError(
                f"{self.name}: no recipe names an evaluation text, so nothing says how much worse one model is than"
                " another; give --eval FILE, a held-out text"
            )
        if recipe.latency is None and not recipe.sets("latency"):
            recipe = recipe.model_copy(update={"latency": LatencyLoad()})
        require_paths(recipe)
        tokenizer = require_tokenizer(recipe)
        fitted = fit_to_model(recipe, self.source.facts.context_tokens, bos_tokens(tokenizer))
        return require_texts(fitted, tokenizer, self.source.facts)

    @cached_property
    def options(self) -> MeasureOptions:
        """The measurements. Gates are decided afterwards, so that another gate measures nothing again."""
        return replace(measure_options(self.measuring), gates=(), verify=None)

    def measured_as(self, candidate: ComparedModel) -> Recipe:
        """The candidate's recipe, with what this group measures."""
        sections = ("evaluation", "latency", "memory", "seed", "threads")
        return candidate.recipe.model_copy(
            update={**{name: getattr(self.measuring, name) for name in sections}, "verify": None}
        )


def read_groups(compared: ComparedSources) -> list[Group]:
    """Load every recipe and artifact, and group them by checkpoint, before any work.

    RecipeError for a recipe with mistakes or missing files; UsageError for two candidates of one name, an artifact
    whose checkpoint is not given, and a GPU that is not here.
    """
    artifacts = [source for source in compared.sources if (Path(source).expanduser() / MANIFEST).is_file()]
    recipes = [source for source in compared.sources if source not in artifacts]
    found: dict[Path, list[ComparedModel]] = {}
    for source in recipes:
        for checkpoint in compared.checkpoints or (None,):
            candidate = _of_recipe(source, checkpoint, compared)
            found.setdefault(candidate.recipe.require_checkpoint().resolve(), []).append(candidate)
    for checkpoint in compared.checkpoints:
        found.setdefault(checkpoint.expanduser().resolve(), [])
    for source in artifacts:
        opened = open_artifact(Path(source).expanduser())
        place = _checkpoint_of(opened, list(found))
        found[place].append(_of_artifact(source, opened, place, compared))
    groups = [Group(checkpoint_name(place), tuple(_in_order(each, compared))) for place, each in found.items() if each]
    _require_distinct(groups)
    return groups


def _in_order(candidates: Sequence[ComparedModel], compared: ComparedSources) -> Iterator[ComparedModel]:
    """Yield the candidates of a group in the order in which they were given."""
    yield from sorted(candidates, key=lambda one: compared.sources.index(one.source))


def _of_recipe(source: str, checkpoint: Path | None, compared: ComparedSources) -> ComparedModel:
    given = [f"checkpoint={_quoted(checkpoint)}"] if checkpoint else []
    overrides = (*given, *compared.overrides)
    recipe = load_recipe(source, (*overrides, *_gate_overrides(compared)))
    require_paths(recipe)
    require_gpu(recipe.model_copy(update={"latency": LatencyLoad()}))
    return ComparedModel(recipe.name, source, recipe, overrides)


def _of_artifact(source: str, opened: Artifact, checkpoint: Path, compared: ComparedSources) -> ComparedModel:
    recipe = with_checkpoint(opened, checkpoint, (*compared.overrides, *_gate_overrides(compared)))
    return ComparedModel(opened.manifest.name, source, recipe, artifact=opened)


def _gate_overrides(compared: ComparedSources) -> Iterator[str]:
    if compared.gates:
        yield "gates={}"
        yield from (f"gates.{gate}" for gate in compared.gates)


def _quoted(path: Path) -> str:
    text = str(path.expanduser().absolute()).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


def _checkpoint_of(artifact: Artifact, checkpoints: Sequence[Path]) -> Path:
    """The checkpoint that the artifact was built from; the only one for an artifact that records none."""
    if not checkpoints:
        raise UsageError(
            f"{shown_path(artifact.path)} is an artifact, and its baseline is built from its checkpoint: name that with"
            " --checkpoint FOLDER"
        )
    sealed = sealed_summary(artifact)
    if sealed is None or sealed.origin is None:
        if len(checkpoints) == 1:
            return checkpoints[0]
        raise UsageError(
            f"{shown_path(artifact.path)} does not record which checkpoint it was built from, and"
            f" {len(checkpoints)} are compared: compare it with one checkpoint alone"
        )
    for place in checkpoints:
        if ModelSource.open(place).checkpoint.digest == sealed.origin.checkpoint_digest:
            return place
    names = ", ".join(place.name for place in checkpoints)
    raise UsageError(
        f"{shown_path(artifact.path)} was built from {sealed.origin.checkpoint}, whose digest none of the compared"
        f" checkpoints has ({names}): add its own with --checkpoint FOLDER"
    )


def _require_distinct(groups: Sequence[Group]) -> None:
    names = [group.name for group in groups]
    names += [f"{group.name}/{one.name}" for group in groups for one in group.candidates]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two things that are compared have the name {name}: rename one, or leave it out")
