"""Which inputs of a linear layer can go, and what the others' weights become, given the Gram matrix of its inputs.

For W [out, in], inputs X [tokens, in] and H = X^T X + damping, a set S of inputs stays; the best weights for it are

    W' = W H[:, S] H[S, S]^-1                      least squares: || X W^T - X_S W'^T || is smallest

Inputs go in rounds, those first whose loss is smallest with the others making up for it: tr(W_u C_uu^-1 W_u^T) for
the columns u of a unit, with C = H^-1 of what is left by then (Hassibi and Stork, Optimal Brain Surgeon, 1993; for
structures ZipLM, arXiv:2302.04089). Without refitting the loss of a unit is that of its columns alone,
tr(W_u H_uu W_u^T).
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Integers = NDArray[np.int64]

_ROUNDS = 32


@dataclass(frozen=True)
class KeptColumns:
    """units that stay, sorted; their columns; the weight [out, columns] for them; error relative to the outputs."""

    units: Integers
    columns: Integers
    weight: NDArray[np.float32]
    output_error: float

    def arrays(self, name: str) -> dict[str, NDArray[Any]]:
        """As arrays, under names that begin with this one."""
        return {f"{name}:{field.name}": np.asarray(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[Any]], name: str) -> "KeptColumns":
        """What `arrays` gave."""
        units, columns, weight, error = (arrays[f"{name}:{field.name}"] for field in fields(cls))
        return cls(units, columns, weight, float(error))


def keep_columns(weight: Array, gram: Array, unit: int, keep: int, *, refit: bool, damping: float) -> KeptColumns:
    """Keep `keep` of the units of `unit` neighbouring columns. ValueError when the inputs are zero or not finite."""
    mean = float(np.diagonal(gram).mean())
    if not np.isfinite(gram).all() or mean <= 0:
        raise ValueError("inputs that are zero on all of the calibration data, or not finite")
    damped = gram + damping * mean * np.eye(len(gram))
    drop = len(gram) // unit - keep
    order = _dropped_by_surgeon(weight, damped, unit, drop) if refit else _dropped_alone(weight, gram, unit, drop)
    units = np.setdiff1d(np.arange(len(gram) // unit), order)
    columns = _columns(units, unit)
    kept: Array = weight[:, columns]
    if refit:
        kept = np.linalg.solve(damped[np.ix_(columns, columns)], (weight @ damped[:, columns]).T).T.astype(np.float64)
    return KeptColumns(units, columns, kept.astype(np.float32), _error(weight, kept, columns, gram))


def _columns(units: Integers, unit: int) -> Integers:
    """The columns of units, in order."""
    columns: Integers = (units[:, None] * unit + np.arange(unit)).reshape(-1)
    return columns


def _dropped_alone(weight: Array, gram: Array, unit: int, drop: int) -> Integers:
    """The units whose columns give the least to the outputs."""
    return np.argsort(_traces(weight, _blocks(gram, unit)), kind="stable")[:drop]


def _dropped_by_surgeon(weight: Array, damped: Array, unit: int, drop: int) -> Integers:
    """Round by round, the units that the others make up for best."""
    inverse: Array = np.linalg.inv(damped).astype(np.float64)
    left = weight.copy()
    alive = np.arange(len(damped) // unit)
    for number in range(min(_ROUNDS, drop)):
        goal = len(damped) // unit - drop
        batch = -(-(len(alive) - goal) // (min(_ROUNDS, drop) - number))
        losses = _traces(left, np.linalg.inv(_blocks(inverse, unit)).astype(np.float64))
        gone = np.sort(np.argsort(losses, kind="stable")[:batch])
        stay, out = (_columns(units, unit) for units in (np.setdiff1d(np.arange(len(alive)), gone), gone))
        solved = np.linalg.solve(inverse[np.ix_(out, out)], inverse[np.ix_(out, stay)])  # [out, stay]
        left = left[:, stay] - left[:, out] @ solved
        inverse = inverse[np.ix_(stay, stay)] - inverse[np.ix_(stay, out)] @ solved
        alive = np.delete(alive, gone)
    return np.setdiff1d(np.arange(len(damped) // unit), alive)


def _blocks(matrix: Array, unit: int) -> Array:
    """Blocks on the diagonal [units, unit, unit]."""
    count = len(matrix) // unit
    return matrix.reshape(count, unit, count, unit)[np.arange(count), :, np.arange(count), :]


def _traces(weight: Array, blocks: Array) -> Array:
    """tr(W_u B_u W_u^T) per unit, for blocks [units, unit, unit]."""
    grouped = weight.reshape(len(weight), *blocks.shape[:2])  # [out, units, unit]
    traces: Array = np.einsum("oui,uij,ouj->u", grouped, blocks, grouped, optimize=True)
    return traces


def _error(weight: Array, kept: Array, columns: Integers, gram: Array) -> float:
    """|| X W^T - X_S W'^T || / || X W^T ||"""
    difference = weight.copy()
    difference[:, columns] -= kept
    lost, norm = (float(np.einsum("oi,oi->", w @ gram, w)) for w in (difference, weight))
    return float((max(lost, 0.0) / norm) ** 0.5) if norm > 0 else 0.0
