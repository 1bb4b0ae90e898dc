"""NVIDIA ModelOpt (TensorRT-LLM's checkpoints): one decoder for each quant_algo.

MIXED_PRECISION names the quant_algo of each layer in quantized_layers.

    W4A16_AWQ, W4A8_AWQ          weight uint8 [out / 2, in], low half the even row, two's complement
                                 weight_scale [out, groups]. W4A8_AWQ's weight_scale_2 is that of an engine which
                                 rounds the weights to fp8 as well, and no part of what is stored
    FP8                          weight e4m3 [out, in]; weight_scale a scalar
    FP8_PER_CHANNEL_PER_TOKEN    the same; weight_scale [out]
    FP8_PB_WO                    the same; weight_scale [out / n, in / n] or [out / n, 1, in / n, 1]
    NVFP4, W4A16_NVFP4,          weight uint8 [out, in / 2], e2m1, low half first; weight_scale e4m3 [out, in / 16],
    NVFP4_AWQ                    times weight_scale_2

pre_quant_scale [in] multiplies the layer's input; Ingot multiplies the weight's columns by it instead, so that codes
become floats.
kv_cache_quant_algo FP8 adds k_scale and v_scale. (Source: modelopt/torch/export/quant_utils.py.)
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from ingot.errors import ConfigError
from ingot.pipeline.checkpoint.formats.activations import CONTRADICTION, InputScheme
from ingot.pipeline.checkpoint.formats.codes import FloatArray, from_e2m1, from_e4m3, unpack_nibbles
from ingot.pipeline.checkpoint.formats.decoded import DecodedWeight
from ingot.pipeline.checkpoint.formats.leaves import BYTES, FLOATS, FP8, SCALAR, Leaf, Shape, Sizes, Stored
from ingot.pipeline.checkpoint.formats.quant_method import Arrays, QuantMethod, Settings, readable

_PACKED_ROWS = ("W4A16_AWQ", "W4A8_AWQ")
_FP8 = {
    "FP8": InputScheme(8, "float", dynamic=False, strategy="tensor"),
    "FP8_PER_CHANNEL_PER_TOKEN": InputScheme(8, "float", dynamic=True, strategy="token"),
    "FP8_PB_WO": None,
}
_FP8_SCALES: Mapping[str, Sequence[Shape]] = {
    "FP8": SCALAR,
    "FP8_PER_CHANNEL_PER_TOKEN": [("out",), ("out", 1)],
    "FP8_PB_WO": [("block rows", "block columns"), ("block rows", 1, "block columns", 1)],
}
_NVFP4, _NVFP4_GROUP = ("NVFP4", "W4A16_NVFP4", "NVFP4_AWQ"), 16
ALGORITHMS = (*_PACKED_ROWS, *_FP8, *_NVFP4)
MIXED = "MIXED_PRECISION"

Tensors = Mapping[str, NDArray[Any]]


class _Layer(Settings):
    """One of quantized_layers."""

    quant_algo: Annotated[str, readable(ALGORITHMS, " of ModelOpt")]


class ModelOpt(QuantMethod):
    """quant_method modelopt: one quant_algo for all layers, or MIXED_PRECISION."""

    title = "modelopt"

    quant_algo: Annotated[str, readable((*ALGORITHMS, MIXED), " of ModelOpt")]
    quantized_layers: dict[str, _Layer] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _names_layers(self) -> Self:
        if self.quant_algo == MIXED and not self.quantized_layers:
            message = f"quant_algo is {MIXED}, but quantized_layers does not say how each layer is stored"
            raise PydanticCustomError(CONTRADICTION, message)
        return self

    def table(self, module: str) -> Sequence[Leaf]:
        scaled_inputs = Leaf("pre_quant_scale", FLOATS, [("in",)], is_needed=False)
        match self._algorithm(module):
            case "W4A16_AWQ" | "W4A8_AWQ":
                weight, scale = Leaf("weight", BYTES, [("half out", "in")]), [("out", "groups")]
                second = Leaf("weight_scale_2", FLOATS, SCALAR, is_needed=False)
                return (weight, Leaf("weight_scale", FLOATS, scale), second, scaled_inputs)
            case "NVFP4" | "W4A16_NVFP4" | "NVFP4_AWQ":
                weight, scale = Leaf("weight", BYTES, [("out", "half in")]), [("out", "groups")]
                return (weight, Leaf("weight_scale", FP8, scale), Leaf("weight_scale_2", FLOATS, SCALAR), scaled_inputs)
            case algorithm:
                scales = Leaf("weight_scale", FLOATS, _FP8_SCALES[algorithm])
                return (Leaf("weight", FP8, [("out", "in")]), scales, scaled_inputs)

    def sizes(self, module: str, leaves: Stored) -> Sizes:
        rows, columns = leaves["weight"].shape
        algorithm = self._algorithm(module)
        out, width = shape((rows, columns), algorithm)
        scales, sizes = leaves["weight_scale"].shape, {"out": out, "half out": rows, "in": width, "half in": columns}
        match algorithm:
            case "NVFP4" | "W4A16_NVFP4" | "NVFP4_AWQ":
                return {**sizes, "groups": width // _NVFP4_GROUP}
            case "W4A16_AWQ" | "W4A8_AWQ":
                sizes["groups"] = scales[1]
            case "FP8_PB_WO":
                sizes |= {"block rows": scales[0], "block columns": scales[2 if len(scales) == 4 else 1]}
        for name, axis in (("groups", width), ("block rows", out), ("block columns", width)):
            if name in sizes and (sizes[name] < 1 or axis % sizes[name]):
                raise ConfigError(f"'weight_scale' has the shape {list(scales)}, which does not divide {[out, width]}")
        return sizes

    def decode(self, module: str, arrays: Arrays) -> DecodedWeight | FloatArray:
        return decode(arrays, self._algorithm(module))

    def activations_of(self, module: str) -> InputScheme | None:
        return _FP8.get(self._algorithm(module))

    def _algorithm(self, module: str) -> str:
        """Return the layer's quant_algo; ValueError for one that MIXED_PRECISION does not list."""
        if self.quant_algo != MIXED:
            return self.quant_algo
        exact = self.quantized_layers.get(module)
        found = exact or next((row for name, row in self.quantized_layers.items() if fnmatchcase(module, name)), None)
        if found is None:
            raise ValueError("is quantized, but quantized_layers does not name it")
        return found.quant_algo


def decode(tensors: Tensors, algorithm: str) -> DecodedWeight | FloatArray:
    """Return the weight of one layer from its leaves; as floats if its input is scaled per column.

    ValueError when the tensors contradict one another.
    """
    weight = _codes_and_scales(tensors, algorithm)
    scale = tensors.get("pre_quant_scale")
    if scale is None or (scale == 1).all():
        return weight
    if scale.shape != (weight.codes.shape[1],):
        raise ValueError(f"pre_quant_scale {list(scale.shape)} does not fit a weight of {list(weight.codes.shape)}")
    return weight.dequantize() * scale.astype(np.float32)


def shape(stored: tuple[int, int], algorithm: str) -> tuple[int, int]:
    """Return [out, in] of a weight that is stored in the given shape."""
    rows, columns = stored
    if algorithm in _PACKED_ROWS:
        return rows * 2, columns
    return (rows, columns * 2) if algorithm in _NVFP4 else (rows, columns)


def _codes_and_scales(tensors: Tensors, algorithm: str) -> DecodedWeight:
    stored, scales = tensors["weight"], tensors["weight_scale"]
    if algorithm in _NVFP4:
        second = tensors["weight_scale_2"].astype(np.float32).reshape(())
        return _grouped(from_e2m1(unpack_nibbles(stored)), from_e4m3(scales) * second, 4)
    if algorithm in _PACKED_ROWS:
        return _grouped(_packed_rows(stored), scales.astype(np.float32), 4)
    return _fp8(from_e4m3(stored), scales.astype(np.float32))


def _packed_rows(stored: NDArray[np.uint8]) -> NDArray[np.int8]:
    """[out / 2, in] bytes -> [out, in] codes from -8 to 7."""
    halves = np.stack([stored & np.uint8(15), stored >> np.uint8(4)], axis=1).reshape(-1, stored.shape[1])
    return (halves ^ np.uint8(8)).astype(np.int8) - np.int8(8)


def _grouped(codes: NDArray[Any], scales: FloatArray, bits: int) -> DecodedWeight:
    rows, columns = codes.shape
    if scales.ndim != 2 or scales.shape[0] != rows or not scales.shape[1] or columns % scales.shape[1]:
        raise ValueError(f"weight_scale {list(scales.shape)} does not fit a weight of {[rows, columns]}")
    return DecodedWeight(codes, np.ascontiguousarray(scales), columns // scales.shape[1], bits=bits)


def _fp8(codes: FloatArray, scales: FloatArray) -> DecodedWeight:
    rows, columns = codes.shape
    if scales.size == 1:
        return DecodedWeight(codes, np.full((rows, 1), scales.reshape(-1)[0], np.float32), columns, bits=8)
    if scales.ndim == 1:
        return _grouped(codes, scales.reshape(-1, 1), bits=8)
    blocks = scales[:, 0, :, 0] if scales.ndim == 4 else scales
    if blocks.ndim != 2 or not blocks.size or rows % blocks.shape[0]:
        raise ValueError(f"weight_scale {list(scales.shape)} does not fit a weight of {[rows, columns]}")
    return _grouped(codes, np.repeat(blocks, rows // blocks.shape[0], axis=0), bits=8)
