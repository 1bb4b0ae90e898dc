"""What a format cannot hold, said with the scheme at hand, the layer, and the setting that would fit.

Each function refuses with SchemeError, or says in a note in which other form of the same values weights are written.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from math import gcd

from ingot.errors import UsageError
from ingot.pipeline.checkpoint.tensors import EMBEDDING, HEAD
from ingot.pipeline.interchange.folder import WriteOptions, as_floats
from ingot.pipeline.interchange.layers import PlainWeight, QuantizedLayer, Weight

LEAST_GROUP = 16  # narrower groups than any package has kernels for


class SchemeError(UsageError):
    """A format has no place for a scheme."""


def tables_as_floats(
    name: str, weights: Sequence[Weight], options: WriteOptions, tables: Sequence[str] = (EMBEDDING, HEAD)
) -> tuple[list[Weight], list[str]]:
    """The weights with a quantized embedding or head as float32, and notes; refused where forms must stay."""
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
                f"set {option} to none, such as with --set passes.quantize-weights.{option}=none, or export to gguf"
            )
        notes.append(f"{weight.name} ({weight.scheme}) becomes float32: {name} keeps it in floats")
        found.append(as_floats(weight))
    return found, notes


def layers_as_floats(
    name: str, weights: Sequence[Weight], require: Callable[[QuantizedLayer], object]
) -> tuple[list[Weight], list[str]]:
    """The weights with layers that `require` refuses as float32, and a note per reason."""
    found: list[Weight] = []
    reasons: dict[str, str] = {}
    for weight in weights:
        try:
            if isinstance(weight, QuantizedLayer):
                require(weight)
            found.append(weight)
        except SchemeError:
            assert isinstance(weight, QuantizedLayer)
            why = weight.facts.not_integers or f"{name} has no place for {weight.scheme}"
            reasons[weight.module] = f"float32 in place of codes ({why})"
            found.append(as_floats(weight))
    layers = [layer for layer in quantized_layers(weights) if layer.module in reasons]
    return found, changed_forms(layers, lambda layer: reasons[layer.module])


def require_layers(name: str, layers: Sequence[QuantizedLayer]) -> None:
    """Refuse a model without a quantized layer."""
    if not layers:
        raise SchemeError(
            f"{name} holds quantized layers, but nothing is quantized; add quantize-weights to a recipe and run ingot "
            "export, or write safetensors or gguf"
        )


def require_integers(name: str, layers: Sequence[QuantizedLayer]) -> None:
    """Refuse codes that are floats, and minima that are no whole zero points."""
    for layer in layers:
        if layer.facts.not_integers:
            raise SchemeError(
                f"{name} holds integer codes with zero points, but {layer.module} has {layer.scheme}: "
                f"{layer.facts.not_integers}"
            )


def require_plain_order(name: str, layers: Sequence[QuantizedLayer]) -> None:
    """Refuse act-order."""
    for layer in layers:
        if layer.facts.act_order:
            raise SchemeError(
                f"{name} holds groups of neighbouring columns, but {layer.module} has {layer.scheme} (g_idx); "
                "gptq and compressed-tensors hold it"
            )


def require_one_scheme(name: str, layers: Sequence[QuantizedLayer], options: WriteOptions) -> QuantizedLayer:
    """The first layer; refused when another has another scheme, unless wider forms are allowed."""
    first = layers[0]
    for layer in layers:
        if not options.widen and (_key(layer) != _key(first)):
            raise SchemeError(
                f"{name} has one scheme for all layers, but {first.module} has {first.scheme} and {layer.module} "
                f"{layer.scheme}; take the overrides out, or export to compressed-tensors or gguf"
            )
    return first


def _key(layer: QuantizedLayer) -> tuple[int, bool]:
    return layer.facts.bits, layer.facts.symmetric


def require_float16_scales(name: str, layers: Sequence[QuantizedLayer], options: WriteOptions) -> None:
    """Refuse scales that change when they are stored in 16 bits, unless that is asked for."""
    for layer in layers:
        if not (layer.facts.float16_scales or options.lossy):
            raise SchemeError(
                f"{name} stores scales as float16, and those of {layer.module} ({layer.scheme}) would change; round "
                "them (ingot export --round-scales, ingot transcode --lossy, or the pass round-scales behind the "
                "quantization), or write compressed-tensors"
            )


def require_multiple(name: str, layer: QuantizedLayer, axis: int, of: int) -> None:
    """Refuse a side of a weight that does not fill whole words or blocks."""
    if layer.shape[axis] % of:
        side = ("rows", "columns")[axis]
        raise SchemeError(
            f"{name} wants {side} in multiples of {of}, but {layer.module} is {list(layer.shape)}; leave it out with "
            'overrides: {NAME: "none"} where the format allows that, or export to compressed-tensors'
        )


def common_group(name: str, layers: Sequence[QuantizedLayer]) -> int:
    """The largest group that all layers' scales can be repeated for; 0 where each has a scale per row."""
    if all(layer.facts.group_size == layer.shape[1] for layer in layers):
        return 0
    group = reduce(gcd, (whole_group(layer) for layer in layers))
    for layer in layers:
        if group < LEAST_GROUP or (layer.facts.act_order and group != layer.facts.group_size):
            raise SchemeError(
                f"{name} has one group size for all layers, and {layer.module} {list(layer.shape)} has {layer.scheme}; "
                f"the largest that all share is {group}; write compressed-tensors"
            )
    return group


def whole_group(layer: QuantizedLayer) -> int:
    """The layer's group, or the largest part of it that fills rows."""
    return layer.facts.group_size if layer.facts.act_order else gcd(layer.facts.group_size, layer.shape[1])


def changed_forms(layers: Sequence[QuantizedLayer], form: Callable[[QuantizedLayer], str]) -> list[str]:
    """One note per change of form, with how many layers it happened to and the first of them."""
    found: dict[str, list[str]] = {}
    for layer in layers:
        if said := form(layer):
            found.setdefault(said, []).append(layer.module)
    return [f"{said}: {len(names)} layers, {names[0]} the first" for said, names in found.items()]


def inputs_left_out(name: str, layers: Sequence[QuantizedLayer]) -> list[str]:
    """Notes on quantized inputs, which a format that holds weights alone leaves out."""
    schemes = sorted({layer.activations.words for layer in layers if layer.activations})
    return [f"quantized inputs ({words}) are left out: {name} holds weights alone" for words in schemes]


def quantized_layers(weights: Sequence[Weight]) -> list[QuantizedLayer]:
    """Those of the weights that are quantized."""
    return [weight for weight in weights if isinstance(weight, QuantizedLayer)]


def plain_linear_modules(weights: Sequence[Weight]) -> list[str]:
    """Linear layers that are left in floats, and the head among them, which may share the table and have no tensor."""
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
