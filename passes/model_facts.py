"""Typed facts that go with the IR: what importer and passes record on a model, and later stages read.

    MODEL.of(model).vocab_size
    KV.record(model, geometry)

A pass that leaves facts has a `Fact` of its own, under "ingot." and its name; evidence/passes.json shows it. Facts are
kept as text in the model's metadata, so that clones, the printed IR and exported ONNX files have them too. Only this
module reads and writes that text.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any, Generic, TypeVar

import onnx_ir as ir
from pydantic import BaseModel, TypeAdapter

from ingot.artifact import KVGeometry, ModelFacts
from ingot.artifact.programs.expert_choices import ExpertChoices
from ingot.errors import PassError

T = TypeVar("T")
Rows = list[dict[str, Any]]  # figures of weights or layers, one row each
_PREFIX = "ingot."


class Fact(Generic[T]):
    """One kind of fact: its name in the model's metadata and its type.

    to_json    turns a value into what its JSON holds, where that is not the value's own fields
    """

    def __init__(self, key: str, type_: type[T], to_json: Callable[[T], object] | None = None) -> None:
        self.key = key
        self._type = type_
        self._adapter: TypeAdapter[T] = TypeAdapter(type_)
        self._to_json = to_json

    def is_in(self, model: ir.Model) -> bool:
        """Whether the model has this fact."""
        return self.key in model.metadata_props

    def find(self, model: ir.Model) -> T | None:
        """The model's value, or None."""
        text = model.metadata_props.get(self.key)
        if text is None:
            return None
        return self._adapter.validate_python(text) if self._type is str else self._adapter.validate_json(text)

    def of(self, model: ir.Model) -> T:
        """The model's value; PassError where it has none."""
        found = self.find(model)
        if found is None:
            raise PassError(f"the model has no fact {self.key!r}; import it from a checkpoint, or record the fact")
        return found

    def record(self, model: ir.Model, value: T) -> None:
        """Set the model's value."""
        model.metadata_props[self.key] = self._text(value)

    def _text(self, value: T) -> str:
        if isinstance(value, str):
            return value
        if isinstance(value, BaseModel):
            return value.model_dump_json()
        if self._to_json is not None:
            return json.dumps(self._to_json(value))
        return json.dumps(asdict(value) if is_dataclass(value) and not isinstance(value, type) else value)


@dataclass(frozen=True)
class WeightFacts:
    """Figures of weights that one or several passes changed, a row for each, in the order of the changes."""

    weights: Rows = field(default_factory=list)


def record_weights(model: ir.Model, fact: Fact[WeightFacts], rows: Rows) -> None:
    """Add rows to the model's own."""
    before = fact.find(model) or WeightFacts()
    fact.record(model, WeightFacts([*before.weights, *rows]))


MODEL = Fact("ingot.model", ModelFacts)
KV = Fact("ingot.kv", KVGeometry)
DTYPE = Fact("ingot.dtype", str)  # the checkpoint's 16-bit type: bfloat16 or float16
CHECKPOINT = Fact("ingot.checkpoint", str)  # name of its folder
EXPERT_CHOICES = Fact("ingot.expert-choices", ExpertChoices)  # measured on calibration text
DEQUANTIZED = Fact("ingot.dequantized", dict[str, str])  # weight that became floats -> why the IR cannot hold its codes


def pass_facts(model: ir.Model, names: Iterable[str]) -> dict[str, Any]:
    """Name of a pass -> the facts that it recorded, of those passes that recorded any."""
    found = {name: model.metadata_props.get(f"{_PREFIX}{name}") for name in names}
    return {name: json.loads(text) for name, text in found.items() if text is not None}
