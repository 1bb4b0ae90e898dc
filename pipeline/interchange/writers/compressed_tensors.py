"""Writing compressed-tensors: every layer in the storage format of its scheme. (Layouts: compressed_tensors.py)

integers                               pack-quantized, 2 to 8 bits, g_idx too
8-bit integers, quantized inputs       int-quantized
fp8                                    float-quantized
fp4                                    as it lies in a compressed-tensors checkpoint, untouched
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from ingot.pipeline.checkpoint.formats import compressed_tensors
from ingot.pipeline.checkpoint.formats.activations import ActivationScheme
from ingot.pipeline.checkpoint.formats.codes import num_words
from ingot.pipeline.checkpoint.formats.exact_forms import Zeros, regrouped, signed
from ingot.pipeline.checkpoint.tensors import EMBEDDING
from ingot.pipeline.interchange.folder import AS_IT_IS, Export, Layout, WriteOptions, layer_tensors, stored_tensor
from ingot.pipeline.interchange.layers import QuantizedLayer, Weight
from ingot.pipeline.interchange.writers.refusals import (
    LEAST_GROUP,
    SchemeError,
    changed_forms,
    layers_as_floats,
    plain_linear_modules,
    quantized_layers,
    require_layers,
    tables_as_floats,
    whole_group,
)

_FP4 = {"nvfp4-pack-quantized": ("tensor_group", 16), "mxfp4-pack-quantized": ("group", 32)}


@dataclass(frozen=True)
class _Form:
    """How one layer is stored; layers of equal forms share a config group. group_size is None without groups."""

    storage: str
    bits: int
    kind: str
    zeros: Zeros
    strategy: str
    group_size: int | None
    act_order: bool
    activations: ActivationScheme | None

    def config(self, targets: Sequence[str]) -> dict[str, Any]:
        weights = {
            "num_bits": self.bits,
            "type": self.kind,
            "symmetric": self.zeros == "middle",
            "strategy": self.strategy,
            "group_size": None if self.strategy == "block" else self.group_size,
            "block_structure": [self.group_size, self.group_size] if self.strategy == "block" else None,
            "actorder": "group" if self.act_order else None,
            "dynamic": False,
        }
        return {
            "format": self.storage,
            "targets": list(targets),
            "weights": weights,
            "input_activations": self.activations.config() if self.activations else None,
            "output_activations": None,
        }


def export_compressed_tensors(
    weights: Sequence[Weight],
    options: WriteOptions = AS_IT_IS,
    kv_cache: Mapping[str, Any] | None = None,
) -> Export:
    """A scheme per layer, the head too; SchemeError says what does not fit.

    kv_cache    the model's kv_cache_scheme, whose k_scale and v_scale are among the weights
    """
    weights, notes = tables_as_floats("compressed-tensors", weights, options, (EMBEDDING,))
    if options.floats:
        weights, more = layers_as_floats("compressed-tensors", weights, _form)
        notes += more
    layers = quantized_layers(weights)
    require_layers("compressed-tensors", layers)
    forms = {layer.name: _form(layer) for layer in layers}
    storages = {form.storage for form in forms.values()}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": storages.pop() if len(storages) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": _config_groups(layers, forms),
        "ignore": plain_linear_modules(weights),
        "kv_cache_scheme": dict(kv_cache) if kv_cache else None,
    }
    tensors = layer_tensors(
        weights,
        lambda layer: _layout(layer, forms[layer.name]),
        lambda layer: _encode(layer, forms[layer.name]),
    )
    changes = changed_forms(layers, lambda layer: _change(layer, forms))
    return Export(tensors, quantization, [*notes, *changes])


def _form(layer: QuantizedLayer) -> _Form:
    facts = layer.facts
    if layer.activations and layer.activations.outliers:
        raise SchemeError(
            f"compressed-tensors quantizes all of a layer's inputs, but {layer.module} keeps "
            f"{layer.activations.outliers} channels in floats; set outliers to 0 in quantize-activations"
        )
    if layer.storage in _FP4:
        strategy, group = _FP4[layer.storage]
        return _Form(layer.storage, 4, "float", "middle", strategy, group, False, layer.activations)
    if facts.kind == "float" and facts.bits == 8:
        return _Form("float-quantized", 8, "float", "middle", *_strategy(layer), False, layer.activations)
    if facts.not_integers:
        raise SchemeError(
            f"compressed-tensors holds integer codes with zero points and fp8, but {layer.module} has {layer.scheme}: "
            f"{facts.not_integers}"
        )
    bits, zeros = _bits(layer)
    if layer.activations and layer.activations.kind == "int" and bits == 8 and not facts.act_order:
        return _Form("int-quantized", bits, "int", zeros, *_strategy(layer), False, layer.activations)
    columns = _strategy(layer)[1]
    strategy = "channel" if columns is None else "group"
    return _Form("pack-quantized", bits, "int", zeros, strategy, columns, facts.act_order, layer.activations)


def _bits(layer: QuantizedLayer) -> tuple[int, Zeros]:
    """Symmetric where that takes no more bits."""
    middle, zero = layer.facts.code_bits("middle"), layer.facts.code_bits("from zero")
    if middle is not None and (zero is None or middle <= zero):
        return middle, "middle"
    if zero is None:
        raise SchemeError(
            f"compressed-tensors holds up to 8 bits, but {layer.module} has {layer.scheme}, whose codes and zero "
            "points take more"
        )
    return zero, "from zero"


def _strategy(layer: QuantizedLayer) -> tuple[str, int | None]:
    facts = layer.facts
    if facts.strategy in ("tensor", "channel"):
        return facts.strategy, None
    group = facts.group_size if facts.strategy == "block" else whole_group(layer)
    if group < LEAST_GROUP:
        raise SchemeError(
            f"compressed-tensors wants columns in multiples of a group, but {layer.module} {list(layer.shape)} has "
            f"{layer.scheme}; choose a block_size that divides them"
        )
    return facts.strategy, group


def _change(layer: QuantizedLayer, forms: Mapping[str, _Form]) -> str:
    form = forms[layer.name]
    if form.storage not in _FP4 and layer.facts.bits != form.bits:
        return f"{layer.facts.bits} bits stand in codes of {form.bits}"
    if form.group_size is not None and layer.facts.group_size != form.group_size:
        return f"scales of groups of {layer.facts.group_size} repeat for groups of {form.group_size}"
    if form.act_order:
        return "activation order (weight_g_idx), which compressed-tensors 0.19 and later refuse and older ones load"
    return ""


def _config_groups(layers: Sequence[QuantizedLayer], forms: Mapping[str, _Form]) -> dict[str, Any]:
    members: dict[_Form, list[str]] = {}
    for layer in layers:
        form = forms[layer.name]
        if form.activations:  # a scale of its own is a tensor, no scheme
            form = replace(form, activations=replace(form.activations, scale=None, zero_point=None))
        members.setdefault(form, []).append(layer.module)
    return {
        f"group_{index}": form.config(["Linear"] if len(members) == 1 else [f"re:^{re.escape(n)}$" for n in names])
        for index, (form, names) in enumerate(members.items())
    }


def _encode(layer: QuantizedLayer, form: _Form) -> Mapping[str, NDArray[Any]]:
    if form.storage in _FP4:
        return {leaf: stored_tensor(stored).numpy() for leaf, stored in layer.parts.items()}
    extra = form.activations.tensors() if form.activations else {}
    if form.storage == "float-quantized":
        return {**compressed_tensors.encode_floats(layer.read(), form.strategy), **extra}
    made = signed(regrouped(layer.integers(), form.group_size or layer.shape[1]), form.bits, form.zeros)
    if form.storage == "int-quantized":
        return {**compressed_tensors.encode_bytes(made, form.strategy), **extra}
    return {**compressed_tensors.encode(made, form.bits), **extra}


def _layout(layer: QuantizedLayer, form: _Form) -> Layout:
    """Types and shapes of the tensors, without reading the layer."""
    if form.storage in _FP4:
        return {leaf: _stored_layout(stored_tensor(stored)) for leaf, stored in layer.parts.items()}
    rows, columns = layer.shape
    groups = -(-columns // (form.group_size or columns))
    scale = {"tensor": (1,), "block": (-(-rows // (form.group_size or 1)), groups)}.get(form.strategy, (rows, groups))
    layout: dict[str, tuple[ir.DataType, tuple[int, ...]]] = {"weight_scale": (ir.DataType.FLOAT, scale)}
    if form.storage == "float-quantized":
        layout["weight"] = (ir.DataType.FLOAT8E4M3FN, (rows, columns))
    elif form.storage == "int-quantized":
        layout["weight"] = (ir.DataType.INT8, (rows, columns))
        if form.zeros != "middle":
            layout["weight_zero_point"] = (ir.DataType.INT8, scale)
    else:
        layout["weight_packed"] = (ir.DataType.INT32, (rows, num_words(columns, form.bits)))
        layout["weight_shape"] = (ir.DataType.INT64, (2,))
        if form.zeros != "middle":
            layout["weight_zero_point"] = (ir.DataType.INT32, (num_words(rows, form.bits), groups))
        if form.act_order:
            layout["weight_g_idx"] = (ir.DataType.INT32, (columns,))
    return {**layout, **_activation_layout(form)}


def _activation_layout(form: _Form) -> Layout:
    made = form.activations.tensors() if form.activations else {}
    return {leaf: (ir.DataType.from_numpy(array.dtype), array.shape) for leaf, array in made.items()}


def _stored_layout(tensor: ir.TensorProtocol) -> tuple[ir.DataType, tuple[int, ...]]:
    return tensor.dtype, tuple(tensor.shape.numpy())
