"""KL divergence between logits, in nats."""

import numpy as np

from ingot.passes.numerics.arrays import Float32Array

_ROWS_AT_ONCE = 64
_LARGE = 40.0


def kl_of_rows(reference: Float32Array, logits: Float32Array) -> Float32Array:
    """KL(p || q) of each row [rows], from logits of p (the reference) and of q, both [rows, vocab].

    With d = logits - reference, minus its mean under p: KL = log(1 + E_p[exp(d) - 1 - d]). Every term is positive, so
    nothing cancels when q is close to p, and equal logits give exactly 0.
    """
    blocks = (slice(at, at + _ROWS_AT_ONCE) for at in range(0, len(logits), _ROWS_AT_ONCE))
    return np.concatenate([_kl_of_block(reference[block], logits[block]) for block in blocks])


def mean_kl_and_gradient(reference: Float32Array, logits: Float32Array) -> tuple[float, Float32Array]:
    """Mean over rows of KL(p || q), and its gradient (q - p) / rows with respect to the logits of q."""
    log_p, log_q = _log_softmax(reference), _log_softmax(logits)
    p = np.exp(log_p)
    total = float(np.einsum("rv,rv->", p, log_p - log_q, dtype=np.float64))
    gradient: Float32Array = ((np.exp(log_q) - p) / len(logits)).astype(np.float32)
    return total / len(logits), gradient


def _kl_of_block(reference: Float32Array, logits: Float32Array) -> Float32Array:
    log_p = _log_softmax(reference)
    p, change = np.exp(log_p), logits - reference
    change -= np.einsum("rv,rv->r", p, change)[:, None]
    if change.max() > _LARGE:  # exp could overflow; a KL this large does not suffer from cancellation
        direct: Float32Array = np.maximum(np.einsum("rv,rv->r", p, log_p - _log_softmax(logits)), np.float32(0))
        return direct
    result: Float32Array = np.log1p(np.einsum("rv,rv->r", p, np.expm1(change) - change))
    return result


def _log_softmax(logits: Float32Array) -> Float32Array:
    shifted: Float32Array = logits - logits.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted
