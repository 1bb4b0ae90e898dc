"""Checks of all writers: refuse a scheme that the format cannot hold, and note each change of form.

A refusal is a SchemeError that names the format, the layer, its scheme and the setting that would fit.
"""

from collections.abc import Callable, Sequence
from math import gcd

from ingot.errors import UsageError
from ingot.pipeline.checkpoint.tensors import EMBEDDING, HEAD
from ingot.pipeline.interchange.folder import WriteOptions
from ingot.pipeline.interchange.layers import PlainWeight, QuantizedLayer, Weight

LEAST_GROUP = 16  # narrower groups than any package has kernels for


class SchemeError(UsageError):
    """A format cannot hold a scheme. flags: options of `ingot export` that change the scheme so that it fits."""

    flags: tuple[str, ...] = ()


def quantized_layers(weights: Sequence[Weight]) -> list[QuantizedLayer]:
    """Return the quantized ones of the weights."""
    return [weight for weight in weights if isinstance(weight, QuantizedLayer)]


def plain_linear_modules(weights: Sequence[Weight]) -> list[str]:
    """Return the linear layers in floats, and the head if it has no tensor because it shares the embedding's."""
    found = [
        weight.name.removesuffix(".weight")
        for weight in weights
        if isinstance(weight, PlainWeight)
        and len(weight.shape) == 2
        and weight.name != EMBEDDING
        and weight.name.endswith(".weight")
    ]
    head = HEAD.removesuffix(".weight")
    return found if any(weight.name == HEAD for weight in weights) else [*found, head]


def tables_as_floats(
    name: str, weights: Sequence[Weight], options: WriteOptions, tables: Sequence[str] = (EMBEDDING, HEAD)
) -> tuple[list[Weight], list[str]]:
    """Return the weights with quantized tables as float32, and a note for each; refused unless widening is allowed."""
    notes = []
    found: list[Weight] = []
    for weight in weights:
        if weight.name not in tables or isinstance(weight, PlainWeight):
            found.append(weight)
            continue
        if not options.widen:
            option = "embedding" if weight.name == EMBEDDING else "lm_head"
            raise SchemeError(
                f"{name} keeps {weight.name} in floats, but it has {weight.scheme}; "
                f"set {option} to none, such as with --set passes.quantize-weights.{option}=none"
            )
        notes.append(f"{weight.name} ({weight.scheme}) becomes float32: {name} keeps it in floats")
        found.append(weight.as_floats())
    return found, notes


def layers_as_floats(
    name: str, weights: Sequence[Weight], require: Callable[[QuantizedLayer], object]
) -> tuple[list[Weight], list[str]]:
    """Return the weights with the layers that `require` refuses as float32, and a note for each reason."""
    found: list[Weight] = []
    reasons: dict[str, str] = {}
    for weight in weights:
        try:
            if isinstance(weight, QuantizedLayer):
                require(weight)
            found.append(weight)
        except SchemeError:
            assert isinstance(weight, QuantizedLayer)
            why = weight.facts.not_integers or f"{name} cannot hold {weight.scheme}"
            reasons[weight.module] = f"float32 instead of codes ({why})"
            found.append(weight.as_floats())
    layers = [layer for layer in quantized_layers(weights) if layer.module in reasons]
    return found, change_notes(layers, lambda layer: reasons[layer.module])


def require_layers(name: str, layers: Sequence[QuantizedLayer]) -> None:
    """Refuse a model without a quantized layer."""
    if not layers:
        raise SchemeError(
            f"{name} holds quantized layers, but nothing is quantized; add quantize-weights to a recipe and run ingot "
            "export, or write safetensors or gguf"
        )


def require_plain_order(name: str, layers: Sequence[QuantizedLayer]) -> None:
    """Refuse activation order."""
    for layer in layers:
        if layer.facts.act_order:
            raise SchemeError(
                f"{name} holds groups of adjacent columns, but {layer.module} has {layer.scheme} (g_idx); "
                "gptq and compressed-tensors hold it"
            )


def require_float16_scales(name: str, layers: Sequence[QuantizedLayer], options: WriteOptions) -> None:
    """Refuse scales that float16 would round, unless rounding is allowed and makes none of them zero or infinite."""
    for layer in layers:
        if not layer.facts.float16_range:
            raise SchemeError(
                f"{name} stores scales as float16, which holds 6e-8 to 65504, and those of {layer.module} "
                f"({layer.scheme}) go beyond; write compressed-tensors"
            )
        if not (layer.facts.float16_scales or options.lossy):
            raise SchemeError(
                f"{name} stores scales as float16, and those of {layer.module} ({layer.scheme}) would change; round "
                "them (ingot export --round-scales, ingot transcode --lossy, or scale_dtype: float16 of the pass that "
                "quantizes), or write compressed-tensors"
            )


def whole_group(layer: QuantizedLayer) -> int:
    """Return the layer's group size, or the largest divisor of it that also divides the columns."""
    return layer.facts.group_size if layer.facts.act_order else gcd(layer.facts.group_size, layer.shape[1])


def changed_form(layer: QuantizedLayer, bits: int, group_size: int, groups: str = "groups") -> str:
    """Describe how the layer's codes and groups differ from those that are written; "" when they do not."""
    if layer.facts.bits != bits:
        return f"{layer.facts.bits} bits are stored in codes of {bits}"
    if layer.facts.group_size != group_size:
        return f"scales of groups of {layer.facts.group_size} repeat for {groups} of {group_size}"
    return ""


def change_notes(layers: Sequence[QuantizedLayer], change: Callable[[QuantizedLayer], str]) -> list[str]:
    """Return a note for each change of form, with the number of layers and the first of them."""
    found: dict[str, list[str]] = {}
    for layer in layers:
        if words := change(layer):
            found.setdefault(words, []).append(layer.module)
    return [f"{words}: {len(names)} layers, {names[0]} the first" for words, names in found.items()]


def inputs_left_out(name: str, layers: Sequence[QuantizedLayer]) -> list[str]:
    """Return a note for each scheme of quantized inputs, which a format of weights alone leaves out."""
    schemes = sorted({layer.activations.words for layer in layers if layer.activations})
    return [f"quantized inputs ({words}) are left out: {name} holds only weights" for words in schemes]
