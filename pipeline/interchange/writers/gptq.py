"""Writing GPTQ: which bits, groups and version hold a model, and its tensors. (Layout: gptq.py)"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from ingot.pipeline.checkpoint.formats import gptq
from ingot.pipeline.checkpoint.formats.codes import WORD_BITS, num_words
from ingot.pipeline.checkpoint.formats.exact_forms import Zeros, regrouped, unsigned
from ingot.pipeline.checkpoint.tensors import HEAD
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
    tables_as_floats,
)

_ZEROS: dict[int, Zeros] = {1: "from one", 2: "from zero"}
_VERSION_NAMES = {1: "gptq", 2: "gptq_v2"}


@dataclass(frozen=True)
class _Form:
    """The one scheme of a checkpoint. group_size 0: whole rows."""

    bits: int
    version: int
    group_size: int
    symmetric: bool

    def encode(self, layer: QuantizedLayer) -> Mapping[str, NDArray[Any]]:
        whole = regrouped(layer.integers(), self.group_size or layer.shape[1])
        made = unsigned(whole, self.bits, "middle" if self.symmetric else _ZEROS[self.version])
        return gptq.encode(made, self.bits, self.version)

    def layout(self, layer: QuantizedLayer) -> Layout:
        rows, columns = layer.shape
        groups = columns // (self.group_size or columns)
        return {
            "qweight": (ir.DataType.INT32, (num_words(columns, self.bits), rows)),
            "qzeros": (ir.DataType.INT32, (groups, num_words(rows, self.bits))),
            "scales": (ir.DataType.FLOAT16, (groups, rows)),
            "g_idx": (ir.DataType.INT32, (columns,)),
        }

    def change(self, layer: QuantizedLayer) -> str:
        if layer.facts.bits != self.bits:
            return f"{layer.facts.bits} bits stand in codes of {self.bits}"
        if layer.facts.group_size != (self.group_size or layer.shape[1]):
            return f"scales of groups of {layer.facts.group_size} repeat for groups of {self.group_size}"
        return ""


def export_gptq(weights: Sequence[Weight], options: WriteOptions = AS_IT_IS, version: int | None = None) -> Export:
    """2, 3, 4, 8 bits, one scheme, every layer but the head, act-order too.

    version    1 or 2; None: 1 for symmetric weights, which every package loads; for others 2, since gptqmodel loads
               asymmetric ones of version 1 from itself alone and others read their zero points each in its own way
    """
    weights, notes = tables_as_floats("gptq", weights, options)
    layers = quantized_layers(weights)
    require_layers("gptq", layers)
    require_integers("gptq", layers)
    require_one_scheme("gptq", layers, options)
    left = [module for module in plain_linear_modules(weights) if f"{module}.weight" != HEAD]
    if left:
        raise SchemeError(
            f"gptq quantizes every linear layer, but {left[0]} is in floats; export to compressed-tensors"
        )
    form = _form(layers, (version,) if version else (2, 1))
    for layer in layers:
        # 32 codes of 3 bits fill 3 words; of 2, 4, 8 bits, 32 / bits fill one.
        require_multiple("gptq", layer, 0, WORD_BITS if form.bits == 3 else WORD_BITS // form.bits)
        require_multiple("gptq", layer, 1, WORD_BITS)
    require_float16_scales("gptq", layers, options)
    tensors = layer_tensors(weights, form.layout, form.encode)
    return Export(
        tensors,
        _quantization(form, layers),
        [*notes, *changed_forms(layers, form.change), *inputs_left_out("gptq", layers)],
    )


def _form(layers: Sequence[QuantizedLayer], versions: Sequence[int]) -> _Form:
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
    return _Form(bits, min(versions) if symmetric else version, common_group("gptq", layers), symmetric)


def _bits(layers: Sequence[QuantizedLayer], zeros: Zeros) -> int | None:
    found = [layer.facts.code_bits(zeros, gptq.BITS) for layer in layers]
    return None if None in found else max(bits for bits in found if bits is not None)


def _quantization(form: _Form, layers: Sequence[QuantizedLayer]) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": form.bits,
        "group_size": form.group_size or -1,
        "desc_act": any(layer.facts.act_order for layer in layers),
        "sym": form.symmetric,
        "lm_head": False,
        "checkpoint_format": _VERSION_NAMES[form.version],
    }
