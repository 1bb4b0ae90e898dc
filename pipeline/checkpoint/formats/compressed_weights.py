"""Weights of compressed-tensors, decoded and encoded; the formats are listed in compressed_tensors.py."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.pipeline.checkpoint.formats.codes import (
    FloatArray,
    from_e2m1,
    from_e4m3,
    from_e8m0,
    num_words,
    pack_words,
    to_e4m3,
    unpack_nibbles,
    unpack_words,
)
from ingot.pipeline.checkpoint.formats.decoded import DecodedWeight

Tensors = Mapping[str, NDArray[Any]]


def decode(
    tensors: Tensors, storage: str, *, bits: int, group_size: int | None, block: tuple[int, int] | None
) -> DecodedWeight:
    """Return the weight of one layer from its leaves. ValueError when the tensors contradict one another."""
    if storage == "pack-quantized":
        return _packed(tensors, bits, group_size)
    if storage == "nvfp4-pack-quantized":
        global_scale: FloatArray = tensors["weight_global_scale"].astype(np.float32)
        scales: FloatArray = np.divide(from_e4m3(tensors["weight_scale"]), global_scale)
        return _fp4(tensors["weight_packed"], scales, 16)
    if storage == "mxfp4-pack-quantized":
        return _fp4(tensors["weight_packed"], from_e8m0(tensors["weight_scale"]), 32)
    return _plain(tensors, group_size, block)


def encode(weight: DecodedWeight, bits: int) -> dict[str, NDArray[Any]]:
    """Return the tensors of a pack-quantized layer, whose codes are in [-2 ** (bits - 1), 2 ** (bits - 1))."""
    half = 1 << (bits - 1)
    tensors: dict[str, NDArray[Any]] = {
        "weight_packed": pack_words((weight.codes.astype(np.int16) + half).astype(np.uint8), bits),
        "weight_scale": weight.scales,
        "weight_shape": np.array(weight.codes.shape, np.int64),
    }
    if weight.zero_points is not None:
        shifted = np.ascontiguousarray(weight.zero_points.T) + np.int16(half)
        tensors["weight_zero_point"] = np.ascontiguousarray(pack_words(shifted, bits).T)
    if weight.g_idx is not None:
        tensors["weight_g_idx"] = weight.g_idx
    return tensors


def encode_bytes(weight: DecodedWeight, strategy: str) -> dict[str, NDArray[Any]]:
    """Return the tensors of an int-quantized layer, whose codes are int8."""
    tensors: dict[str, NDArray[Any]] = {"weight": weight.codes.astype(np.int8)}
    tensors["weight_scale"] = _shared(weight.scales, strategy, weight.group_size)
    if weight.zero_points is not None:
        tensors["weight_zero_point"] = _shared(weight.zero_points, strategy, weight.group_size).astype(np.int8)
    return tensors


def encode_floats(weight: DecodedWeight, strategy: str) -> dict[str, NDArray[Any]]:
    """Return the tensors of a float-quantized layer, codes as e4m3 bytes."""
    return {
        "weight": to_e4m3(weight.codes),
        "weight_scale": _shared(weight.scales, strategy, weight.group_size),
    }


def _shared(values: NDArray[Any], strategy: str, group_size: int) -> NDArray[Any]:
    """Return [out, groups] without repetitions: [1] per tensor, every group_size-th row per block."""
    if strategy == "tensor":
        return np.ascontiguousarray(values[:1, 0])
    return np.ascontiguousarray(values[::group_size]) if strategy == "block" else values


def _packed(tensors: Tensors, bits: int, group_size: int | None) -> DecodedWeight:
    rows, columns = (int(size) for size in tensors["weight_shape"])
    packed, half = tensors["weight_packed"], 1 << (bits - 1)
    if packed.shape != (rows, num_words(columns, bits)):
        raise ValueError(f"weight_packed {list(packed.shape)} does not hold [{rows}, {columns}] of {bits} bits")
    scales, group_columns = _group_scales(tensors["weight_scale"], rows, columns, group_size)
    zero_points = None
    if "weight_zero_point" in tensors:
        stored = np.ascontiguousarray(tensors["weight_zero_point"].T)  # [groups, words]
        if stored.shape != (scales.shape[1], num_words(rows, bits)):
            raise ValueError(f"weight_zero_point {list(stored.T.shape)} does not fit weight_scale {list(scales.shape)}")
        zero_points = np.ascontiguousarray(unpack_words(stored, bits, rows).T.astype(np.int16) - np.int16(half))
    g_idx = tensors.get("weight_g_idx")
    if g_idx is not None and (g_idx.shape != (columns,) or g_idx.min() < 0 or g_idx.max() >= scales.shape[1]):
        raise ValueError(f"weight_g_idx must hold {columns} group numbers from 0 to {scales.shape[1] - 1}")
    codes = (unpack_words(packed, bits, columns).astype(np.int16) - half).astype(np.int8)
    order = None if g_idx is None else g_idx.astype(np.int32)
    return DecodedWeight(codes, scales, group_columns, zero_points, g_idx=order, bits=bits).without_trivial_order()


def _plain(tensors: Tensors, group_size: int | None, block: tuple[int, int] | None) -> DecodedWeight:
    """Decode codes of one byte: int8, or fp8 as uint8."""
    stored = tensors["weight"]
    codes = from_e4m3(stored) if stored.dtype == np.uint8 else stored
    rows, columns = codes.shape
    if block is not None:
        scales = np.repeat(tensors["weight_scale"].astype(np.float32), block[0], axis=0)[:rows]
        return DecodedWeight(codes, scales, block[1], bits=8)
    scales, group_columns = _group_scales(tensors["weight_scale"], rows, columns, group_size)
    zero_points = None
    if "weight_zero_point" in tensors:
        zero_points = _group_scales(tensors["weight_zero_point"], rows, columns, group_size)[0].astype(np.int16)
        if stored.dtype == np.uint8 and zero_points.any():
            raise ValueError("weight_zero_point is not 0, and fp8 codes have no zero points")
    return DecodedWeight(codes, scales, group_columns, zero_points, bits=8)


def _fp4(packed: NDArray[Any], scales: FloatArray, group_size: int) -> DecodedWeight:
    codes = from_e2m1(unpack_nibbles(packed))
    if scales.shape != (codes.shape[0], -(-codes.shape[1] // group_size)):
        raise ValueError(f"weight_scale {list(scales.shape)} does not fit a weight of {list(codes.shape)}")
    return DecodedWeight(codes, scales, group_size, bits=4)


def _group_scales(scales: NDArray[Any], rows: int, columns: int, group_size: int | None) -> tuple[FloatArray, int]:
    """Return scales as [out, groups] float32, and the columns of a group."""
    values = scales.astype(np.float32)
    if values.size == 1:
        return np.full((rows, 1), values.reshape(-1)[0], np.float32), columns
    values = values.reshape(len(values), -1)
    group_columns = columns if values.shape[1] == 1 else group_size or columns // values.shape[1]
    if group_columns < 1 or values.shape != (rows, -(-columns // group_columns)):
        raise ValueError(
            f"weight_scale {list(scales.shape)} does not fit [{rows}, {columns}] in groups of {group_size}"
        )
    return values, group_columns
