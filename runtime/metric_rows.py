"""Rows of metrics, in the annotation of the field that has the value.

    num_swaps: Annotated[int, counter("num_swaps", "requests", "Preempted requests that resumed from a tier.")]

`rows_of` makes the table of them; the Prometheus text, the server's /metrics, the JSON of `ingot run --stats`, the
diagnosis of scrapes and the tables in docs/ follow from it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, Literal, get_args, get_type_hints

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True)
class Metric:
    """A row of the table. `source` is the attribute of EngineMetrics that has it, `label` the name of its label.

    A metric that vLLM's dashboards have has vLLM's name. In a field's annotation `source` is left out, or names a
    property of the same class.
    """

    name: str
    kind: Kind
    unit: str
    source: str
    help: str
    label: str = ""
    in_vllm: bool = False

    @property
    def family_name(self) -> str:
        """Its name in Prometheus text, without the suffix of its kind: in vLLM's namespace, or in Ingot's."""
        return f"vllm:{self.name}" if self.in_vllm else f"ingot_{self.name}"

    @property
    def exported_name(self) -> str:
        """Its name in Prometheus text: counters end in _total."""
        is_total = self.kind == "counter" and not self.name.endswith("_total")
        return f"{self.family_name}_total" if is_total else self.family_name

    def read(self, metrics: object) -> Any:
        """Return its value; None where the engine does not have the part that it is about."""
        value: Any = metrics
        for attribute in self.source.split("."):
            value = None if value is None else getattr(value, attribute)
        return value


def counter(name: str, unit: str, help: str, *, label: str = "", source: str = "", in_vllm: bool = False) -> Metric:
    """Return the row of a value that only grows."""
    return Metric(name, "counter", unit, source, help, label, in_vllm)


def gauge(name: str, unit: str, help: str, *, label: str = "", source: str = "", in_vllm: bool = False) -> Metric:
    """Return the row of a value that rises and falls."""
    return Metric(name, "gauge", unit, source, help, label, in_vllm)


def histogram(name: str, unit: str, help: str, *, in_vllm: bool = False) -> Metric:
    """Return the row of a histogram."""
    return Metric(name, "histogram", unit, "", help, in_vllm=in_vllm)


def rows_of(kind: type, path: str = "") -> Iterator[Metric]:
    """Return the rows of a dataclass and of the dataclasses in it, in the order of their fields."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        for row in getattr(hint, "__metadata__", ()):
            if isinstance(row, Metric):
                yield replace(row, source=f"{path}{row.source or name}")
        for part in get_args(hint):
            if is_dataclass(part) and isinstance(part, type):
                yield from rows_of(part, f"{path}{name}.")
