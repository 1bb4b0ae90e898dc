"""From a recipe to a sealed artifact and its evidence: joins compiler, runtime and validation.

Each of them works without the others; code that only one of them needs belongs there.
"""

from ingot.builder.baseline import remeasure
from ingot.builder.flow import BuildResult, Observers, build

__all__ = ["BuildResult", "Observers", "build", "remeasure"]
