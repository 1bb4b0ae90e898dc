"""MXFP4: the weights of all experts of a layer in blocks of 32 numbers of 4 bits (OCP MX specification 1.0).

    NAME_blocks    uint8 [experts, out, blocks, 16]    e2m1 codes along the inputs, the low half of a byte first
    NAME_scales    uint8 [experts, out, blocks]        e8m0: the numbers of the block times 2 ** (scale - 127)

Such a pair is the tensor NAME [experts, in, out] of the unquantized model. (Source: transformers
integrations/mxfp4.py.) Other tensors of the checkpoint are not quantized.
"""

from collections.abc import Mapping
from functools import partial

import numpy as np

from ingot.artifact.safetensors import StoredTensor
from ingot.errors import CheckpointError, shown
from ingot.pipeline.checkpoint.formats.codes import ByteArray, FloatArray, from_e2m1, from_e8m0, unpack_nibbles
from ingot.pipeline.checkpoint.formats.decoded import DecodedWeight, EncodedTensor

METHOD = "mxfp4"
BLOCK = 32
_BLOCKS, _SCALES = "_blocks", "_scales"


def split_mxfp4(
    tensors: Mapping[str, StoredTensor], place: str
) -> tuple[dict[str, StoredTensor], dict[str, EncodedTensor]]:
    """Return plain tensors, and quantized ones by the names of the unquantized model.

    CheckpointError for a pair that lacks a tensor or whose sizes differ, and for a checkpoint without a pair.
    """
    plain, encoded = dict(tensors), dict[str, EncodedTensor]()
    for name in [name.removesuffix(_BLOCKS) for name in tensors if name.endswith(_BLOCKS)]:
        blocks, scales = plain.pop(name + _BLOCKS), plain.pop(name + _SCALES, None)
        if scales is None:
            raise CheckpointError(f"{blocks.file}: {shown(name + _BLOCKS)} has no {shown(name + _SCALES)}")
        sizes = (*scales.shape, BLOCK // 2)
        if len(sizes) != 4 or blocks.shape != sizes or {blocks.dtype, scales.dtype} != {"U8"}:
            raise CheckpointError(
                f"{blocks.file}: {shown(name + _BLOCKS)} is {blocks.dtype} {list(blocks.shape)} and its scales "
                f"{scales.dtype} {list(scales.shape)}; they must be U8 [experts, out, blocks, 16] and "
                "[experts, out, blocks]"
            )
        experts, rows, count = scales.shape
        one = partial(_decode_one, blocks, scales)
        all_of_them = partial(_decode_all, one, experts)
        parts = {"blocks": blocks, "scales": scales}
        shape = (experts, count * BLOCK, rows)
        encoded[name] = EncodedTensor(name, shape, blocks.file, all_of_them, parts, METHOD, matrices=one)
    if not encoded:
        raise CheckpointError(f"{place}: announces a quantized checkpoint, but no layer is; config and weights differ")
    return plain, encoded


def decode(blocks: ByteArray, scales: ByteArray) -> DecodedWeight:
    """Return the weight [out, in] of blocks [out, blocks, 16] and scales [out, blocks]."""
    codes = from_e2m1(unpack_nibbles(blocks.reshape(len(blocks), -1)))
    return DecodedWeight(codes=codes, scales=from_e8m0(scales), group_size=BLOCK, bits=4)


def _decode_one(blocks: StoredTensor, scales: StoredTensor, expert: int) -> DecodedWeight:
    return decode(_matrix(blocks, expert), _matrix(scales, expert))


def _decode_all(one: partial[DecodedWeight], experts: int) -> FloatArray:
    """[experts, in, out]"""
    return np.stack([one(expert).dequantize().T for expert in range(experts)])


def _matrix(stored: StoredTensor, index: int) -> ByteArray:
    """One matrix of a tensor of bytes, read from its file."""
    size = stored.num_bytes // stored.shape[0]
    return stored.read(np.uint8, index * size, size).reshape(stored.shape[1:])
