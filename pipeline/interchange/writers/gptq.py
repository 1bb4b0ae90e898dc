"""GPTQ: one scheme of 2, 3, 4 or 8 bits for every linear layer but the head. Layout: checkpoint/formats/gptq.py."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from ingot.pipeline.checkpoint.formats import gptq
from ingot.pipeline.checkpoint.formats.codes import WORD_BITS, num_words
from ingot.pipeline.checkpoint.formats.exact_forms import Zeros, unsigned
from ingot.pipeline.checkpoint.formats.quantized_folder import SIDE_FILE
from ingot.pipeline.checkpoint.tensors import HEAD
from ingot.pipeline.interchange.folder import (
    Layout,
    SafetensorsFiles,
    Source,
    WriteOptions,
    config_of,
    layer_tensors,
)
from ingot.pipeline.interchange.layers import QuantizedLayer, Weight
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
    tables_as_floats,
)

_ZEROS: dict[int, Zeros] = {1: "from one", 2: "from zero"}
_VERSION_NAMES = {1: "gptq", 2: "gptq_v2"}


def plan(source: Source, options: WriteOptions, version: int | None = None) -> SafetensorsFiles:
    """Write every layer but the head, in activation order too.

    version    1 or 2. None: 1 for symmetric weights, which every package loads; 2 for others, because gptqmodel loads
               asymmetric weights of version 1 only from itself, and packages read their zero points differently
    """
    weights, notes = tables_as_floats("gptq", source.weights, options)
    layers = quantized_layers(weights)
    require_layers("gptq", layers)
    require_integers("gptq", layers)
    require_same_scheme("gptq", layers, options)
    _require_every_layer(weights)
    scheme = _scheme(layers, (version,) if version else (2, 1))
    for layer in layers:
        # 32 codes of 3 bits fill 3 words; of 2, 4, 8 bits, 32 / bits fill one.
        require_multiple("gptq", layer, 0, WORD_BITS if scheme.bits == 3 else WORD_BITS // scheme.bits)
        require_multiple("gptq", layer, 1, WORD_BITS)
    require_float16_scales("gptq", layers, options)
    return SafetensorsFiles(
        [*notes, *change_notes(layers, scheme.change), *inputs_left_out("gptq", layers)],
        layer_tensors(weights, scheme.layout, scheme.encode),
        config_of(source, options, scheme.quantization(layers)),
        SIDE_FILE,
    )


@dataclass(frozen=True)
class _Scheme(OneScheme):
    version: int
    symmetric: bool

    def encode(self, layer: QuantizedLayer) -> Mapping[str, NDArray[Any]]:
        zeros = "middle" if self.symmetric else _ZEROS[self.version]
        return gptq.encode(unsigned(self.integers(layer), self.bits, zeros), self.bits, self.version)

    def layout(self, layer: QuantizedLayer) -> Layout:
        rows, columns = layer.shape
        groups = self.num_groups(layer)
        return {
            "qweight": (ir.DataType.INT32, (num_words(columns, self.bits), rows)),
            "qzeros": (ir.DataType.INT32, (groups, num_words(rows, self.bits))),
            "scales": (ir.DataType.FLOAT16, (groups, rows)),
            "g_idx": (ir.DataType.INT32, (columns,)),
        }

    def quantization(self, layers: Sequence[QuantizedLayer]) -> dict[str, Any]:
        return {
            "quant_method": "gptq",
            "bits": self.bits,
            "group_size": self.group_size or -1,
            "desc_act": any(layer.facts.act_order for layer in layers),
            "sym": self.symmetric,
            "lm_head": False,
            "checkpoint_format": _VERSION_NAMES[self.version],
        }


def _require_every_layer(weights: Sequence[Weight]) -> None:
    left = [module for module in plain_linear_modules(weights) if f"{module}.weight" != HEAD]
    if left:
        raise SchemeError(
            f"gptq quantizes every linear layer, but {left[0]} is in floats; export to compressed-tensors"
        )


def _scheme(layers: Sequence[QuantizedLayer], versions: Sequence[int]) -> _Scheme:
    """Return the narrowest scheme of the versions that holds all layers, symmetric where that needs no more bits."""
    found = [(bits, version) for version in versions if (bits := _bits(layers, _ZEROS[version])) is not None]
    if not found:
        worst = next(layer for layer in layers if layer.facts.code_bits(_ZEROS[versions[-1]], gptq.BITS) is None)
        raise SchemeError(
            f"gptq {' and '.join(_VERSION_NAMES[version] for version in versions)} holds 2, 3, 4 and 8 bits, but "
            f"{worst.module} has {worst.scheme}, whose codes and zero points take more"
        )
    bits, version = min(found, key=lambda form: form[0])
    middle = _bits(layers, "middle")
    symmetric = middle is not None and middle <= bits
    return _Scheme(bits, common_group("gptq", layers), min(versions) if symmetric else version, symmetric)


def _bits(layers: Sequence[QuantizedLayer], zeros: Zeros) -> int | None:
    found = [layer.facts.code_bits(zeros, gptq.BITS) for layer in layers]
    return None if None in found else max(bits for bits in found if bits is not None)
