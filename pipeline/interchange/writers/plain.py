"""Plain safetensors: every weight as floats. A number that the chosen type would change is refused."""

from functools import partial

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.passes.weights import apply_to_array
from ingot.pipeline.interchange.folder import FLOAT_TYPES, SafetensorsFiles, Source, WriteOptions, config_of
from ingot.pipeline.interchange.layers import QuantizedLayer, Weight, lazy_tensor
from ingot.pipeline.interchange.writers.refusals import SchemeError, inputs_left_out, quantized_layers


def plan(source: Source, options: WriteOptions) -> SafetensorsFiles:
    """Write every weight in options.dtype; without one, plain weights keep their type and layers become float32."""
    notes = inputs_left_out("safetensors", quantized_layers(source.weights))
    tensors = [(weight.name, _in_floats(weight, options)) for weight in source.weights]
    return SafetensorsFiles(notes, tensors, config_of(source, options))


def _in_floats(weight: Weight, options: WriteOptions) -> ir.TensorProtocol:
    """Return the weight as floats; a conversion to a narrower type reads it once, to see what the type rounds."""
    tensor = (weight.as_floats() if isinstance(weight, QuantizedLayer) else weight).tensor
    dtype = options.dtype
    if dtype is None or tensor.dtype == dtype or tensor.dtype not in FLOAT_TYPES.values():
        return tensor
    if dtype != ir.DataType.FLOAT:
        _require_exact(weight, tensor, dtype, options)
    shape = tuple(tensor.shape.numpy())
    return lazy_tensor(weight.name, dtype, shape, partial(_converted, tensor, dtype))


def _require_exact(weight: Weight, tensor: ir.TensorProtocol, dtype: ir.DataType, options: WriteOptions) -> None:
    finite, same = apply_to_array(tensor, partial(_fits, dtype=dtype))
    chosen = next(name for name, kind in FLOAT_TYPES.items() if kind == dtype)
    if not finite:
        raise SchemeError(f"{weight.name} holds numbers beyond {chosen}'s largest; write float32 or bfloat16")
    if not (same or options.lossy):
        scheme = weight.scheme if isinstance(weight, QuantizedLayer) else tensor.dtype.name.lower()
        raise SchemeError(
            f"{weight.name} ({scheme}) holds numbers that {chosen} rounds; write float32, or round them with --lossy"
        )


def _fits(values: NDArray[np.generic], dtype: ir.DataType) -> tuple[bool, bool]:
    """Return whether all numbers stay finite, and whether they stay the same."""
    wide = values.astype(np.float32)
    with np.errstate(over="ignore"):
        again = wide.astype(dtype.numpy()).astype(np.float32)
    return bool(np.isfinite(again).all()), bool(np.array_equal(again, wide))


def _converted(tensor: ir.TensorProtocol, dtype: ir.DataType) -> NDArray[np.generic]:
    return apply_to_array(tensor, lambda values: values.astype(np.float32).astype(dtype.numpy()))
