"""Writing AWQ in the gemm layout: 4 bits, one group size, layers in floats listed as not converted. (Layout: awq.py)"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from ingot.pipeline.checkpoint.formats import awq
from ingot.pipeline.checkpoint.formats.exact_forms import regrouped, unsigned
from ingot.pipeline.interchange.folder import AS_IT_IS, Export, Layout, WriteOptions, layer_tensors
from ingot.pipeline.interchange.layers import QuantizedLayer, Weight
from ingot.pipeline.interchange.writers.refusals import (
    SchemeError,
    changed_forms,
    common_group,
    inputs_left_out,
    plain_linear_modules,
    quantized_layers,
    require_float16_scales,
    require_integers,
    require_layers,
    require_multiple,
    require_one_scheme,
    require_plain_order,
    tables_as_floats,
)


@dataclass(frozen=True)
class _Form:
    """group_size 0: whole rows."""

    group_size: int

    def encode(self, layer: QuantizedLayer) -> Mapping[str, NDArray[Any]]:
        whole = regrouped(layer.integers(), self.group_size or layer.shape[1])
        return awq.encode(unsigned(whole, awq.BITS, "from zero"))

    def layout(self, layer: QuantizedLayer) -> Layout:
        rows, columns = layer.shape
        groups = columns // (self.group_size or columns)
        return {
            "qweight": (ir.DataType.INT32, (columns, rows // len(awq.ORDER))),
            "qzeros": (ir.DataType.INT32, (groups, rows // len(awq.ORDER))),
            "scales": (ir.DataType.FLOAT16, (groups, rows)),
        }

    def change(self, layer: QuantizedLayer) -> str:
        if layer.facts.bits != awq.BITS:
            return f"{layer.facts.bits} bits stand in codes of {awq.BITS}"
        if layer.facts.group_size != (self.group_size or layer.shape[1]):
            return f"scales of groups of {layer.facts.group_size} repeat for groups of {self.group_size}"
        return ""


def export_awq(weights: Sequence[Weight], options: WriteOptions = AS_IT_IS) -> Export:
    """4 bits in the gemm layout, one group size; SchemeError says what does not fit."""
    weights, notes = tables_as_floats("awq", weights, options)
    layers = quantized_layers(weights)
    require_layers("awq", layers)
    require_integers("awq", layers)
    require_plain_order("awq", layers)
    for layer in layers:
        needed = layer.facts.bits_for["from zero"]
        if needed is None or needed > awq.BITS or not (layer.facts.bits == awq.BITS or options.widen):
            raise SchemeError(
                f"awq holds 4 bits alone, but {layer.module} has {layer.scheme}; set bits to 4, or export to gptq"
            )
    require_one_scheme("awq", layers, options)
    form = _Form(common_group("awq", layers))
    for layer in layers:
        require_multiple("awq", layer, 0, len(awq.ORDER))
    require_float16_scales("awq", layers, options)
    quantization = {
        "quant_method": "awq",
        "bits": awq.BITS,
        "group_size": form.group_size or -1,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": plain_linear_modules(weights) or None,
    }
    tensors = layer_tensors(weights, form.layout, form.encode)
    return Export(tensors, quantization, [*notes, *changed_forms(layers, form.change), *inputs_left_out("awq", layers)])
