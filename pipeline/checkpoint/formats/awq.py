"""AWQ checkpoints in the gemm layout: 4 bits, eight columns to a word in the order of ORDER.

    qweight   int32 [in, out / 8]        nibble i of word c holds output column 8 * c + ORDER[i]
    qzeros    int32 [groups, out / 8]    likewise, the zero points
    scales    float [groups, out]

(Source: AutoAWQ awq/modules/linear/gemm.py.)
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator

from ingot.pipeline.checkpoint.formats.codes import pack_words, unpack_words
from ingot.pipeline.checkpoint.formats.decoded import DecodedWeight
from ingot.pipeline.checkpoint.formats.leaves import FLOATS, PACKED, Leaf, Sizes, Stored
from ingot.pipeline.checkpoint.formats.quant_method import Arrays, GroupSize, QuantMethod, num_groups

BITS = 4
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _gemm(value: Any) -> str:
    if str(value).lower() != "gemm":
        raise ValueError("Ingot reads 'gemm' and no other layout of AWQ; save the model again with version 'gemm'")
    return "gemm"


class AwqMethod(QuantMethod):
    """quant_method awq in the gemm layout."""

    title = "awq"

    bits: Literal[4]
    group_size: GroupSize
    version: Annotated[Any, AfterValidator(_gemm)] = "gemm"
    zero_point: Literal[True] = True

    def table(self, module: str) -> Sequence[Leaf]:
        return (
            Leaf("qweight", PACKED, [("in", "out words")]),
            Leaf("qzeros", PACKED, [("groups", "out words")]),
            Leaf("scales", FLOATS, [("groups", "out")]),
        )

    def sizes(self, module: str, leaves: Stored) -> Sizes:
        columns, words = leaves["qweight"].shape
        groups = num_groups(columns, self.group_size)
        return {"out": words * len(ORDER), "out words": words, "in": columns, "groups": groups}

    def decode(self, module: str, arrays: Arrays) -> DecodedWeight:
        return decode(arrays["qweight"], arrays["qzeros"], arrays["scales"], group_size=self.group_size)


def decode(qweight: NDArray[Any], qzeros: NDArray[Any], scales: NDArray[Any], *, group_size: int) -> DecodedWeight:
    """Return the weight of one layer. group_size: -1 for whole rows. ValueError when the tensors do not fit."""
    columns, rows = qweight.shape[0], qweight.shape[1] * len(ORDER)
    group_columns = columns if group_size == -1 else group_size
    groups = -(-columns // max(group_columns, 1))
    if scales.shape != (groups, rows) or qzeros.shape != (groups, qweight.shape[1]) or group_columns < 1:
        raise ValueError(
            f"qweight {list(qweight.shape)}, qzeros {list(qzeros.shape)} and scales {list(scales.shape)} "
            f"do not fit together with groups of {group_size}"
        )
    return DecodedWeight(
        codes=np.ascontiguousarray(_unpack(qweight).T),
        scales=np.ascontiguousarray(scales.T.astype(np.float32)),
        group_size=group_columns,
        zero_points=np.ascontiguousarray(_unpack(qzeros).T.astype(np.int16)),
        bits=BITS,
    )


def encode(weight: DecodedWeight) -> dict[str, NDArray[Any]]:
    """Return the tensors of one layer by leaf name; the caller has checked that the format holds the weight."""
    assert weight.zero_points is not None
    return {
        "qweight": _pack(weight.codes.T),
        "qzeros": _pack(weight.zero_points.T),
        "scales": np.ascontiguousarray(weight.scales.T).astype(np.float16),
    }


def _unpack(words: NDArray[Any]) -> NDArray[np.uint8]:
    """[r, n] words -> [r, 8 * n] codes in their natural order."""
    nibbles = unpack_words(words, BITS, words.shape[1] * len(ORDER)).reshape(*words.shape, len(ORDER))
    return nibbles[..., np.argsort(ORDER)].reshape(len(words), -1)


def _pack(codes: NDArray[Any]) -> NDArray[np.int32]:
    nibbles = codes.reshape(len(codes), -1, len(ORDER))[..., list(ORDER)]
    return pack_words(nibbles.reshape(len(codes), -1), BITS)
