"""Exports in safetensors: GPTQ, AWQ, compressed-tensors, and plain floats; one function per format.

A function checks that its format holds every weight as it is (UsageError says what does not fit, and what would), and
returns the tensors to write and what config.json says of them. Layers are encoded one at a time, when they are written.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.errors import UsageError
from ingot.pipeline.formats import awq, compressed_tensors, gptq
from ingot.pipeline.formats.bits import WORD_BITS, num_words
from ingot.pipeline.formats.exported import ExportedWeight, PlainWeight, QuantizedLayer
from ingot.pipeline.formats.refusals import (
    plain_linear_modules,
    quantized_layers,
    require_float16_scales,
    require_linear_layers_only,
    require_multiple,
    require_one_scheme,
)
from ingot.pipeline.tensors import HEAD

NamedTensor = tuple[str, ir.TensorProtocol]
Layout = Mapping[str, tuple[ir.DataType, tuple[int, ...]]]
Encoder = Callable[[QuantizedLayer], Mapping[str, NDArray[Any]]]


@dataclass(frozen=True)
class Export:
    """tensors by name, and config.json's quantization_config (None: no quantized tensor)."""

    tensors: Sequence[NamedTensor]
    quantization: Mapping[str, Any] | None


def export_plain(weights: Sequence[ExportedWeight]) -> Export:
    """Every weight as floats: quantized ones as the float32 that their codes stand for."""
    return Export([(weight.name, _floats(weight)) for weight in weights], None)


def export_gptq(weights: Sequence[ExportedWeight]) -> Export:
    """4 or 8 bits, one scheme, every layer but the head; version 2 where a zero point is 0, which 1 cannot store."""
    layers = quantized_layers(weights)
    require_linear_layers_only("gptq", layers)
    first = require_one_scheme("gptq", layers)
    left = [module for module in plain_linear_modules(weights) if f"{module}.weight" != HEAD]
    if left:
        raise UsageError(f"gptq quantizes every linear layer, but {left[0]} is in floats; export to compressed-tensors")
    for layer in layers:
        require_multiple("gptq", layer, 0, WORD_BITS // layer.bits)
        require_multiple("gptq", layer, 1, max(layer.block_size, WORD_BITS))
    require_float16_scales("gptq", layers)
    version = 2 if any(layer.zero_points is not None and not layer.zero_points.all() for layer in layers) else 1
    quantization = {
        "quant_method": "gptq",
        "bits": first.bits,
        "group_size": first.block_size or -1,
        "desc_act": False,
        "sym": first.symmetric,
        "lm_head": False,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }
    tensors = _tensors(weights, _gptq_layout, lambda layer: gptq.encode(layer.unsigned(), layer.bits, version))
    return Export(tensors, quantization)


def export_awq(weights: Sequence[ExportedWeight]) -> Export:
    """4 bits in the gemm layout, one block size; layers in floats are listed as not converted."""
    layers = quantized_layers(weights)
    require_linear_layers_only("awq", layers)
    for layer in layers:
        if layer.bits != awq.BITS:
            raise UsageError(
                f"awq holds 4 bits alone, but {layer.module} has {layer.scheme}; set bits to 4, or export to gptq"
            )
    first = require_one_scheme("awq", layers)
    for layer in layers:
        require_multiple("awq", layer, 0, len(awq.ORDER))
        require_multiple("awq", layer, 1, layer.block_size or 1)
    require_float16_scales("awq", layers)
    quantization = {
        "quant_method": "awq",
        "bits": awq.BITS,
        "group_size": first.block_size or -1,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": plain_linear_modules(weights) or None,
    }
    return Export(_tensors(weights, _awq_layout, lambda layer: awq.encode(layer.unsigned())), quantization)


def export_compressed_tensors(weights: Sequence[ExportedWeight]) -> Export:
    """pack-quantized, 4 or 8 bits; every scheme of the model is a config group of its own."""
    layers = quantized_layers(weights)
    if not layers:
        raise UsageError("compressed-tensors holds quantized layers, but nothing is quantized; add quantize-weights")
    require_linear_layers_only("compressed-tensors", [layer for layer in layers if layer.name != HEAD])
    for layer in layers:
        require_multiple("compressed-tensors", layer, 1, layer.block_size or 1)
    schemes: dict[str, list[QuantizedLayer]] = {}
    for layer in layers:
        schemes.setdefault(layer.scheme, []).append(layer)
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{index}": _config_group(group, only=len(schemes) == 1)
            for index, group in enumerate(schemes.values())
        },
        "ignore": plain_linear_modules(weights),
    }
    tensors = _tensors(weights, _compressed_layout, lambda layer: compressed_tensors.encode(layer.signed(), layer.bits))
    return Export(tensors, quantization)


def _config_group(layers: Sequence[QuantizedLayer], only: bool) -> dict[str, Any]:
    first = layers[0]
    return {
        "format": "pack-quantized",
        "targets": ["Linear"] if only else [f"re:^{re.escape(layer.module)}$" for layer in layers],
        "weights": {
            "num_bits": first.bits,
            "type": "int",
            "symmetric": first.symmetric,
            "strategy": "group" if first.block_size else "channel",
            "group_size": first.block_size or None,
            "dynamic": False,
        },
        "input_activations": None,
        "output_activations": None,
    }


def _gptq_layout(layer: QuantizedLayer) -> Layout:
    (rows, columns), groups = layer.shape, layer.scales.shape[1]
    return {
        "qweight": (ir.DataType.INT32, (columns * layer.bits // WORD_BITS, rows)),
        "qzeros": (ir.DataType.INT32, (groups, rows * layer.bits // WORD_BITS)),
        "scales": (ir.DataType.FLOAT16, (groups, rows)),
        "g_idx": (ir.DataType.INT32, (columns,)),
    }


def _awq_layout(layer: QuantizedLayer) -> Layout:
    (rows, columns), groups = layer.shape, layer.scales.shape[1]
    return {
        "qweight": (ir.DataType.INT32, (columns, rows // len(awq.ORDER))),
        "qzeros": (ir.DataType.INT32, (groups, rows // len(awq.ORDER))),
        "scales": (ir.DataType.FLOAT16, (groups, rows)),
    }


def _compressed_layout(layer: QuantizedLayer) -> Layout:
    (rows, columns), groups = layer.shape, layer.scales.shape[1]
    layout = {
        "weight_packed": (ir.DataType.INT32, (rows, num_words(columns, layer.bits))),
        "weight_scale": (ir.DataType.FLOAT, (rows, groups)),
        "weight_shape": (ir.DataType.INT64, (2,)),
    }
    if not layer.symmetric:
        layout["weight_zero_point"] = (ir.DataType.INT32, (num_words(rows, layer.bits), groups))
    return layout


def _tensors(
    weights: Sequence[ExportedWeight], layout: Callable[[QuantizedLayer], Layout], encode: Encoder
) -> list[NamedTensor]:
    """Plain tensors as they are; layers as lazy tensors by their leaf names, encoded once for all their leaves."""
    by_name = {layer.name: layer for layer in quantized_layers(weights)}

    @lru_cache(maxsize=1)
    def encoded(name: str) -> Mapping[str, NDArray[Any]]:
        return encode(by_name[name])

    def leaf_of(name: str, leaf: str) -> NDArray[Any]:
        return encoded(name)[leaf]

    found: list[NamedTensor] = []
    for weight in weights:
        if isinstance(weight, PlainWeight):
            found.append((weight.name, weight.tensor))
            continue
        for leaf, (dtype, shape) in layout(weight).items():
            name = f"{weight.module}.{leaf}"
            found.append((name, _lazy(name, dtype, shape, partial(leaf_of, weight.name, leaf))))
    return found


def _floats(weight: ExportedWeight) -> ir.TensorProtocol:
    if isinstance(weight, PlainWeight):
        return weight.tensor
    return _lazy(weight.name, ir.DataType.FLOAT, weight.shape, lambda: weight.signed().dequantize())


def _lazy(name: str, dtype: ir.DataType, shape: tuple[int, ...], make: Callable[[], NDArray[Any]]) -> ir.LazyTensor:
    return ir.LazyTensor(lambda: ir.Tensor(np.ascontiguousarray(make())), dtype, ir.Shape(shape), name=name)
