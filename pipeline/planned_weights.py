"""What the weights of an export will be, as far as it is known before anything is quantized.

A format that has no place for a scheme can so be refused before a calibration that takes hours. What only the rounding
shows (whether float16 holds the scales, whether a zero point is 0) is taken to be as the format likes it; it is checked
again on the weights themselves.
"""

from collections.abc import Iterable, Sequence
from typing import NoReturn

import onnx_ir as ir

from ingot.passes.base import Pass
from ingot.passes.quantization.quantize_weights import QuantizeWeights
from ingot.passes.quantization.scale_search import Scheme
from ingot.pipeline.formats.exact import MAX_BITS
from ingot.pipeline.formats.layers import ExportedWeight, LayerFacts, PlainWeight, QuantizedLayer
from ingot.pipeline.tensors import EMBEDDING, HEAD

KEEP_SCHEMES = ("awq", "rotate", "round-scales")  # these change numbers, and nothing that a format has to hold


def planned_weights(model: ir.Model, passes: Sequence[Pass], names: Iterable[str]) -> list[ExportedWeight] | None:
    """The named weights as these passes will leave an imported model's; None where a pass decides as it goes."""
    found: dict[str, ExportedWeight] = {}
    for made in passes:
        if isinstance(made, QuantizeWeights):
            found = _layers(made, model) | found  # a weight that is quantized is left alone by what follows
        elif made.name not in KEEP_SCHEMES:
            return None
    plain = {name: _plain(model, name) for name in names if name not in found}
    weights = {name: found.get(name) or plain[name] for name in dict.fromkeys([*names, *found])}
    return None if None in weights.values() else [weight for weight in weights.values() if weight is not None]


def _layers(made: QuantizeWeights, model: ir.Model) -> dict[str, ExportedWeight]:
    layers: dict[str, ExportedWeight] = {}
    for (weight, scheme), sites in made.plan(model).items():
        name, shape = weight.name or "", weight.shape
        assert shape is not None
        if name == EMBEDDING and all(site.role == "head" for site in sites):
            name = HEAD  # a tied head that is quantized otherwise than the table gets a tensor of its own
        rows, columns = (int(size) for size in shape.numpy())
        layers[name] = QuantizedLayer(name, _facts((rows, columns), scheme), _not_made)
    return layers


def _facts(shape: tuple[int, int], scheme: Scheme) -> LayerFacts:
    middle = scheme.bits if scheme.symmetric else scheme.bits + 1
    group_size = min(scheme.block_columns(shape[1]), shape[1])
    return LayerFacts(
        shape=shape,
        bits=scheme.bits,
        kind="integer",
        group_size=group_size,
        strategy="channel" if group_size == shape[1] else "group",
        bits_for={
            "middle": middle if middle <= MAX_BITS else None,
            "from zero": scheme.bits,
            "from one": scheme.bits,
        },
        not_integers="",
        act_order=False,
        minima=False,
        float16_scales=True,
        q4_1=True,
    )


def _plain(model: ir.Model, name: str) -> PlainWeight | None:
    """None for a weight that came quantized."""
    value = model.graph.initializers.get(name)
    return None if value is None or value.const_value is None else PlainWeight(name, value.const_value)


def _not_made() -> NoReturn:
    raise AssertionError("a planned layer has no codes yet")
