"""The pass fuse-residual-norm: a residual addition and the norm that reads it, as one kernel.

    Matched         sum = Add(x, skip)                                      [T, hidden] both
                    normed = RMSNormalization(sum, gamma; axis=-1, epsilon)     or LayerNormalization(sum, gamma, beta?)
                    ... the next residual reads sum too

    Replacement     normed, _, _, sum = com.microsoft::SkipSimplifiedLayerNormalization(x, skip, gamma; epsilon)
                    or com.microsoft::SkipLayerNormalization(x, skip, gamma, beta?; epsilon)

The fourth output is omitted where only the norm reads the sum. `sum` keeps its bits; `normed` differs in the last ones,
because the fused kernel adds the squares in another order.

When it pays: on engines that launch each op on a device. onnxruntime's CPU kernel is up to three times slower than
the two ops it replaces (docs/log.md), so no recipe for the CPU lists this pass.

Refuses: an addition that broadcasts; a norm over another axis, with another stash type, or whose gamma or beta is not a
vector of the hidden size; a sum with a reader before the norm, where the fused node would come too late. A norm without
an addition before it, such as the post-norms of attention and feed-forward, does not match.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from ingot.passes.base import Pass, PassKind
from ingot.passes.rewriting import Refusal, make_node, replace_nodes, settle, static_columns

FUSED_OPS = {"RMSNormalization": "SkipSimplifiedLayerNormalization", "LayerNormalization": "SkipLayerNormalization"}


@dataclass(frozen=True)
class FuseResidualNorm(Pass):
    """Options:

    strict    an addition that feeds a norm and cannot be fused is an error
    """

    name: ClassVar[str] = "fuse-residual-norm"
    kind: ClassVar[PassKind] = "fusion"
    summary: ClassVar[str] = "Fuses a residual addition and the norm after it into one op."

    strict: bool = False

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Fuse every place that matches, in graph order."""
        matches = list(_find(model.graph))
        checked = [(match, _check(match, model.graph)) for match in matches]
        fusable = [match for match, refusal in checked if refusal is None]
        for match in fusable:
            _replace(model.graph, match)
        refusals = [refusal for _, refusal in checked if refusal is not None]
        is_present = any(node.op_type in FUSED_OPS.values() for node in model.graph)
        settle(self.name, refusals, strict=self.strict, is_present=is_present)
        return ir.passes.PassResult(model, modified=bool(fusable))


@dataclass(frozen=True)
class _Match:
    add: ir.Node
    norm: ir.Node


def _find(graph: ir.Graph) -> Iterator[_Match]:
    """The first norm of every sum."""
    for add in graph:
        norms = [node for node in add.outputs[0].consumers() if node.op_type in FUSED_OPS]
        if add.op_type == "Add" and norms and norms[0].inputs[0] is add.outputs[0]:
            yield _Match(add, norms[0])


def _check(match: _Match, graph: ir.Graph) -> Refusal | None:
    add, norm = match.add, match.norm
    left, right, *vectors = *add.inputs[:2], *norm.inputs[1:]
    if left is None or right is None or left.shape is None or left.shape != right.shape or len(left.shape) != 2:
        return Refusal(add.name or "", "does not add two [tokens, hidden] values of one shape")
    for what, vector in zip(("scale", "bias"), vectors, strict=False):
        if vector is None or vector.shape is None or list(vector.shape) != [static_columns(left)]:
            return Refusal(norm.name or "", f"has a {what} that is not a vector of the hidden size")
    if len(norm.outputs) > 1:
        return Refusal(norm.name or "", "makes more than the norm")
    if norm.attributes.get_int("axis", -1) not in (-1, 1) or norm.attributes.get_int("stash_type", 1) != 1:
        return Refusal(norm.name or "", "does not normalize the last axis in float32")
    early = _reader_before(graph, add.outputs[0], norm)
    if early is not None:
        return Refusal(early, f"reads the sum before the norm {norm.name!r}")
    return None


def _reader_before(graph: ir.Graph, value: ir.Value, norm: ir.Node) -> str | None:
    """Name of a node before the norm that reads the value."""
    readers = set(value.consumers())
    for node in graph:
        if node is norm:
            return None
        if node in readers:
            return node.name or ""
    return None


def _replace(graph: ir.Graph, match: _Match) -> None:
    add, norm = match.add, match.norm
    total, normed = add.outputs[0], norm.outputs[0]
    is_sum_read = len(total.uses()) > 1 or total.is_graph_output()
    fused = make_node(
        FUSED_OPS[norm.op_type],
        norm.name or "",
        [*add.inputs[:2], *norm.inputs[1:]],
        [normed, None, None, total] if is_sum_read else [normed],
        domain="com.microsoft",
        epsilon=norm.attributes.get_float("epsilon", 1e-5),
    )
    values = {normed: fused.outputs[0]}
    if is_sum_read:
        values[total] = fused.outputs[3]
    replace_nodes(graph, norm, [norm, add], [fused], values)
