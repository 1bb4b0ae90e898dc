"""Where an IR can be cut in two with one value in between: at the residual stream."""

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ingot.passes.weight_values import is_stored


@dataclass(frozen=True)
class Piece:
    """Nodes in graph order, the one value that they read of the piece before (None for the first), and their result."""

    nodes: tuple[ir.Node, ...]
    source: ir.Value | None
    output: ir.Value

    @property
    def stored(self) -> list[ir.Value]:
        """Stored values that the nodes read, each once."""
        read = (value for node in self.nodes for value in node.inputs if value is not None)
        return list(dict.fromkeys(value for value in read if is_stored(value)))


def pieces(graph: ir.Graph, shared: frozenset[ir.Node]) -> Sequence[Piece]:
    """The graph but its shared nodes, cut wherever one value is left and a linear layer stands before."""
    nodes = [node for node in graph if node not in shared and not _makes_stored(node)]
    last_reader = {value: at for at, node in enumerate(nodes) for value in node.inputs if value is not None}
    last_reader.update(dict.fromkeys(graph.outputs, len(nodes)))
    found: list[Piece] = []
    live: set[ir.Value] = set()
    start, source = 0, None
    for at, node in enumerate(nodes):
        live.update(node.outputs)
        live = {value for value in live if last_reader.get(value, -1) > at}
        inside = nodes[start : at + 1]
        if len(live) == 1 and (source is None or any(node.op_type == "Gemm" for node in inside)):
            (output,) = live
            found.append(Piece(tuple(inside), source, output))
            start, source = at + 1, output
    return found


def _makes_stored(node: ir.Node) -> bool:
    return any(is_stored(value) for value in node.outputs)
