"""Sampling of a step's rows by the C kernel (sample_tokens.c, by ctypes) where it was built, else in numpy.

Both give the same tokens, bit for bit, so that a request's output does not depend on how Ingot was installed.
"""

import threading
from collections.abc import Sequence
from ctypes import c_double, c_int, c_int32, c_int64, c_void_p
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.runtime.cpu.native.library import native_library
from ingot.runtime.forward_batch import FloatArray
from ingot.runtime.truncation_sampling import UNIT_BITS, TokenChoice, choose_token

SKIPPED = TokenChoice(-1.0)
"""A row that is not sampled."""

_LARGEST_VOCAB = 2 ** (63 - UNIT_BITS)


class _Scratch(threading.local):
    """Memory of one thread, for a vocabulary: engines on other threads sample at the same time."""

    vocab = 0
    memory = np.empty(0, np.uint64)
    address = 0


_scratch = _Scratch()


@cache
def _native() -> Any:
    """The C function; None when it was not built."""
    library = native_library()
    if library is None:
        return None
    library.sample_tokens_scratch.argtypes = (c_int64,)
    library.sample_tokens_scratch.restype = c_int64
    library.sample_tokens.argtypes = (c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_void_p)
    library.sample_tokens.restype = None
    library.mask_logits.argtypes = (c_void_p, c_int64, c_void_p, c_void_p)
    library.mask_logits.restype = c_int
    return library


def sample_tokens(logits: FloatArray, choices: Sequence[TokenChoice], uniforms: Sequence[float]) -> list[int]:
    """Tokens of logits [rows, vocab], chosen as `truncation_sampling.choose_token` does; below 0 for rows without one.

    -1  a logit is NaN, or none is a finite maximum
    -2  the choice of the row is `SKIPPED`
    """
    library = _native()
    if library is None:
        rows = zip(logits, choices, uniforms, strict=True)
        return [-2 if choice is SKIPPED else choose_token(row, choice, uniform) for row, choice, uniform in rows]
    count, vocab = logits.shape
    assert count == len(choices) == len(uniforms)
    assert vocab <= _LARGEST_VOCAB
    if logits.dtype != np.float32 or logits.strides[1] != logits.itemsize:
        logits = np.ascontiguousarray(logits, np.float32)
    tokens = (c_int32 * count)()
    library.sample_tokens(
        logits.ctypes.data,
        logits.strides[0] // logits.itemsize,
        vocab,
        count,
        b"".join([choice.packed for choice in choices]),
        (c_double * count)(*uniforms),
        _scratch_for(library, vocab),
        tokens,
    )
    return list(tokens)


def mask_logits(row: FloatArray, mask: NDArray[np.uint32], masked: FloatArray) -> bool:
    """Write logits [vocab] to `masked`, minus infinity where bit i % 32 of word i // 32 of the mask is 0.

    Returns False where a logit is NaN or plus infinity, even if the mask forbids its token.
    """
    library = _native()
    if library is None or row.dtype != np.float32 or not row.flags.c_contiguous:
        allowed = np.unpackbits(mask.view(np.uint8), count=len(row), bitorder="little")  # words are little-endian
        np.copyto(masked, np.where(allowed, row, -np.inf))
        return not bool(np.isnan(row).any() or np.isposinf(row).any())
    assert len(row) == len(masked) <= 32 * len(mask)
    assert masked.flags.c_contiguous
    return bool(library.mask_logits(row.ctypes.data, len(row), mask.ctypes.data, masked.ctypes.data))


def _scratch_for(library: Any, vocab: int) -> int:
    if _scratch.vocab < vocab:
        _scratch.vocab, _scratch.memory = vocab, np.empty(library.sample_tokens_scratch(vocab) // 8, np.uint64)
        _scratch.address = int(_scratch.memory.ctypes.data)
    return _scratch.address
