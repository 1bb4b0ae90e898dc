"""GPTQ checkpoints: qweight, qzeros, scales, g_idx of every linear layer, packed along the input axis.

    qweight   int32 [in * bits / 32, out]      LSB-first stream along `in`
    qzeros    int32 [groups, out * bits / 32]  LSB-first stream along `out`
    scales    float [groups, out]
    g_idx     int32 [in]                       group of each column; not monotonic with desc_act

Version 1 ("gptq") stores the zero point minus one, so that a zero point may reach 2 ** bits; version 2 ("gptq_v2")
stores it as it is. (Sources: AutoGPTQ qlinear_cuda_old.py, GPTQModel utils/model.py convert_gptq_v1_to_v2_format.)
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.pipeline.checkpoint.formats.codes import WORD_BITS, pack_words, unpack_words
from ingot.pipeline.checkpoint.formats.decoded import DecodedWeight

BITS = (2, 3, 4, 8)


def decode(
    qweight: NDArray[Any],
    qzeros: NDArray[Any],
    scales: NDArray[Any],
    g_idx: NDArray[Any] | None,
    *,
    bits: int,
    group_size: int,
    version: int,
) -> DecodedWeight:
    """The weight of one layer. group_size is -1 for one group. ValueError when the tensors contradict one another."""
    columns = qweight.shape[0] * WORD_BITS // bits
    groups, rows = scales.shape
    if qweight.shape[1] != rows or qzeros.shape != (groups, rows * bits // WORD_BITS):
        raise ValueError(
            f"qweight {list(qweight.shape)}, qzeros {list(qzeros.shape)} and scales {list(scales.shape)} "
            f"do not fit together with {bits} bits"
        )
    group_columns = columns if group_size == -1 else group_size
    _check_groups(columns, groups, group_columns, g_idx)
    zeros = unpack_words(qzeros, bits, rows).T.astype(np.int16) + np.int16(2 - version)
    return DecodedWeight(
        codes=unpack_words(qweight.T, bits, columns),
        scales=np.ascontiguousarray(scales.T.astype(np.float32)),
        group_size=group_columns,
        zero_points=np.ascontiguousarray(zeros),
        g_idx=None if g_idx is None else g_idx.astype(np.int32),
        bits=bits,
    ).without_trivial_order()


def encode(weight: DecodedWeight, bits: int, version: int) -> dict[str, NDArray[Any]]:
    """The tensors of one layer by their leaf names; the caller has checked that the format holds the weight."""
    assert weight.zero_points is not None
    stored_zeros = weight.zero_points.astype(np.int32) - (2 - version)
    assert stored_zeros.min() >= 0
    return {
        "qweight": np.ascontiguousarray(pack_words(weight.codes, bits).T),
        "qzeros": pack_words(np.ascontiguousarray(stored_zeros.T), bits),
        "scales": np.ascontiguousarray(weight.scales.T).astype(np.float16),
        "g_idx": weight.groups_of_columns,
    }


def _check_groups(columns: int, groups: int, group_columns: int, g_idx: NDArray[Any] | None) -> None:
    if group_columns < 1 or groups != -(-columns // group_columns):
        raise ValueError(f"{columns} columns in groups of {group_columns} do not make {groups} groups")
    if g_idx is not None and (g_idx.shape != (columns,) or g_idx.min() < 0 or g_idx.max() >= groups):
        raise ValueError(f"g_idx must hold {columns} numbers of groups from 0 to {groups - 1}")
