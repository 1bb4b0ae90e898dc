"""The layout in which kernels read codes of 4 or 8 bits."""

import numpy as np
from numpy.typing import NDArray


def packed_spans(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Codes [n, columns] as the kernels read them; codes after the last column are 15 or 255, as no kernel uses them.

    A span of 4-bit codes has 16 words: word 4 t + w has columns 32 w + 8 t + i, i as in the tuple, lowest bits first.
    """
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % (512 // bits))), constant_values=2**bits - 1)
    if bits == 8:
        return padded
    column = np.arange(padded.shape[1]).reshape(-1, 4, 4, 8)[..., (0, 2, 4, 6, 1, 3, 5, 7)].swapaxes(1, 2).reshape(-1)
    stored = padded[:, column]
    return np.ascontiguousarray(stored[:, ::2] | stored[:, 1::2] << np.uint8(4))
