"""The parts of a sequence's side state: which recurrent layer has which bytes of it."""

from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from ingot.sizes import round_up

StateKind = Literal["convolution", "delta-rule", "scan"]
_ALIGNMENT = 16  # bytes
PART_BYTES = 64
"""A part that Ingot places begins at a multiple of it."""


class StatePart(BaseModel):
    """Bytes offset .. offset + bytes of each slot: the state of one recurrent op of a layer of the model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layer: int = Field(ge=0, lt=2**16)
    kind: StateKind
    offset: int = Field(ge=0)
    bytes: int = Field(ge=1)

    @property
    def end(self) -> int:
        """The offset after it."""
        return self.offset + self.bytes


def place_parts(parts: Iterable[StatePart]) -> tuple[StatePart, ...]:
    """Return the parts one after another, from offset 0 on."""
    placed, end = list[StatePart](), 0
    for part in parts:
        placed.append(part.model_copy(update={"offset": round_up(end, PART_BYTES)}))
        end = placed[-1].end
    return tuple(placed)


def check_parts(parts: Sequence[StatePart], state_bytes: int) -> None:
    """Raise ValueError for parts that overlap, leave the state, have an odd place, or belong to one layer and kind."""
    end, seen = 0, set()
    for part in parts:
        name = f"state: {part.kind} of layer {part.layer}"
        if (part.layer, part.kind) in seen:
            raise ValueError(f"{name} is there twice")
        seen.add((part.layer, part.kind))
        if part.offset < end or part.offset % _ALIGNMENT:
            raise ValueError(
                f"{name} begins at byte {part.offset}; it must be a multiple of {_ALIGNMENT} from {end} on"
            )
        end = part.end
        if end > state_bytes:
            raise ValueError(f"{name} ends at byte {end} of {state_bytes}")
