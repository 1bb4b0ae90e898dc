"""Input and output of the rules. A finding is a cause, with the numbers that led to it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ingot.runtime.doctor.machine import MachineWindow
from ingot.runtime.doctor.scrapes import ScrapeWindow


@dataclass(frozen=True)
class Finding:
    """A cause. `weight` is roughly the share of the service that it costs, from 0 to 1; findings are ranked by it."""

    name: str
    symptom: str
    cause: str
    action: str
    weight: float
    numbers: Mapping[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        """The finding as JSON."""
        return {
            "name": self.name,
            "symptom": self.symptom,
            "cause": self.cause,
            "action": self.action,
            "weight": round(self.weight, 3),
            "numbers": {name: round(value, 6) for name, value in self.numbers.items()},
        }


@dataclass(frozen=True)
class ObservedFacts:
    """What was read: metrics of one model and of its server, and the machine, where the server runs on this one.

    max_requests   open requests that the server will have, for a check before it starts
    """

    metrics: ScrapeWindow | None = None
    machine: MachineWindow | None = None
    max_requests: int | None = None


def engine_threads(facts: ObservedFacts) -> float | None:
    """Threads that the engine computes with; None where they are not known. 0: it computes on a GPU."""
    found = facts.metrics.now("compute_threads") if facts.metrics else None
    return facts.machine.after.threads if found is None and facts.machine else found


def engine_cores(facts: ObservedFacts) -> float | None:
    """Processors that the engine may use, as its server reports them, else those of this process."""
    found = facts.metrics.now("usable_cores") if facts.metrics else None
    return facts.machine.after.cores if found is None and facts.machine else found


Rule = Callable[[ObservedFacts], Finding | None]
