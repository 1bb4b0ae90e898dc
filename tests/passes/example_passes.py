"""Passes that exist for tests only: options of every kind, and ways to misbehave."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import onnx_ir as ir

from ingot.errors import PassError
from ingot.passes.base import Pass, PassKind
from ingot.passes.rewriting import make_node, replace_nodes


@dataclass(frozen=True)
class AllOptions(Pass):
    """One option of every kind."""

    name: ClassVar[str] = "all-options"
    kind: ClassVar[PassKind] = "fusion"
    summary: ClassVar[str] = "Has one option of every kind."

    flag: bool = False
    count: int = 1
    ratio: float = 0.5
    label: str = ""
    mode: Literal["fast", "exact"] = "fast"
    bits: Literal["none", 4, 8] = 4
    layers: tuple[str, ...] = ()
    limit: int | None = None
    overrides: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        return ir.passes.PassResult(model, modified=False)


@dataclass(frozen=True)
class NegToAbs(Pass):
    """Turns every Neg into an Abs; `mistake` chooses what it does wrong."""

    name: ClassVar[str] = "neg-to-abs"
    kind: ClassVar[PassKind] = "fusion"
    summary: ClassVar[str] = "Turns Neg into Abs."

    mistake: Literal["", "lies", "breaks", "crashes", "renames"] = ""

    def requires(self, model: ir.Model) -> None:
        if not model.graph.inputs:
            raise PassError("the graph has no inputs; import a checkpoint first")

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        if self.mistake == "crashes":
            raise ZeroDivisionError("division by zero")
        old = [node for node in model.graph if node.op_type == "Neg"]
        for node in old:
            new = make_node("Abs", node.name or "", [node.inputs[0]], [node.outputs[0]])
            replace_nodes(model.graph, node, [node], [new], {node.outputs[0]: new.outputs[0]})
        if self.mistake == "breaks":
            model.graph.insert_before(model.graph.node(0), ir.node("Abs", [model.graph.outputs[0]], name="too-early"))
        if self.mistake == "renames":
            model.graph.outputs[0].name = "other"
        return ir.passes.PassResult(model, modified=bool(old) and self.mistake != "lies")
