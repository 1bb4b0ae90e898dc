"""compressed-tensors: each layer in the storage format of its scheme. Layout: checkpoint/formats/compressed_tensors.py.

integers                               pack-quantized, 2 to 8 bits, g_idx too
8-bit integers, quantized inputs       int-quantized
fp8                                    float-quantized
fp4                                    the tensors of a compressed-tensors checkpoint, unchanged
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from ingot.artifact.safetensors import StoredTensor
from ingot.pipeline.checkpoint.formats import compressed_weights
from ingot.pipeline.checkpoint.formats.activations import InputScheme
from ingot.pipeline.checkpoint.formats.codes import num_words
from ingot.pipeline.checkpoint.formats.exact_forms import Zeros, regrouped, signed
from ingot.pipeline.checkpoint.tensors import EMBEDDING
from ingot.pipeline.interchange.folder import (
    AS_IT_IS,
    Layout,
    SafetensorsFiles,
    Source,
    WriteOptions,
    config_of,
    layer_tensors,
)
from ingot.pipeline.interchange.layers import PlainWeight, QuantizedLayer, stored_tensor
from ingot.pipeline.interchange.writers.refusals import (
    LEAST_GROUP,
    SchemeError,
    change_notes,
    changed_form,
    layers_as_floats,
    plain_linear_modules,
    quantized_layers,
    require_layers,
    tables_as_floats,
    whole_group,
)
from ingot.sizes import ceil_div

_FP4 = {"nvfp4-pack-quantized": ("tensor_group", 16), "mxfp4-pack-quantized": ("group", 32)}
_KV_OF_PROJECTION = re.compile(r"\.self_attn\.([kv])_proj\.[kv]_scale$")  # ModelOpt's names


def plan(source: Source, options: WriteOptions = AS_IT_IS) -> SafetensorsFiles:
    """Write each layer, even the head, with its own scheme, and scales of inputs and cache if the source keeps them."""
    weights, notes = tables_as_floats("compressed-tensors", source.weights, options, (EMBEDDING,))
    if options.floats:
        weights, more = layers_as_floats("compressed-tensors", weights, _storage)
        notes += more
    layers = quantized_layers(weights)
    require_layers("compressed-tensors", layers)
    storages = {layer.name: _storage(layer) for layer in layers}
    checkpoint, names = source.checkpoint, {storage.name for storage in storages.values()}
    scales = [_scale(stored) for stored in checkpoint.scales.values()] if source.keep_scales else []
    kv_cache = checkpoint.quantization.get("kv_cache_scheme") if source.keep_scales else None
    quantization = {
        "quant_method": "compressed-tensors",
        "format": names.pop() if len(names) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": _config_groups(layers, storages),
        "ignore": plain_linear_modules(weights),
        "kv_cache_scheme": dict(kv_cache) if kv_cache else None,
    }
    return SafetensorsFiles(
        [*notes, *change_notes(layers, lambda layer: _change(layer, storages[layer.name]))],
        layer_tensors(
            [*weights, *scales],
            lambda layer: _layout(layer, storages[layer.name]),
            lambda layer: _encode(layer, storages[layer.name]),
        ),
        config_of(source, options, quantization),
    )


def _scale(stored: StoredTensor) -> PlainWeight:
    """Return a scale of inputs or of the KV cache under compressed-tensors' name for it, with at least one axis."""
    name = _KV_OF_PROJECTION.sub(r".self_attn.\1_scale", stored.name)
    return PlainWeight(name, stored_tensor(replace(stored, shape=stored.shape or (1,)), name))


@dataclass(frozen=True)
class _Storage:
    """Storage of one layer; layers stored alike share a config group. group_size: None without groups."""

    name: str
    bits: int
    kind: str
    zeros: Zeros
    strategy: str
    group_size: int | None
    act_order: bool
    activations: InputScheme | None

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
            "format": self.name,
            "targets": list(targets),
            "weights": weights,
            "input_activations": self.activations.config() if self.activations else None,
            "output_activations": None,
        }


def _storage(layer: QuantizedLayer) -> _Storage:
    facts = layer.facts
    if layer.activations and layer.activations.outliers:
        raise SchemeError(
            f"compressed-tensors quantizes all of a layer's inputs, but {layer.module} keeps "
            f"{layer.activations.outliers} channels in floats; set outliers to 0 in quantize-activations"
        )
    if layer.storage in _FP4:
        strategy, group = _FP4[layer.storage]
        return _Storage(layer.storage, 4, "float", "middle", strategy, group, False, layer.activations)
    if facts.kind == "float" and facts.bits == 8:
        return _Storage("float-quantized", 8, "float", "middle", *_strategy(layer), False, layer.activations)
    if facts.not_integers:
        raise SchemeError(
            f"compressed-tensors holds integer codes with zero points and fp8, but {layer.module} has {layer.scheme}: "
            f"{facts.not_integers}"
        )
    bits, zeros = _bits(layer)
    if layer.activations and layer.activations.kind == "int" and bits == 8 and not facts.act_order:
        return _Storage("int-quantized", bits, "int", zeros, *_strategy(layer), False, layer.activations)
    columns = _strategy(layer)[1]
    strategy = "channel" if columns is None else "group"
    return _Storage("pack-quantized", bits, "int", zeros, strategy, columns, facts.act_order, layer.activations)


def _bits(layer: QuantizedLayer) -> tuple[int, Zeros]:
    """Return bits and zero points of integer codes: symmetric if that needs no more bits."""
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
    """Return what shares a scale, and the columns of a group or block."""
    facts = layer.facts
    if facts.strategy in ("tensor", "channel"):
        return facts.strategy, None
    group = facts.group_size if facts.strategy == "block" else whole_group(layer)
    if group < LEAST_GROUP:
        raise SchemeError(
            f"compressed-tensors needs columns in multiples of a group, but {layer.module} {list(layer.shape)} has "
            f"{layer.scheme}; choose a block_size that divides them"
        )
    return facts.strategy, group


def _config_groups(layers: Sequence[QuantizedLayer], storages: Mapping[str, _Storage]) -> dict[str, Any]:
    members: dict[_Storage, list[str]] = {}
    for layer in layers:
        storage = storages[layer.name]
        if storage.activations:  # a layer's own static scale is a tensor, not part of the scheme
            storage = replace(storage, activations=replace(storage.activations, scale=None, zero_point=None))
        members.setdefault(storage, []).append(layer.module)
    return {
        f"group_{index}": storage.config(["Linear"] if len(members) == 1 else [f"re:^{re.escape(n)}$" for n in names])
        for index, (storage, names) in enumerate(members.items())
    }


def _change(layer: QuantizedLayer, storage: _Storage) -> str:
    bits = layer.facts.bits if storage.name in _FP4 else storage.bits
    words = changed_form(layer, bits, storage.group_size or layer.facts.group_size)
    if words or not storage.act_order:
        return words
    return "activation order (weight_g_idx), which compressed-tensors 0.19 and later refuse and older ones load"


def _encode(layer: QuantizedLayer, storage: _Storage) -> Mapping[str, NDArray[Any]]:
    if storage.name in _FP4:
        return {leaf: stored_tensor(stored).numpy() for leaf, stored in layer.parts.items()}
    extra = storage.activations.tensors() if storage.activations else {}
    if storage.name == "float-quantized":
        return {**compressed_weights.encode_floats(layer.read(), storage.strategy), **extra}
    made = signed(regrouped(layer.integers(), storage.group_size or layer.shape[1]), storage.bits, storage.zeros)
    if storage.name == "int-quantized":
        return {**compressed_weights.encode_bytes(made, storage.strategy), **extra}
    return {**compressed_weights.encode(made, storage.bits), **extra}


def _layout(layer: QuantizedLayer, storage: _Storage) -> Layout:
    """Return types and shapes of the layer's tensors without reading it."""
    if storage.name in _FP4:
        tensors = {leaf: stored_tensor(stored) for leaf, stored in layer.parts.items()}
        return {leaf: (tensor.dtype, tuple(tensor.shape.numpy())) for leaf, tensor in tensors.items()}
    made = storage.activations.tensors() if storage.activations else {}
    inputs = {leaf: (ir.DataType.from_numpy(array.dtype), array.shape) for leaf, array in made.items()}
    return {**_weight_layout(layer, storage), **inputs}


def _weight_layout(layer: QuantizedLayer, storage: _Storage) -> Layout:
    (rows, columns), group = layer.shape, storage.group_size
    groups = ceil_div(columns, group or columns)
    scale = {"tensor": (1,), "block": (ceil_div(rows, group or 1), groups)}.get(storage.strategy, (rows, groups))
    layout: dict[str, tuple[ir.DataType, tuple[int, ...]]] = {"weight_scale": (ir.DataType.FLOAT, scale)}
    has_zeros = storage.zeros != "middle"
    if storage.name == "float-quantized":
        return {**layout, "weight": (ir.DataType.FLOAT8E4M3FN, (rows, columns))}
    if storage.name == "int-quantized":
        zeros = {"weight_zero_point": (ir.DataType.INT8, scale)} if has_zeros else {}
        return {**layout, "weight": (ir.DataType.INT8, (rows, columns)), **zeros}
    layout["weight_packed"] = (ir.DataType.INT32, (rows, num_words(columns, storage.bits)))
    layout["weight_shape"] = (ir.DataType.INT64, (2,))
    if has_zeros:
        layout["weight_zero_point"] = (ir.DataType.INT32, (num_words(rows, storage.bits), groups))
    if storage.act_order:
        layout["weight_g_idx"] = (ir.DataType.INT32, (columns,))
    return layout
