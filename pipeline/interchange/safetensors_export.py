"""Exports in safetensors: GPTQ, AWQ, compressed-tensors, and plain floats; one function per format.

A function checks that its format holds every weight as it is (UsageError says what does not fit, and what would), and
returns the tensors to write and what config.json says of them. Layers are encoded one at a time, when they are written.
"""

from collections.abc import Sequence

from ingot.pipeline.interchange.awq_export import export_awq
from ingot.pipeline.interchange.compressed_export import export_compressed_tensors
from ingot.pipeline.interchange.format_writer import AS_IT_IS, Export, WriteOptions
from ingot.pipeline.interchange.gptq_export import export_gptq
from ingot.pipeline.interchange.layers import ExportedWeight
from ingot.pipeline.interchange.plain_export import in_floats
from ingot.pipeline.interchange.refusals import inputs_left_out, quantized_layers

__all__ = ["Export", "export_awq", "export_compressed_tensors", "export_gptq", "export_plain"]


def export_plain(weights: Sequence[ExportedWeight], options: WriteOptions = AS_IT_IS) -> Export:
    """Every weight as floats: quantized ones as the float32 that their codes stand for, or in options.dtype."""
    notes = inputs_left_out("safetensors", quantized_layers(weights))
    return Export([(weight.name, in_floats(weight, options)) for weight in weights], None, notes)
