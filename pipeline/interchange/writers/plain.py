"""Weights as floats of a chosen type, refused where a number would change.

Exports in safetensors: GPTQ, AWQ, compressed-tensors, and plain floats; one function per format.

A function checks that its format holds every weight as it is (UsageError says what does not fit, and what would), and
returns the tensors to write and what config.json says of them. Layers are encoded one at a time, when they are written.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.passes.weights import apply_to_array
from ingot.pipeline.interchange.folder import AS_IT_IS, Export, WriteOptions, as_floats, lazy_tensor
from ingot.pipeline.interchange.layers import QuantizedLayer, Weight
from ingot.pipeline.interchange.writers.awq import export_awq
from ingot.pipeline.interchange.writers.compressed_tensors import export_compressed_tensors
from ingot.pipeline.interchange.writers.gptq import export_gptq
from ingot.pipeline.interchange.writers.refusals import SchemeError, inputs_left_out, quantized_layers

FLOATS = {"float32": ir.DataType.FLOAT, "float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}
_FLOAT_TYPES = frozenset(FLOATS.values())


def in_floats(weight: Weight, options: WriteOptions) -> ir.TensorProtocol:
    """The weight in options.dtype, or as it is (float32 where it is quantized).

    Reads it once where the type is a narrower one: SchemeError when a number would change and options do not allow it.
    """
    tensor = (as_floats(weight) if isinstance(weight, QuantizedLayer) else weight).tensor
    dtype = options.dtype
    if dtype is None or tensor.dtype == dtype or tensor.dtype not in _FLOAT_TYPES:
        return tensor
    if dtype != ir.DataType.FLOAT:
        _require_exact(weight, tensor, dtype, options)
    shape = tuple(tensor.shape.numpy())
    return lazy_tensor(weight.name, dtype, shape, partial(_converted, tensor, dtype))


def _require_exact(weight: Weight, tensor: ir.TensorProtocol, dtype: ir.DataType, options: WriteOptions) -> None:
    finite, same = apply_to_array(tensor, partial(_fits, dtype=dtype))
    wanted = next(name for name, kind in FLOATS.items() if kind == dtype)
    if not finite:
        raise SchemeError(f"{weight.name} holds numbers beyond {wanted}'s largest; write float32 or bfloat16")
    if not (same or options.lossy):
        scheme = weight.scheme if isinstance(weight, QuantizedLayer) else tensor.dtype.name.lower()
        raise SchemeError(
            f"{weight.name} ({scheme}) holds numbers that {wanted} rounds; write float32, or round them with --lossy"
        )


def _fits(values: NDArray[np.generic], dtype: ir.DataType) -> tuple[bool, bool]:
    """Whether all numbers stay finite, and whether they stay the same."""
    wide = values.astype(np.float32)
    with np.errstate(over="ignore"):
        again = wide.astype(dtype.numpy()).astype(np.float32)
    return bool(np.isfinite(again).all()), bool(np.array_equal(again, wide))


def _converted(tensor: ir.TensorProtocol, dtype: ir.DataType) -> NDArray[np.generic]:
    return apply_to_array(tensor, lambda values: values.astype(np.float32).astype(dtype.numpy()))


__all__ = ["Export", "export_awq", "export_compressed_tensors", "export_gptq", "export_plain"]


def export_plain(weights: Sequence[Weight], options: WriteOptions = AS_IT_IS) -> Export:
    """Every weight as floats: quantized ones as the float32 that their codes stand for, or in options.dtype."""
    notes = inputs_left_out("safetensors", quantized_layers(weights))
    return Export([(weight.name, in_floats(weight, options)) for weight in weights], None, notes)
