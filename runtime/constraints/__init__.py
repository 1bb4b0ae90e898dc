"""Constraints on the output: JSON schemas, regular expressions, choices and grammars, by masks over the vocabulary.

What a caller asks for, its compilation by llguidance, and the state of one sequence. The steps and the sampler use the
masks; nothing here schedules or samples.
"""

from ingot.runtime.constraints.constraint import Constraint, ConstraintKind

__all__ = ["Constraint", "ConstraintKind"]
