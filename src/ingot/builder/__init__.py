"""Build a recipe into a sealed artifact with its evidence, or measure an artifact again.

Only this package uses compiler, runtime and validation together; code that needs one of them belongs there.
"""

from ingot.builder.baseline import remeasure
from ingot.builder.flow import BuildResult, Observers, build

__all__ = ["BuildResult", "Observers", "build", "remeasure"]
