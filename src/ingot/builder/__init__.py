"""From a recipe to a sealed artifact and its evidence: what stands above compiler, runtime and validation."""

from ingot.builder.flow import BuildResult, Observers, build
from ingot.builder.remeasure import remeasure

__all__ = ["BuildResult", "Observers", "build", "remeasure"]
