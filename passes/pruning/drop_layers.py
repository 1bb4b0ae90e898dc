"""Takes whole layers out of a graph, and numbers those that stay anew."""

import re
from collections.abc import Sequence

import onnx_ir as ir

from ingot.passes.pruning.residual_layers import ResidualLayer
from ingot.passes.weight_sites import drop_if_unused

_NUMBER = re.compile(r"\blayers\.(\d+)(?=\.)")


def drop_layers(graph: ir.Graph, layers: Sequence[ResidualLayer], kept: Sequence[int]) -> None:
    """Keep the layers of these indices: readers of what another gives read what it was given.

    The attentions' attribute `layer` counts the layers that stay, and "layers.<n>." in the names of nodes, values and
    weights is that number.
    """
    numbers = {_number(layers[old].attention): new for new, old in enumerate(kept)}
    for index in reversed([index for index in range(len(layers)) if index not in set(kept)]):
        end = layers[index].end
        ir.convenience.replace_all_uses_with(end, layers[index].start)
        drop_if_unused(graph, end)
    for index in kept:
        attention = layers[index].attention
        attention.attributes["layer"] = ir.AttrInt64("layer", numbers[_number(attention)])
    _rename(graph, numbers)


def _number(attention: ir.Node) -> int:
    number = attention.attributes.get_int("layer")
    assert number is not None, attention.name
    return number


def _rename(graph: ir.Graph, numbers: dict[int, int]) -> None:
    """From the first layer to the last: a new number is the old one or a smaller one that is free by then."""

    def renamed(name: str | None) -> str | None:
        return None if name is None else _NUMBER.sub(lambda found: f"layers.{numbers[int(found[1])]}", name)

    for value in list(graph.initializers.values()):
        if renamed(value.name) != value.name:
            value.name = renamed(value.name)
    for node in graph:
        node.name = renamed(node.name)
        for value in node.outputs:
            value.name = renamed(value.name)
