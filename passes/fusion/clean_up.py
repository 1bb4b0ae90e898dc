"""The pass clean-up: removes ops without effect and unused nodes, and sorts the rest.

    Matched                                         Replacement
    Identity(x);  Cast(x; to the dtype x has)       x
    Squeeze(Unsqueeze(x, axes), axes), and back     x
    two equal nodes on the same inputs              the first of them
    an unused node or initializer                   nothing
    nodes out of order                              a stable topological sort

Names of graph inputs and outputs stay. Weights are not read: two equal initializers stay two.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir
from onnx_ir.passes import common

from ingot.passes.base import Pass, PassKind
from ingot.passes.printing import model_to_text
from ingot.passes.rewriting import small_constant

_INVERSE = {"Squeeze": "Unsqueeze", "Unsqueeze": "Squeeze"}


@dataclass(frozen=True)
class CleanUp(Pass):
    """No options."""

    name: ClassVar[str] = "clean-up"
    kind: ClassVar[PassKind] = "clean-up"
    summary: ClassVar[str] = "Removes identities, duplicates and dead nodes, and sorts the rest."

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Sort first, because the other steps walk in order; repeat until nothing changes.

        `modified` compares the program's text: onnx_ir's passes drop optional outputs without reporting it.
        """
        before = text = model_to_text(model)
        while True:
            for step in _STEPS:
                step(model)
            last, text = text, model_to_text(model)
            if last == text:
                return ir.passes.PassResult(model, modified=text != before)


def _remove_no_ops(model: ir.Model) -> None:
    """Remove casts to the same dtype, and pairs of squeezes that cancel. A node that makes a graph output stays."""
    for node in list(model.graph):
        source = _unchanged_input(node)
        if source is not None and not node.outputs[0].is_graph_output():
            ir.convenience.replace_all_uses_with(node.outputs[0], source)
            model.graph.remove(node, safe=True)


def _unchanged_input(node: ir.Node) -> ir.Value | None:
    """The input that the node's output equals, if any."""
    source = node.inputs[0] if node.inputs and node.domain == "" else None
    if source is None:
        return None
    if node.op_type == "Cast":
        is_same = source.dtype is not None and source.dtype == node.attributes["to"].as_int()
        return source if is_same else None
    producer = source.producer()
    if producer is None or producer.domain != "" or producer.op_type != _INVERSE.get(node.op_type):
        return None
    return producer.inputs[0] if _axes(node) is not None and _axes(node) == _axes(producer) else None


def _axes(node: ir.Node) -> list[int] | None:
    """Constant axes of a Squeeze or Unsqueeze; None where they are computed or omitted."""
    return small_constant(node.inputs[1]) if len(node.inputs) > 1 else None


_STEPS: tuple[Callable[[ir.Model], object], ...] = (
    common.TopologicalSortPass(),
    common.IdentityEliminationPass(),
    _remove_no_ops,
    common.CommonSubexpressionEliminationPass(),
    common.RemoveUnusedNodesPass(),
)
