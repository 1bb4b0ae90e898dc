"""GPTQ checkpoints: qweight, qzeros, scales and g_idx of every linear layer, packed along the input axis.

    qweight   int32 [in * bits / 32, out]      LSB-first stream along `in`
    qzeros    int32 [groups, out * bits / 32]  LSB-first stream along `out`
    scales    float [groups, out]
    g_idx     int32 [in]                       group of each column; not monotonic with desc_act

Version 1 ("gptq") stores the zero point minus one, so that a zero point may reach 2 ** bits; version 2 ("gptq_v2")
stores it unchanged. (Sources: AutoGPTQ qlinear_cuda_old.py, GPTQModel utils/model.py convert_gptq_v1_to_v2_format.)
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import model_validator

from ingot.pipeline.checkpoint.formats.codes import WORD_BITS, num_words, pack_words, unpack_words
from ingot.pipeline.checkpoint.formats.decoded import DecodedWeight
from ingot.pipeline.checkpoint.formats.leaves import FLOATS, INDICES, PACKED, Leaf, Sizes, Stored
from ingot.pipeline.checkpoint.formats.quant_method import (
    Arrays,
    GroupSize,
    QuantMethod,
    num_groups,
    readable,
    unsupported,
)

BITS = (2, 3, 4, 8)


class GptqMethod(QuantMethod):
    """quant_method gptq."""

    title = "gptq"

    bits: Literal[2, 3, 4, 8]
    group_size: GroupSize
    desc_act: bool = False
    checkpoint_format: Annotated[str, readable(("gptq", "gptq_v2"))]
    pack_dtype: Literal["int32"] = "int32"
    is_marlin_format: Annotated[
        Any, unsupported("Marlin's layout is not read; build from the checkpoint that it was made from, format gptq")
    ] = None
    dynamic: Annotated[Any, unsupported("settings per layer are not read")] = None

    @model_validator(mode="before")
    @classmethod
    def _older_key(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        layout = values.get("checkpoint_format") or values.get("format") or "gptq"
        return {**values, "checkpoint_format": layout}

    @property
    def version(self) -> int:
        """1 stores zero points minus one, 2 stores them unchanged."""
        return 2 if self.checkpoint_format == "gptq_v2" else 1

    def table(self, module: str) -> Sequence[Leaf]:
        return (
            Leaf("qweight", PACKED, [("in words", "out")]),
            Leaf("qzeros", PACKED, [("groups", "out words")]),
            Leaf("scales", FLOATS, [("groups", "out")]),
            Leaf("g_idx", INDICES, [("in",)], self.desc_act, " because desc_act is true"),
        )

    def sizes(self, module: str, leaves: Stored) -> Sizes:
        words, rows = leaves["qweight"].shape
        columns = words * WORD_BITS // self.bits
        return {
            "out": rows,
            "out words": rows * self.bits // WORD_BITS,
            "in": columns,
            "in words": num_words(columns, self.bits),
            "groups": num_groups(columns, self.group_size),
        }

    def decode(self, module: str, arrays: Arrays) -> DecodedWeight:
        parts = arrays["qweight"], arrays["qzeros"], arrays["scales"], arrays.get("g_idx")
        return decode(*parts, bits=self.bits, group_size=self.group_size, version=self.version)


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
    """Return the weight of one layer. group_size: -1 for whole rows. ValueError when the tensors do not fit."""
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
    """Return the tensors of one layer by leaf name; the caller has checked that the format holds the weight."""
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
        raise ValueError(f"g_idx must hold {columns} group numbers from 0 to {groups - 1}")
