"""GPTQ: rounds a weight matrix so that the layer's output changes least, given the Gram matrix of its inputs.

For W [out, in] and inputs X [tokens, in] with H = X^T X + damping, each row w of W wants codes whose w' makes

    (w - w') H (w - w')^T

small: the squared error of the row's outputs. Columns are rounded one after the other; the error of each is made up for
by those that follow, by the Cholesky factor U of the inverse, H^-1 = U^T U:

    e_i = (w_i - w'_i) / U_ii          w_j -= e_i U_ij   for every j > i

(Frantar et al., GPTQ, arXiv:2210.17323.) All rows go at once; columns beyond a panel are updated by one matmul. With
act_order the columns with the largest H_ii go first. Groups are static: scales and zero points are fixed beforehand on
contiguous columns, so that the order of the work leaves no trace in what is stored.

`refine` rounds then improve the same objective, and never worsen it: scales are fitted to the codes by least squares
under H, all blocks of a row together; then each code is chosen anew with all others fixed (coordinate descent, as in
QuantEase, arXiv:2309.01885).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ingot.passes.numerics.rounding import RoundedWeight, dequantize
from ingot.passes.numerics.scale_search import FloatArray, Scheme

Float64Array = NDArray[np.float64]

_PANEL_COLUMNS = 64
_FIT_BYTES = 64 << 20  # normal equations held at once by the fit of scales
_DAMPING_STEPS = (1.0, 10.0, 100.0, 1000.0)
_RIDGE = 1e-6


@dataclass(frozen=True)
class DampedGram:
    """H = X^T X + damping * mean(diagonal), and the factor U of its inverse (upper, in the order of `order`)."""

    gram: FloatArray
    factor: FloatArray
    order: NDArray[np.int64]
    damping: float

    def scaled(self, scale: FloatArray) -> "DampedGram":
        """That of the inputs x / s, in the same order, from the same factorisation: U^T U turns into s U^T U s."""
        gram = self.gram / np.outer(scale, scale)
        return replace(self, gram=gram, factor=self.factor * scale[self.order])


def damped_gram(gram: Float64Array, damping: float, act_order: bool) -> DampedGram:
    """Damp and factor a Gram matrix; where Cholesky fails, with 10, 100, 1000 times the damping.

    A channel that never fires gets a diagonal of its own, so that its weights are rounded to the nearest. ValueError
    when no damping helps: the inputs are not finite, or all zero.
    """
    diagonal = np.diagonal(gram)
    mean = float(diagonal.mean())
    if not np.isfinite(gram).all() or mean <= 0:
        raise ValueError("inputs that are zero on all of the calibration data, or not finite")
    order = np.argsort(-diagonal, kind="stable") if act_order else np.arange(len(gram))
    for step in _DAMPING_STEPS:
        damped = gram + np.diag(np.where(diagonal > 0, damping * step * mean, mean))
        factor = _inverse_factor(damped[np.ix_(order, order)])
        if factor is not None:
            return DampedGram(damped.astype(np.float32), factor.astype(np.float32), order, damping * step)
    raise ValueError(f"inputs whose X^T X cannot be factored, even with a damping of {damping * _DAMPING_STEPS[-1]:g}")


def _inverse_factor(matrix: Float64Array) -> Float64Array | None:
    """U, upper, with matrix^-1 = U^T U; None when the matrix is not positive definite.

    With J the reversal, J matrix J = L L^T gives matrix = R R^T for the upper R = J L J, so that U = R^-1.
    """
    try:
        lower = np.linalg.cholesky(matrix[::-1, ::-1])
    except np.linalg.LinAlgError:
        return None
    factor = np.triu(np.linalg.inv(lower[::-1, ::-1]))
    return factor if np.isfinite(factor).all() else None


def gptq_round(
    weight: FloatArray, grid: RoundedWeight, damped: DampedGram, scheme: Scheme, refine: int
) -> RoundedWeight:
    """Codes by GPTQ on the scales and zero points of `grid`, then `refine` rounds of improvement."""
    columns = weight.shape[1]
    state = _State.of(weight, grid, scheme)
    _sequential(state, damped)
    for _ in range(refine):
        _fit_scales(state, damped.gram)
        _descend(state, damped)
    if refine:
        _fit_scales(state, damped.gram)
    codes = state.codes.T.astype(grid.codes.dtype)
    rounded = replace(grid, codes=codes, scale=np.ascontiguousarray(state.scale.T))
    error = weight - dequantize(codes, rounded.scale, grid.zero_point, scheme.block_columns(columns))
    return replace(rounded, squared_error=float(np.square(error, dtype=np.float64).sum()))


def output_error(error: FloatArray, gram: FloatArray) -> float:
    """Sum over rows of e H e^T: the squared error of the outputs, with error = W - W'."""
    return float(np.einsum("oi,oi->", error @ gram, error, dtype=np.float64))


@dataclass
class _State:
    """Everything with columns first: weight, codes, zeros [in, out]; scale, zero [blocks, out].

    zeros    where the weight is exactly zero, which it stays: somebody pruned it
    """

    weight: FloatArray
    codes: FloatArray
    scale: FloatArray
    zero: FloatArray
    block_columns: int
    low: np.float32
    high: np.float32
    zeros: NDArray[np.bool_]

    @classmethod
    def of(cls, weight: FloatArray, grid: RoundedWeight, scheme: Scheme) -> "_State":
        scale = np.ascontiguousarray(grid.scale.T)
        zero = np.zeros_like(scale) if grid.zero_point is None else grid.zero_point.T.astype(np.float32)
        low, high = map(np.float32, scheme.code_range)
        columns = np.ascontiguousarray(weight.T)
        block = scheme.block_columns(weight.shape[1])
        return cls(columns, np.empty_like(columns), scale, zero, block, low, high, columns == 0)

    def nearest(self, column: int, values: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Codes of a column's values [out], and what they stand for."""
        block = column // self.block_columns
        scale, zero = self.scale[block], self.zero[block]
        codes = np.clip(np.rint(values / scale) + zero, self.low, self.high)
        codes = np.where(self.zeros[column], zero, codes)
        return codes, (codes - zero) * scale

    def rounded(self) -> FloatArray:
        """w' [in, out]."""
        block = np.arange(len(self.codes)) // self.block_columns
        restored: FloatArray = (self.codes - self.zero[block]) * self.scale[block]
        return restored


def _panels(columns: int) -> Iterator[slice]:
    return (slice(at, min(at + _PANEL_COLUMNS, columns)) for at in range(0, columns, _PANEL_COLUMNS))


def _sequential(state: _State, damped: DampedGram) -> None:
    """The codes of GPTQ."""
    left = state.weight[damped.order]  # [in, out], what is still to be represented
    for panel in _panels(len(left)):
        factor, values = damped.factor[panel, panel], left[panel]
        errors = np.empty_like(values)
        for i, column in enumerate(damped.order[panel]):
            state.codes[column], restored = state.nearest(int(column), values[i])
            errors[i] = (values[i] - restored) / factor[i, i]
            values[i + 1 :] -= np.multiply.outer(factor[i, i + 1 :], errors[i])
        left[panel.stop :] -= damped.factor[panel, panel.stop :].T @ errors


def _descend(state: _State, damped: DampedGram) -> None:
    """Each code anew, the others fixed: w'_j + (H e)_j / H_jj is where the error would be least."""
    order = damped.order
    gram = damped.gram[np.ix_(order, order)]
    restored = state.rounded()
    slope = gram @ (state.weight - restored)[order]  # [in, out]
    for panel in _panels(len(order)):
        inner, slopes = gram[panel, panel], slope[panel]
        change = np.empty_like(slopes)
        for i, column in enumerate(order[panel]):
            target = restored[column] + slopes[i] / inner[i, i]
            state.codes[column], new = state.nearest(int(column), target)
            change[i] = new - restored[column]
            slopes -= np.multiply.outer(inner[:, i], change[i])
        slope[panel.stop :] -= gram[panel.stop :, panel] @ change


def _fit_scales(state: _State, gram: FloatArray) -> None:
    """The scales of each row with the least error for its codes: normal equations under H, [blocks, blocks] per row."""
    blocks, rows = state.scale.shape
    step = max(1, _FIT_BYTES // (8 * blocks * max(blocks, len(gram))))
    for at in range(0, rows, step):
        part = slice(at, min(at + step, rows))
        fitted = _fitted(state, gram, part)
        usable = np.isfinite(fitted) & (fitted > 0)
        whole = usable.all(axis=0)  # a row is taken over as a whole: its scales were fitted together
        state.scale[:, part] = np.where(whole, fitted, state.scale[:, part])


def _fitted(state: _State, gram: FloatArray, part: slice) -> FloatArray:
    """Fitted scales [blocks, rows] of some rows."""
    columns, size = len(gram), state.block_columns
    starts = np.arange(0, columns, size)
    codes = (state.codes[:, part] - state.zero[np.arange(columns) // size, part]).T.copy()  # [rows, in]
    pull = codes * (state.weight[:, part].T @ gram)
    right = np.add.reduceat(pull, starts, axis=1).astype(np.float64)  # [rows, blocks]
    left = np.empty((len(codes), len(starts), len(starts)))
    for block, start in enumerate(starts):
        inside = slice(start, start + size)
        left[:, block] = np.add.reduceat((codes[:, inside] @ gram[inside]) * codes, starts, axis=1)
    diagonal = np.einsum("rbb->rb", left)
    scale = state.scale[:, part].T.astype(np.float64)
    ridge = _RIDGE * diagonal.mean(axis=1, keepdims=True) + np.where(diagonal > 0, 0, 1.0)
    diagonal += ridge  # in place: towards the scale that is there, where the codes say nothing
    fitted: FloatArray = np.linalg.solve(left, (right + ridge * scale)[..., None])[..., 0].T.astype(np.float32)
    return fitted
