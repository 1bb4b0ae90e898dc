"""Pruning of one linear layer: which weights go, and what the others become, given the Gram matrix of its inputs.

Single weights become zero (a share of them, or by a pattern n:m, of which n of m neighbours in a row stay):

    wanda        those whose |w_ij| * ||x_j|| is smallest within their row; the others stay as they are
                 (Sun et al., arXiv:2306.11695)
    sparse_gpt   those whose w_ij^2 / U_jj^2 is smallest within a block of columns, H^-1 = U^T U; columns are pruned in
                 order, and later columns compensate (Frantar and Alistarh, arXiv:2301.00774)

Whole inputs go, in units of neighbouring columns. For W [out, in], inputs X [tokens, in], H = X^T X + damping and the
kept columns S, the best weights are the least squares fit

    W' = W H[:, S] H[S, S]^-1                      which minimizes || X W^T - X_S W'^T ||

Units go in rounds. In each round those go whose loss is smallest when the others compensate: tr(W_u C_uu^-1 W_u^T) for
the columns u of a unit, with C = H^-1 of the remaining columns (Hassibi and Stork, Optimal Brain Surgeon, 1993; for
structures ZipLM, arXiv:2302.04089). Without the fit the loss of a unit is that of its own columns, tr(W_u H_uu W_u^T).
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.passes.numerics.arrays import Float32Array, Float64Array
from ingot.passes.numerics.gptq_rounding import DampedGram
from ingot.passes.numerics.linear_algebra import matmul

Integers = NDArray[np.int64]
Mask = NDArray[np.bool_]

_BLOCK_COLUMNS = 128
_ROUNDS = 32


@dataclass(frozen=True)
class Sparsity:
    """A share of zeros, or a pattern: `kept` of each `of` neighbouring weights in a row stay."""

    share: float
    kept: int = 0
    of: int = 0

    def smallest(self, scores: Float32Array, *, by_row: bool) -> Mask:
        """Mask of the smallest scores [rows, columns]: by the pattern, else the share of each row or of all scores."""
        if self.of:
            grouped = scores.reshape(len(scores), -1, self.of)
            return _smallest(grouped, self.of - self.kept).reshape(scores.shape)
        if by_row:
            return _smallest(scores, round(self.share * scores.shape[1]))
        return _smallest(scores.reshape(1, -1), round(self.share * scores.size)).reshape(scores.shape)


def wanda(weight: Float32Array, norms: Float32Array, sparsity: Sparsity) -> Float32Array:
    """Return the weight [out, in] with zeros; `norms` [in] are those of the input channels."""
    scores = np.abs(weight) * norms
    return np.where(sparsity.smallest(scores, by_row=True), np.float32(0), weight)


def sparse_gpt(weight: Float32Array, damped: DampedGram, sparsity: Sparsity) -> Float32Array:
    """Return the weight [out, in] with zeros and compensating weights; `damped` is in the columns' own order."""
    left, factor = weight.T.copy(), damped.factor  # [in, out]
    width = _BLOCK_COLUMNS if not sparsity.of else sparsity.of * max(1, _BLOCK_COLUMNS // sparsity.of)
    for start in range(0, len(left), width):
        block = slice(start, min(start + width, len(left)))
        left[block], errors = _prune_block(left[block], factor[block, block], sparsity)
        left[block.stop :] -= matmul(factor[block, block.stop :].T, errors)
    return np.ascontiguousarray(left.T)


@dataclass(frozen=True)
class KeptColumns:
    """Units that stay, sorted; their columns; their weight [out, columns]; the error relative to the outputs."""

    units: Integers
    columns: Integers
    weight: NDArray[np.float32]
    output_error: float

    def arrays(self, name: str) -> dict[str, NDArray[Any]]:
        """Encode as arrays, under names that begin with `name`."""
        return {f"{name}:{field.name}": np.asarray(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[Any]], name: str) -> "KeptColumns":
        """Decode from `arrays`."""
        units, columns, weight, error = (arrays[f"{name}:{field.name}"] for field in fields(cls))
        return cls(units, columns, weight, float(error))


def keep_columns(
    weight: Float64Array, gram: Float64Array, unit: int, keep: int, *, refit: bool, damping: float
) -> KeptColumns:
    """Keep `keep` of the units of `unit` neighbouring columns each. ValueError for inputs of zero or not finite."""
    mean = float(np.diagonal(gram).mean())
    if not np.isfinite(gram).all() or mean <= 0:
        raise ValueError("inputs that are zero on all of the calibration data, or not finite")
    damped = gram + damping * mean * np.eye(len(gram))
    drop = len(gram) // unit - keep
    dropped = _drop_with_fit(weight, damped, unit, drop) if refit else _drop_without_fit(weight, gram, unit, drop)
    units = np.setdiff1d(np.arange(len(gram) // unit), dropped)
    columns = _columns(units, unit)
    kept: Float64Array = weight[:, columns]
    if refit:
        kept = np.linalg.solve(damped[np.ix_(columns, columns)], matmul(weight, damped[:, columns]).T).T.astype(
            np.float64
        )
    difference = weight.copy()
    difference[:, columns] -= kept
    return KeptColumns(units, columns, kept.astype(np.float32), relative_output_error(weight, difference, gram))


def relative_output_error(weight: NDArray[Any], difference: NDArray[Any], gram: Float64Array) -> float:
    """|| X D^T || / || X W^T || for a difference D = W - W' of weights [out, in]; 0 for outputs of zero."""
    lost, norm = (float(np.einsum("oi,oi->", matmul(w, gram), w)) for w in (difference, weight))
    return float((max(lost, 0.0) / norm) ** 0.5) if norm > 0 else 0.0


def _smallest(scores: Float32Array, count: int) -> Mask:
    """Mask of the `count` smallest scores along the last axis."""
    mask = np.zeros(scores.shape, np.bool_)
    places = np.argsort(scores, axis=-1, kind="stable")[..., :count]
    np.put_along_axis(mask, places, True, axis=-1)
    return mask


def _prune_block(values: Float32Array, factor: Float32Array, sparsity: Sparsity) -> tuple[Float32Array, Float32Array]:
    """Prune the columns [columns, out] of a block; also return their errors over U_ii, which later ones compensate."""
    diagonal, step = np.diagonal(factor)[:, None], sparsity.of or len(values)
    errors = np.empty_like(values)
    for i in range(len(values)):
        if i % step == 0:  # choose once the columns before are compensated
            part = slice(i, i + step)
            scores = np.square(values[part] / diagonal[part]).T
            mask = sparsity.smallest(np.ascontiguousarray(scores), by_row=False).T
        errors[i] = np.where(mask[i % step], values[i], 0) / factor[i, i]
        values[i][mask[i % step]] = 0
        values[i + 1 :] -= np.multiply.outer(factor[i, i + 1 :], errors[i])
    return values, errors


def _columns(units: Integers, unit: int) -> Integers:
    """The columns of these units, in order."""
    columns: Integers = (units[:, None] * unit + np.arange(unit)).reshape(-1)
    return columns


def _drop_without_fit(weight: Float64Array, gram: Float64Array, unit: int, drop: int) -> Integers:
    """The units whose columns contribute least to the outputs."""
    return np.argsort(_traces(weight, _blocks(gram, unit)), kind="stable")[:drop]


def _drop_with_fit(weight: Float64Array, damped: Float64Array, unit: int, drop: int) -> Integers:
    """The units that the others compensate best, chosen in rounds."""
    inverse: Float64Array = np.linalg.inv(damped).astype(np.float64)
    left = weight.copy()
    alive = np.arange(len(damped) // unit)
    for number in range(min(_ROUNDS, drop)):
        goal = len(damped) // unit - drop
        batch = -(-(len(alive) - goal) // (min(_ROUNDS, drop) - number))
        losses = _traces(left, np.linalg.inv(_blocks(inverse, unit)).astype(np.float64))
        gone = np.sort(np.argsort(losses, kind="stable")[:batch])
        stay, out = (_columns(units, unit) for units in (np.setdiff1d(np.arange(len(alive)), gone), gone))
        solved = np.linalg.solve(inverse[np.ix_(out, out)], inverse[np.ix_(out, stay)])  # [out, stay]
        left = left[:, stay] - matmul(left[:, out], solved)
        inverse = inverse[np.ix_(stay, stay)] - matmul(inverse[np.ix_(stay, out)], solved)
        alive = np.delete(alive, gone)
    return np.setdiff1d(np.arange(len(damped) // unit), alive)


def _blocks(matrix: Float64Array, unit: int) -> Float64Array:
    """Blocks on the diagonal [units, unit, unit]."""
    count = len(matrix) // unit
    return matrix.reshape(count, unit, count, unit)[np.arange(count), :, np.arange(count), :]


def _traces(weight: Float64Array, blocks: Float64Array) -> Float64Array:
    """tr(W_u B_u W_u^T) per unit, for blocks [units, unit, unit]."""
    grouped = weight.reshape(len(weight), *blocks.shape[:2])  # [out, units, unit]
    traces: Float64Array = np.einsum("oui,uij,ouj->u", grouped, blocks, grouped, optimize=True)
    return traces
