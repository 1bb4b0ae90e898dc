"""Which weights of a linear layer become zero, and what the others become, given the Gram matrix of its inputs.

    wanda        |w_ij| * ||x_j|| is smallest within its row; what stays is unchanged
                 (Sun et al., arXiv:2306.11695)
    sparsegpt    w_ij^2 / U_jj^2 is smallest within its block of columns, H^-1 = U^T U; columns are taken one after the
                 other, and those that follow make up for what went (Frantar and Alistarh, arXiv:2301.00774)

With a pattern n:m the choice is within each m neighbouring weights of a row, of which n stay.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ingot.passes.numerics.gptq_rounding import DampedGram

FloatArray = NDArray[np.float32]
Mask = NDArray[np.bool_]

_BLOCK_COLUMNS = 128


@dataclass(frozen=True)
class Sparsity:
    """A share of zeros, or a pattern: `kept` of each `of` neighbouring weights stay."""

    share: float
    kept: int = 0
    of: int = 0

    def smallest(self, scores: FloatArray, *, by_row: bool) -> Mask:
        """True where the scores [rows, columns] are smallest: by the pattern, else the share of each row or of all."""
        if self.of:
            grouped = scores.reshape(len(scores), -1, self.of)
            return _smallest(grouped, self.of - self.kept).reshape(scores.shape)
        if by_row:
            return _smallest(scores, round(self.share * scores.shape[1]))
        return _smallest(scores.reshape(1, -1), round(self.share * scores.size)).reshape(scores.shape)


def _smallest(scores: FloatArray, count: int) -> Mask:
    """True at the `count` smallest along the last axis."""
    mask = np.zeros(scores.shape, np.bool_)
    places = np.argsort(scores, axis=-1, kind="stable")[..., :count]
    np.put_along_axis(mask, places, True, axis=-1)
    return mask


def wanda(weight: FloatArray, norms: FloatArray, sparsity: Sparsity) -> FloatArray:
    """weight [out, in] with zeros; norms [in] of the input channels."""
    scores = np.abs(weight) * norms
    return np.where(sparsity.smallest(scores, by_row=True), np.float32(0), weight)


def sparse_gpt(weight: FloatArray, damped: DampedGram, sparsity: Sparsity) -> FloatArray:
    """weight [out, in] with zeros, and the others changed; `damped` in the columns' own order."""
    left, factor = weight.T.copy(), damped.factor  # [in, out]
    width = _BLOCK_COLUMNS if not sparsity.of else sparsity.of * max(1, _BLOCK_COLUMNS // sparsity.of)
    for start in range(0, len(left), width):
        block = slice(start, min(start + width, len(left)))
        left[block], errors = _prune_block(left[block], factor[block, block], sparsity)
        left[block.stop :] -= factor[block, block.stop :].T @ errors
    return np.ascontiguousarray(left.T)


def _prune_block(values: FloatArray, factor: FloatArray, sparsity: Sparsity) -> tuple[FloatArray, FloatArray]:
    """Columns [columns, out] of a block with zeros, and what each column left to those that follow, over U_ii."""
    diagonal, step = np.diagonal(factor)[:, None], sparsity.of or len(values)
    errors = np.empty_like(values)
    for i in range(len(values)):
        if i % step == 0:  # a pattern's choice is made when what came before has been made up for
            part = slice(i, i + step)
            scores = np.square(values[part] / diagonal[part]).T
            mask = sparsity.smallest(np.ascontiguousarray(scores), by_row=False).T
        errors[i] = np.where(mask[i % step], values[i], 0) / factor[i, i]
        values[i][mask[i % step]] = 0
        values[i + 1 :] -= np.multiply.outer(factor[i, i + 1 :], errors[i])
    return values, errors
