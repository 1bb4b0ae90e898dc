"""From a recipe to a sealed artifact and its evidence: what stands above compiler, runtime and validation."""

from ingot.builder.baseline import remeasure
from ingot.builder.flow import BuildResult, Observers, build

__all__ = ["BuildResult", "Observers", "build", "remeasure"]
