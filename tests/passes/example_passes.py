"""Third-party passes for tests: options of every kind, ways to misbehave, facts; and a way to install them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from typing import ClassVar, Literal

import onnx_ir as ir
import pytest

from ingot.errors import PassError
from ingot.passes import registry
from ingot.passes.base import Pass, PassKind
from ingot.passes.rewriting import make_node, replace_nodes


def install(monkeypatch: pytest.MonkeyPatch, *points: tuple[str, str]) -> None:
    """Make these entry points (name, value) the only installed ones."""
    found = [EntryPoint(name, value, registry.ENTRY_POINT_GROUP) for name, value in points]
    monkeypatch.setattr(registry, "entry_points", lambda group: found if group == registry.ENTRY_POINT_GROUP else [])


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


@dataclass(frozen=True)
class HalveWeights(Pass):
    """A lossy pass that declares no facts, so that the defaults judge it."""

    name: ClassVar[str] = "halve-weights"
    kind: ClassVar[PassKind] = "quantization"
    summary: ClassVar[str] = "Halves every weight."

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        return ir.passes.PassResult(model, modified=True)


@dataclass(frozen=True)
class RoundWeights(HalveWeights):
    """A lossy pass that declares that it only rounds, and what it needs; `float8` and `kv` change the facts."""

    name: ClassVar[str] = "round-weights"
    changes_weights: ClassVar[bool] = False
    keeps_schemes: ClassVar[bool] = True
    needs_calibration: ClassVar[bool] = True

    float8: bool = False
    kv: Literal["fp8", "none"] = "none"

    @property
    def needs_float8(self) -> bool:
        return self.float8

    @property
    def kv_precision(self) -> Literal["fp8"] | None:
        return None if self.kv == "none" else self.kv


@dataclass(frozen=True)
class AssignSchemes(HalveWeights):
    """Assigns schemes for a later pass to apply."""

    name: ClassVar[str] = "assign-schemes"
    assigns_schemes: ClassVar[bool] = True
