"""Service levels by name: the times that a request must meet, from service_levels.yaml."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from ingot.errors import UsageError, unknown
from ingot.planning.data_file import read_data_file

SHIPPED = Path(__file__).with_name("service_levels.yaml")
_Seconds = Annotated[float, Field(gt=0, le=1e6)]
_Tokens = Annotated[int, Field(ge=1, le=2**31)]


class LevelBounds(BaseModel):
    """Bounds in seconds; None for no bound. service_levels.yaml describes the fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    words: str
    ttft: _Seconds | None = None
    tpot: _Seconds | None = None
    end_to_end: _Seconds | None = None
    percentile: float = Field(default=0.95, gt=0, lt=1)
    prompt_tokens: _Tokens = 1024
    output_tokens: _Tokens = 256

    @property
    def bounds(self) -> dict[str, float]:
        """Name of each bounded time -> its bound."""
        found = {"ttft": self.ttft, "tpot": self.tpot, "end_to_end": self.end_to_end}
        return {name: bound for name, bound in found.items() if bound is not None}

    def failures(self, seconds: Mapping[str, float]) -> list["MissedBound"]:
        """The bounds that these times do not meet, the worst first."""
        found = [
            MissedBound(name, seconds[name], bound) for name, bound in self.bounds.items() if seconds[name] > bound
        ]
        return sorted(found, key=lambda failure: -failure.factor)


@dataclass(frozen=True)
class MissedBound:
    """A bound that a time does not meet."""

    name: str
    seconds: float
    bound: float

    @property
    def factor(self) -> float:
        """How many times the bound it takes."""
        return self.seconds / self.bound

    def __str__(self) -> str:
        """The failure in words."""
        name = {"ttft": "TTFT", "tpot": "TPOT", "end_to_end": "end to end"}[self.name]
        return f"{name} {self.seconds * 1e3:.3g} ms, {self.factor:.2f} times the bound of {self.bound * 1e3:.3g} ms"


@cache
def service_levels() -> dict[str, LevelBounds]:
    """All service levels by name."""
    return TypeAdapter(dict[str, LevelBounds]).validate_python(read_data_file(SHIPPED))


def find_service_level(name: str) -> LevelBounds:
    """The level of that name. UsageError with the nearest names for another."""
    if name not in service_levels():
        raise UsageError(unknown("service level", name, sorted(service_levels())))
    return service_levels()[name]
