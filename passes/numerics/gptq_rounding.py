"""GPTQ: round a weight matrix so that the layer's output changes least, given the Gram matrix of its inputs.

For W [out, in] and inputs X [tokens, in] with H = X^T X + damping, GPTQ looks for codes of each row w of W whose w'
makes the squared error of the row's outputs small:

    (w - w') H (w - w')^T

Columns are rounded one after the other. Those that follow compensate for the error of each, by the Cholesky factor U of
the inverse, H^-1 = U^T U:

    e_i = (w_i - w'_i) / U_ii          w_j -= e_i U_ij   for every j > i

(Frantar et al., GPTQ, arXiv:2210.17323.) All rows are rounded together; columns after a panel are updated by one
matmul. With act_order the columns with the largest H_ii are rounded first. Groups are static: scales and zero points
are fixed beforehand on contiguous columns, so that the stored layout does not depend on the order of rounding.

`refine` further rounds improve the same objective, and never worsen it: scales are fitted to the codes by least squares
under H, all blocks of a row together; then each code is chosen again with all others fixed (coordinate descent, as in
QuantEase, arXiv:2309.01885). Where the grid's scales are float16, fitted ones are rounded to float16 before codes are
chosen for them, and a row keeps its old scales where the rounded ones are worse.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ingot.passes.numerics.arrays import Float32Array, Float64Array
from ingot.passes.numerics.linear_algebra import cholesky, lower_inverse, matmul
from ingot.passes.numerics.rounding import RoundedWeight
from ingot.passes.numerics.scheme import LEAST_SCALE, MOST_SCALE, ScaleDtype, Scheme, to_float16

_PANEL_COLUMNS = 64
_FIT_BYTES = 64 << 20  # normal equations held at once by the fit of scales
_DAMPING_STEPS = (1.0, 10.0, 100.0, 1000.0)
_RIDGE = 1e-6


@dataclass(frozen=True)
class DampedGram:
    """H = X^T X + damping * mean(diagonal), and the factor U of its inverse (upper, in the order of `order`)."""

    gram: Float32Array
    factor: Float32Array
    order: NDArray[np.int64]
    damping: float

    def scaled(self, scale: Float32Array) -> "DampedGram":
        """The Gram matrix of the inputs x / s, by the same factorization: U^T U becomes s U^T U s; same order."""
        gram = self.gram / np.outer(scale, scale)
        return replace(self, gram=gram, factor=self.factor * scale[self.order])


def damped_gram(gram: Float64Array, damping: float, act_order: bool) -> DampedGram:
    """Damp and factor a Gram matrix; where Cholesky fails, with 10, 100, 1000 times the damping.

    The diagonal of a channel that is always zero is set to the mean, so that its weights are rounded to nearest.
    ValueError when no damping helps, or the inputs are not finite or all zero.
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
        lower = cholesky(matrix[::-1, ::-1])
    except np.linalg.LinAlgError:
        return None
    factor = lower_inverse(lower)[::-1, ::-1]
    return factor if np.isfinite(factor).all() else None


def gptq_round(
    weight: Float32Array, grid: RoundedWeight, damped: DampedGram, scheme: Scheme, refine: int
) -> RoundedWeight:
    """Round weight [out, in] by GPTQ on the scales and zero points of `grid`, then refine it that many times."""
    state = _State.of(weight, grid, scheme)
    _sequential(state, damped)
    for _ in range(refine):
        _fit_scales(state, damped.gram)
        _descend(state, damped)
    if refine:
        _fit_scales(state, damped.gram)
    codes = state.codes.T.astype(grid.codes.dtype)
    rounded = replace(grid, codes=codes, scale=np.ascontiguousarray(state.scale.T))
    error = weight - rounded.restored(scheme)
    return replace(rounded, squared_error=float(np.square(error, dtype=np.float64).sum()))


def output_error(error: Float32Array, gram: Float32Array) -> float:
    """Sum over rows of e H e^T: the squared error of the outputs, with error = W - W'."""
    return float(np.einsum("oi,oi->", matmul(error, gram), error, dtype=np.float64))


@dataclass
class _State:
    """All arrays with columns first: weight, codes, zeros [in, out]; scale, zero [blocks, out].

    zeros          where the weight is exactly zero: it was pruned, and stays zero
    scale_dtype    of the scales: float16 where the scheme has it and the grid could keep it
    """

    weight: Float32Array
    codes: Float32Array
    scale: Float32Array
    zero: Float32Array
    block_columns: int
    low: np.float32
    high: np.float32
    zeros: NDArray[np.bool_]
    scale_dtype: ScaleDtype

    @classmethod
    def of(cls, weight: Float32Array, grid: RoundedWeight, scheme: Scheme) -> "_State":
        scale = np.ascontiguousarray(grid.scale.T)
        zero = np.zeros_like(scale) if grid.zero_point is None else grid.zero_point.T.astype(np.float32)
        low, high = map(np.float32, scheme.code_range)
        columns = np.ascontiguousarray(weight.T)
        block = scheme.block_columns(weight.shape[1])
        scale_dtype = grid.scale_dtype if scheme.scale_dtype == "float16" else "float32"
        return cls(columns, np.empty_like(columns), scale, zero, block, low, high, columns == 0, scale_dtype)

    def nearest(self, column: int, values: Float32Array) -> tuple[Float32Array, Float32Array]:
        """Codes of a column's values [out], and the values that they represent."""
        block = column // self.block_columns
        scale, zero = self.scale[block], self.zero[block]
        codes = np.clip(np.rint(values / scale) + zero, self.low, self.high)
        codes = np.where(self.zeros[column], zero, codes)
        return codes, (codes - zero) * scale

    def rounded(self) -> Float32Array:
        """w' [in, out]."""
        block = np.arange(len(self.codes)) // self.block_columns
        restored: Float32Array = (self.codes - self.zero[block]) * self.scale[block]
        return restored


def _panels(columns: int) -> Iterator[slice]:
    return (slice(at, min(at + _PANEL_COLUMNS, columns)) for at in range(0, columns, _PANEL_COLUMNS))


def _sequential(state: _State, damped: DampedGram) -> None:
    """Choose the codes by GPTQ's pass over the columns."""
    left = state.weight[damped.order]  # [in, out], with the errors of earlier columns compensated
    for panel in _panels(len(left)):
        factor, values = damped.factor[panel, panel], left[panel]
        errors = np.empty_like(values)
        for i, column in enumerate(damped.order[panel]):
            state.codes[column], restored = state.nearest(int(column), values[i])
            errors[i] = (values[i] - restored) / factor[i, i]
            values[i + 1 :] -= np.multiply.outer(factor[i, i + 1 :], errors[i])
        left[panel.stop :] -= matmul(damped.factor[panel, panel.stop :].T, errors)


def _descend(state: _State, damped: DampedGram) -> None:
    """Choose each code again with the others fixed: the error is least at w'_j + (H e)_j / H_jj."""
    order = damped.order
    gram = damped.gram[np.ix_(order, order)]
    restored = state.rounded()
    slope = matmul(gram, (state.weight - restored)[order])  # [in, out]
    for panel in _panels(len(order)):
        inner, slopes = gram[panel, panel], slope[panel]
        change = np.empty_like(slopes)
        for i, column in enumerate(order[panel]):
            target = restored[column] + slopes[i] / inner[i, i]
            state.codes[column], new = state.nearest(int(column), target)
            change[i] = new - restored[column]
            slopes -= np.multiply.outer(inner[:, i], change[i])
        slope[panel.stop :] -= matmul(gram[panel.stop :, panel], change)


def _fit_scales(state: _State, gram: Float32Array) -> None:
    """Fit the scales of each row to its codes: normal equations under H, [blocks, blocks] per row."""
    blocks, rows = state.scale.shape
    step = max(1, _FIT_BYTES // (8 * blocks * max(blocks, len(gram))))
    for at in range(0, rows, step):
        part = slice(at, min(at + step, rows))
        fitted = _fitted(state, gram, part)
        usable = np.isfinite(fitted) & (fitted > 0)
        whole = usable.all(axis=0)  # a row's scales were fitted together: take all of them or none
        state.scale[:, part] = np.where(whole, fitted, state.scale[:, part])


def _fitted(state: _State, gram: Float32Array, part: slice) -> Float32Array:
    """Fitted scales [blocks, rows] of some rows."""
    columns, size = len(gram), state.block_columns
    starts = np.arange(0, columns, size)
    codes = (state.codes[:, part] - state.zero[np.arange(columns) // size, part]).T.copy()  # [rows, in]
    pull = codes * matmul(state.weight[:, part].T, gram)
    right = np.add.reduceat(pull, starts, axis=1).astype(np.float64)  # [rows, blocks]
    left = np.empty((len(codes), len(starts), len(starts)))
    for block, start in enumerate(starts):
        inside = slice(start, start + size)
        left[:, block] = np.add.reduceat(matmul(codes[:, inside], gram[inside]) * codes, starts, axis=1)
    diagonal = np.einsum("rbb->rb", left)
    scale = state.scale[:, part].T.astype(np.float64)
    ridge = _RIDGE * diagonal.mean(axis=1, keepdims=True) + np.where(diagonal > 0, 0, 1.0)
    # The ridge keeps the old scale where the codes do not determine one; `left` changes with its diagonal.
    diagonal += ridge
    right += ridge * scale
    fitted: Float32Array = np.linalg.solve(left, right[..., None])[..., 0].astype(np.float32)
    if state.scale_dtype == "float16":
        fitted = _as_float16(fitted, scale, left, right)
    return fitted.T


def _as_float16(fitted: Float32Array, scale: Float64Array, left: Float64Array, right: Float64Array) -> Float32Array:
    """Fitted scales [rows, blocks] as float16 numbers; a row's old scales where those are worse or out of range.

    The error of a row with scales s is s L s - 2 r s, up to a constant.
    """
    rounded = to_float16(np.clip(fitted, LEAST_SCALE, MOST_SCALE))
    change = rounded - scale
    slope = np.einsum("rbc,rc->rb", left, scale) - right
    growth = np.einsum("rb,rbc,rc->r", change, left, change) + 2 * np.einsum("rb,rb->r", change, slope)
    is_better = (growth < 0) & ((fitted >= LEAST_SCALE) & (fitted <= MOST_SCALE)).all(axis=1)
    return np.where(is_better[:, None], rounded, scale).astype(np.float32)
