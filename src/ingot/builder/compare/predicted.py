"""Predicts the candidates of a comparison before anything is built: sizes, and times on a row of hardware.

The first row is the baseline: the first recipe without its lossy passes. Accuracy is unknown until it is measured.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ingot.builder.compare.candidates import ComparedModel, Group
from ingot.builder.plan_subject import read_subject
from ingot.errors import IngotError
from ingot.pipeline.planned_program import plan_program
from ingot.pipeline.recipe.schema import Recipe
from ingot.planning.hardware import Hardware
from ingot.planning.latency import Latency
from ingot.planning.load import Load
from ingot.planning.plan import PlannedModel, ServingPlan, make_plan

BASELINE = "baseline"


@dataclass(frozen=True)
class PredictedRow:
    """Planned sizes of a candidate, and its plan on hardware if one was named; or the reason why it has none."""

    name: str
    subject: PlannedModel | None = None
    plan: ServingPlan | None = None
    reason: str = ""

    @property
    def latency(self) -> Latency | None:
        """Predicted times of the load; None without hardware."""
        return self.plan.latency if self.plan else None

    def as_json(self) -> dict[str, Any]:
        """All figures; null for what is unknown."""
        latency = self.latency
        return {
            "name": self.name,
            "weight_bytes": self.subject.program.weight_bytes if self.subject else None,
            "kv_token_bytes": self.subject.shape.kv_token_bytes if self.subject else None,
            "latency": latency.as_json() if latency else None,
            "money": self.plan.money() if self.plan else None,
            "accuracy": None,
            "reason": self.reason or None,
        }


def predict_group(group: Group, hardware: tuple[str, Hardware] | None, price: float | None) -> list[PredictedRow]:
    """Plan the baseline and every candidate, with the load of the measurement at its highest concurrency."""
    latency = group.options.latency
    load = Load(max(latency.concurrency), latency.prompt_tokens, latency.output_tokens) if latency else Load()
    rows = []
    for name, candidate, recipe in _planned(group):
        try:
            subject = _subject(name, group, candidate, recipe)
            plan = make_plan(subject, hardware[0], hardware[1], load, price=price) if hardware else None
            rows.append(PredictedRow(name, subject, plan))
        except IngotError as error:
            rows.append(PredictedRow(name, reason=str(error)))
    return rows


def _planned(group: Group) -> Iterator[tuple[str, ComparedModel, Recipe]]:
    first = group.candidates[0]
    yield BASELINE, first, first.recipe.baseline()
    for candidate in group.candidates:
        yield candidate.name, candidate, candidate.recipe


def _subject(name: str, group: Group, candidate: ComparedModel, recipe: Recipe) -> PlannedModel:
    if candidate.artifact is not None and name != BASELINE:
        return read_subject(str(candidate.artifact.path))
    program = plan_program(recipe, group.source)
    words = f"the program that the recipe makes for {program.target.name}, without its weights"
    return PlannedModel(name, program.model, program.shape, program.memory, words, program.placed)
