"""AWQ in the gemm layout: 4 bits, one group size, some layers in floats. Layout: checkpoint/formats/awq.py."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from ingot.pipeline.checkpoint.formats import awq
from ingot.pipeline.checkpoint.formats.exact_forms import unsigned
from ingot.pipeline.interchange.folder import (
    Layout,
    SafetensorsFiles,
    Source,
    WriteOptions,
    config_of,
    layer_tensors,
)
from ingot.pipeline.interchange.layers import QuantizedLayer
from ingot.pipeline.interchange.writers.one_scheme import (
    OneScheme,
    common_group,
    require_integers,
    require_multiple,
    require_same_scheme,
)
from ingot.pipeline.interchange.writers.refusals import (
    SchemeError,
    change_notes,
    inputs_left_out,
    plain_linear_modules,
    quantized_layers,
    require_float16_scales,
    require_layers,
    require_plain_order,
    tables_as_floats,
)


def plan(source: Source, options: WriteOptions) -> SafetensorsFiles:
    """Write quantized layers with 4 bits; config.json lists the linear layers that stay in floats."""
    weights, notes = tables_as_floats("awq", source.weights, options)
    layers = quantized_layers(weights)
    require_layers("awq", layers)
    require_integers("awq", layers)
    require_plain_order("awq", layers)
    _require_four_bits(layers, options)
    require_same_scheme("awq", layers, options)
    scheme = _Scheme(awq.BITS, common_group("awq", layers))
    for layer in layers:
        require_multiple("awq", layer, 0, len(awq.ORDER))
    require_float16_scales("awq", layers, options)
    quantization = {
        "quant_method": "awq",
        "bits": awq.BITS,
        "group_size": scheme.group_size or -1,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": plain_linear_modules(weights) or None,
    }
    return SafetensorsFiles(
        [*notes, *change_notes(layers, scheme.change), *inputs_left_out("awq", layers)],
        layer_tensors(weights, scheme.layout, scheme.encode),
        config_of(source, options, quantization),
    )


@dataclass(frozen=True)
class _Scheme(OneScheme):
    def encode(self, layer: QuantizedLayer) -> Mapping[str, NDArray[Any]]:
        return awq.encode(unsigned(self.integers(layer), self.bits, "from zero"))

    def layout(self, layer: QuantizedLayer) -> Layout:
        rows, columns = layer.shape
        groups, words = self.num_groups(layer), rows // len(awq.ORDER)
        return {
            "qweight": (ir.DataType.INT32, (columns, words)),
            "qzeros": (ir.DataType.INT32, (groups, words)),
            "scales": (ir.DataType.FLOAT16, (groups, rows)),
        }


def _require_four_bits(layers: Sequence[QuantizedLayer], options: WriteOptions) -> None:
    for layer in layers:
        needed = layer.facts.bits_for["from zero"]
        if needed is None or needed > awq.BITS or not (layer.facts.bits == awq.BITS or options.widen):
            raise SchemeError(
                f"awq holds only 4 bits, but {layer.module} has {layer.scheme}; set bits to 4, or export to gptq"
            )
